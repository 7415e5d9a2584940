"""How a worker begins and ends, whatever its pool and whoever started it.

At its start, before a pool forks, the shutdown pipe is made and the identity of the worker is noted. At the first
SIGTERM or SIGINT the pipe becomes readable: every lease asks its actor to finish its fragment, send it and stop, and
kills it if it does not within two seconds; evaluations and recordings are ended at once (they will be sent again).
A second signal forces the end. A guard thread ends a worker that is still there after `SHUTDOWN_S`, for instance
because the broker does not answer, unless it is busy with a task of somebody else's plugin: that is waited for.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery import Celery, signals
from celery.worker import state

from clawq import progress
from clawq.control import pool_process
from clawq.control.settings import HostSettings, slot_name, worker_name
from clawq.control.shutdown import Shutdown
from clawq.errors import UserError
from clawq.registry import Registration, enrol

log = logging.getLogger(__name__)

#: A worker with only clawq's own tasks is gone so long after the first signal.
SHUTDOWN_S = 4.5
#: Tasks that end by themselves within the shutdown.
OWN_TASKS = frozenset({"clawq.rollout", "clawq.evaluate", "clawq.record"})


@dataclass(slots=True)
class _Lifecycle:
    signals_seen: int = 0


def bind_lifecycle(app: Celery) -> None:
    """Tie a Celery app's worker to the rules above."""
    lifecycle = _Lifecycle()

    def on_init(sender: Any, **_: Any) -> None:
        if sender.app is app:
            begin_worker(sender)

    def on_shutting_down(**_: Any) -> None:
        if pool_process.identity() is not None:
            lifecycle.signals_seen += 1
            stop_or_force(lifecycle.signals_seen)

    signals.worker_init.connect(on_init, weak=False)
    signals.worker_shutting_down.connect(on_shutting_down, weak=False)


def begin_worker(worker: Any) -> None:
    """Note who this worker is; exit with a clear text when it has no Redis."""
    try:
        settings = HostSettings.from_host()
        broker_url, data_url = settings.require_urls()
    except UserError as error:
        raise SystemExit(f"clawq worker: {error}") from None
    if broker_url == data_url:
        log.warning("one Redis serves as broker and as data server: when its memory is full, Celery workers die")
    identity = pool_process.Identity(
        worker=worker_name(str(worker.hostname), os.getpid()),
        main_pid=os.getpid(),
        pool=pool_kind(worker.pool_cls),
        concurrency=int(worker.concurrency),
        settings=settings,
        shutdown=Shutdown(),
    )
    pool_process.introduce(identity)
    enrol_worker(identity)
    threading.Thread(target=_guard, args=(identity,), name="clawq-shutdown-guard", daemon=True).start()


def enrol_worker(identity: pool_process.Identity) -> None:
    """Tell the watchdog of this worker: what it serves, and how long its loop may stand still."""
    settings = identity.settings
    name = slot_name(identity.worker, 0).rpartition("-")[0]
    facts = {"slots": identity.slots, "runs": sorted(settings.runs or ()), "name": name}
    limits = {"serve": settings.worker_stall_s}
    enrol(Registration("worker", name, limits, facts, settings.require_urls()))
    if identity.pool == "solo":
        # There the loop stands still while a task runs, for as long as that may take.
        signals.task_prerun.connect(lambda **_: progress.mine().moved("task"), weak=False)
        signals.task_postrun.connect(lambda **_: progress.mine().moved("serve"), weak=False)


def pool_kind(pool_cls: Any) -> str:
    """`prefork`, `solo` or `threads` (which stands for every pool of several tasks in one process)."""
    name = pool_cls if isinstance(pool_cls, str) else str(pool_cls.__module__)
    for kind in ("prefork", "solo"):
        if kind in name:
            return kind
    return "threads"


def stop_or_force(signals_seen: int) -> None:
    """First signal: everything ends in order. Another one: now. Runs in a signal handler."""
    identity = pool_process.identity()
    if identity is not None and signals_seen == 1:
        identity.shutdown.begin()
        return
    force_exit(1)


def force_exit(status: int) -> None:
    """Kill our actors and end this process now. Pool children and their actors follow: their parent is gone."""
    pool_process.kill_actors()
    os._exit(status)


def _guard(identity: pool_process.Identity) -> None:
    while not identity.shutdown.wait(3600.0):
        pass
    deadline = time.monotonic() + SHUTDOWN_S
    while time.monotonic() < deadline or _foreign(state.active_requests):
        time.sleep(0.1)
    if os.getpid() == identity.main_pid:
        log.warning("the worker did not end within %.1f s; ending it now", SHUTDOWN_S)
        force_exit(0)


def _foreign(requests: Iterable[Any]) -> bool:
    try:
        return any(request.name not in OWN_TASKS for request in list(requests))
    except RuntimeError:
        # The set changed while we looked: somebody is still at work.
        return True


__all__ = ["OWN_TASKS", "SHUTDOWN_S", "begin_worker", "bind_lifecycle", "force_exit", "pool_kind", "stop_or_force"]
