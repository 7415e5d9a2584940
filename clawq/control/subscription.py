"""A worker subscribes to the queues of the runs that exist, and tells each of them that it is there.

A thread looks at the registry of runs once a second (oftener while it serves none) and writes heartbeats; it never
touches Celery. A timer of Celery's own event loop compares what the thread saw with what the consumer consumes, and
adds or cancels queues: in the loop's thread, so it works the same with threads, prefork and solo. Nothing is remembered
besides: after a reconnect Celery consumes what it consumed before, and the comparison goes on from there.

While the broker is away the last known runs stay subscribed; clawq.control.outage says what is told. Cancelling a queue
loses nothing: a message that was already on its way goes back to the queue.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from celery import bootsteps
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks

from clawq import progress
from clawq.control import pool_process
from clawq.control.consumption import LOST_S, Consumption
from clawq.control.lifecycle import force_exit
from clawq.control.outage import Outage, gone_for_good
from clawq.control.pool_process import Identity
from clawq.control.queues import ACTIVE_STATES, DEFAULT_QUEUE, make_queue, run_queues
from clawq.control.stopped import STOPPED_S, StoppedChildren
from clawq.control.supervisor import restarts_so_far
from clawq.errors import TransportError
from clawq.transport.client import connect
from clawq.transport.commands import Commands
from clawq.transport.control import Heartbeat, Heartbeats, RunRecord, RunRegistry
from clawq.transport.keys import CELERY_PREFIX

log = logging.getLogger(__name__)

#: How often the registry is read and heartbeats are written, seconds; and the same while there is nothing to serve: the
#: first run shall not wait.
WATCH_S, IDLE_WATCH_S = 1.0, 0.2
#: How often the consumer is compared with that, seconds; nothing is asked of anybody then.
COMPARE_S = 0.1
#: Exit status of a worker whose consumer is lost.
CONSUMER_LOST = 74
_ROLLOUT = "clawq.rollout"


def wanted_queues(runs: Iterable[RunRecord], only: frozenset[str] | None) -> set[str]:
    """The queues that a worker should consume.

    Args:
        runs: all runs in the registry.
        only: run ids that this worker serves; None = all.
    """
    served = [run for run in runs if run.state in ACTIVE_STATES and (only is None or run.run_id in only)]
    return {DEFAULT_QUEUE, *(queue for run in served for queue in run_queues(run.run_id))}


class Watch:
    """The thread: reads the registry, writes heartbeats."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._runs: list[RunRecord] = []
        broker_url, data_url = identity.settings.require_urls()
        broker = connect(broker_url)
        self._registry, self._commands = RunRegistry(broker), Commands(broker)
        self._data = connect(data_url)
        self._consumption, self._stopped = Consumption(), StoppedChildren()
        self._name = identity.name
        self._outage = Outage("data", data_url)
        #: What the consumer should consume; None until the registry was read once.
        self.wanted: set[str] | None = None
        threading.Thread(target=self._run, name="clawq-watch", daemon=True).start()

    @property
    def ending(self) -> bool:
        """Whether the worker is ending."""
        return self._identity.shutdown.begun

    def _run(self) -> None:
        while not self._identity.shutdown.wait(WATCH_S if self._runs else IDLE_WATCH_S):
            try:
                self._look_after_children()
                try:
                    self._look()
                    self._look_after_consumer()
                # The consumer itself tells of the broker.
                except TransportError:
                    self._consumption.forget()
                _follow(self._outage, self._beat)
            # This thread is the worker's only eye: nothing odd in a record may close it.
            except Exception:
                log.exception("the registry of runs could not be read; trying again")
        self._leave()

    def _look(self) -> None:
        """Read the registry."""
        only = self._identity.settings.runs
        runs = self._registry.list()
        self._runs = [run for run in runs if run.state in ACTIVE_STATES and (only is None or run.run_id in only)]
        self.wanted = wanted_queues(runs, only)

    def _look_after_children(self) -> None:
        if self._identity.pool == "prefork" and (count := self._stopped.look(time.monotonic())):
            log.error("%d pool processes were stopped for more than %.0f s and are replaced", count, STOPPED_S)

    def _look_after_consumer(self) -> None:
        """Begin anew if the worker takes nothing up any more; nobody else in this process would notice."""
        identity, queues = self._identity, sorted(self.wanted or ())
        free = len(state.active_requests) < identity.concurrency
        waiting = self._commands.waiting([CELERY_PREFIX + queue for queue in queues]) if free else 0
        if not self._consumption.look(time.monotonic(), waiting, free, sum(state.total_count.values())):
            return
        self._consumption.forget()
        log.error("%d commands wait, and this worker has taken none for %.0f s: its consumer is lost", waiting, LOST_S)
        if identity.pulse is None:
            log.error("nobody supervises this worker; start it again (or use `clawq worker start`, which would)")
        elif not identity.shutdown.begun:
            force_exit(CONSUMER_LOST)

    def _beat(self) -> None:
        busy = min(_active_leases(), self._identity.slots)
        for run in self._runs:
            beat = Heartbeat(
                self._name,
                self._identity.slots,
                busy,
                socket.gethostname(),
                _foremost(self._identity),
                restarts=restarts_so_far(),
            )
            Heartbeats(self._data, run.keys).beat(beat)

    def _leave(self) -> None:
        for run in self._runs:
            try:
                Heartbeats(self._data, run.keys).leave(self._name)
            except TransportError:
                return


class Subscription(bootsteps.StartStopStep):  # type: ignore[misc]  # celery has no types
    """Celery bootstep: keeps the consumer's queues equal to what the watch wants."""

    requires = (Tasks,)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        self._watch: Watch | None = None
        self._timer: Any = None
        super().__init__(consumer, **kwargs)

    def start(self, consumer: Any) -> None:
        """The consumer is connected, again perhaps."""
        identity = pool_process.identity()
        if identity is None:
            return
        if identity.pulse is not None:
            identity.pulse.ready()
        if self._watch is None:
            self._watch = Watch(identity)
        # call_soon: the comparison then runs in the consumer's own thread even where timers have a thread.
        self._timer = consumer.timer.call_repeatedly(COMPARE_S, consumer.call_soon, (self._compare, consumer))

    def stop(self, consumer: Any) -> None:
        """The connection is gone, or the worker ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _compare(self, consumer: Any) -> None:
        watch = self._watch
        # Here, in the consumer's own loop, since this is what must not stand still.
        mine = progress.mine()
        mine.moved("serve")
        mine.worked(sum(state.total_count.values()), len(state.active_requests))
        # A worker that ends has cancelled its queues and must not take them up again.
        if watch is None or watch.wanted is None or watch.ending or consumer.task_consumer is None:
            return
        wanted = watch.wanted
        present = set(consumer.app.amqp.queues.consume_from)
        for name in sorted(wanted - present):
            consumer.app.amqp.queues.select_add(make_queue(name))
        for name in sorted(wanted):
            if not consumer.task_consumer.consuming_from(name):
                consumer.add_task_queue(name)
        for name in sorted(_ours(present) - wanted):
            consumer.cancel_task_queue(name)


class PatientConsumer(Consumer):  # type: ignore[misc]  # celery has no types
    """Celery's consumer, with a bounded pause between tries to reach the broker, and few words about it.

    Celery's own pauses grow to 30 s; a worker should take work soon after a long outage, too. It tells every try, and a
    night's outage in ten thousand lines.
    """

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, trying again every 1 to 5 s, until the worker is told to stop or the broker is gone for good."""
        identity = pool_process.identity()
        if identity is not None:
            conn.ensure_connection = partial(_wait_for, conn.ensure_connection, identity)
        return super().ensure_connected(conn)


def _wait_for(ensure: Callable[..., Any], identity: Identity, errback: Any, *args: Any, **kwargs: Any) -> Any:
    """Kombu's ensure_connection with our words and pauses."""
    settings = identity.settings
    broker_url = settings.require_urls()[0]
    outage = Outage("broker", broker_url)

    def tell(error: Exception, interval_s: float) -> None:
        if settings.announced and gone_for_good(broker_url) and not identity.shutdown.begun:
            log.error(
                "the Redis servers of this machine have ended (`clawq redis stop`, or the run that had started them), "
                "and with them what this worker was for: it ends. Start it again beside the next ones"
            )
            os.kill(_foremost(identity), signal.SIGTERM)
        elif (text := outage.away(error)) is not None:
            log.warning("%s", text)

    connected = ensure(tell, *args, **kwargs, interval_start=1, interval_step=1, interval_max=5)
    if (text := outage.back()) is not None:
        log.warning("%s", text)
    return connected


def _foremost(identity: Identity) -> int:
    """Pid of whom to tell if this worker is to end: its supervisor, if it has one."""
    return identity.main_pid if identity.pulse is None else os.getppid()


def _follow(outage: Outage, act: Callable[[], None]) -> None:
    """Do something with a server, and tell if it is away or back."""
    try:
        act()
        text = outage.back()
    except TransportError as error:
        text = outage.away(error)
    if text is not None:
        log.warning("%s", text)


def _active_leases() -> int:
    try:
        return sum(request.name == _ROLLOUT for request in list(state.active_requests))
    except RuntimeError:
        # The set changed while we counted; the next heartbeat is a second away.
        return 0


def _ours(queues: set[str]) -> set[str]:
    """Queues of runs; what a user asked for with -Q stays."""
    return {name for name in queues if name.startswith(f"{DEFAULT_QUEUE}.")}


__all__ = ["PatientConsumer", "Subscription", "Watch", "wanted_queues"]
