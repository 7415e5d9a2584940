"""How a worker begins and ends, whatever its pool and whoever started it.

At its start, before a pool forks, the shutdown pipe is made and the identity of the worker is noted. At the first
SIGTERM or SIGINT the pipe becomes readable: every lease asks its actor to finish its fragment, send it and stop, and
kills it if it does not within two seconds; evaluations and recordings are ended at once (they will be sent again).
A second signal, or SIGQUIT (Celery's cold shutdown), forces the end. A guard thread ends a worker that is still there
after `SHUTDOWN_S`, for instance because the broker does not answer; a task of somebody else's plugin is waited for, but
no longer than CLAWQ_TASK_GRACE_S. Force loses nothing that was acknowledged: what was not is on the broker, and is
delivered again after the visibility timeout.

The handlers of signals are ours, in place of Celery's, whose cold way differs by pool: solo loses the task at work,
threads wait for it without end.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

from celery import Celery, signals
from celery.worker import state

from clawq import progress
from clawq.control import pool_process
from clawq.control.pulse import start_pulse
from clawq.control.settings import SHUTDOWN_S, HostSettings, worker_name
from clawq.control.shutdown import Shutdown
from clawq.errors import ClawqError, UserError
from clawq.registry import Registration, enrol

log = logging.getLogger(__name__)

#: Tasks that end by themselves within the shutdown.
OWN_TASKS = frozenset({"clawq.rollout", "clawq.evaluate", "clawq.record"})
#: Status of a worker that was told to begin anew (SIGHUP); its supervisor starts it again.
AGAIN = 75


def bind_lifecycle(app: Celery) -> None:
    """Tie a Celery app's worker to the rules above."""

    def on_init(sender: Any, **_: Any) -> None:
        if sender.app is app:
            begin_worker(sender)

    signals.worker_init.connect(on_init, weak=False)


def begin_worker(worker: Any) -> None:
    """Note who this worker is; exit with a clear text when it has no Redis, or one that it cannot use."""
    try:
        settings = HostSettings.from_host()
        broker_url, data_url = settings.require_urls()
        for away in settings.check_servers():
            log.warning("%s; waiting for it", away)
    except ClawqError as error:
        raise SystemExit(f"clawq worker: {error}") from None
    try:
        kind = pool_kind(worker.pool_cls)
        check_options(worker, kind)
    except UserError as error:
        raise SystemExit(f"clawq worker: {error}") from None
    if broker_url == data_url:
        log.warning("one Redis serves as broker and as data server: when its memory is full, Celery workers die")
    identity = pool_process.Identity(
        worker=worker_name(str(worker.hostname), os.getpid()),
        main_pid=os.getpid(),
        pool=kind,
        # Solo runs one task at a time, whatever it is told.
        concurrency=1 if kind == "solo" else int(worker.concurrency),
        settings=settings,
        shutdown=Shutdown(),
        pulse=start_pulse(),
    )
    pool_process.introduce(identity)
    own_signals(worker, supervised=identity.pulse is not None)
    enrol_worker(identity)
    threading.Thread(target=_guard, args=(identity,), name="clawq-shutdown-guard", daemon=True).start()


def enrol_worker(identity: pool_process.Identity) -> None:
    """Tell the watchdog of this worker: what it serves, and how long its loop may stand still."""
    settings = identity.settings
    name = identity.name
    facts = {"slots": identity.slots, "runs": sorted(settings.runs or ()), "name": name}
    limits = {"serve": settings.worker_stall_s}
    enrol(Registration("worker", name, limits, facts, settings.require_urls()))
    if identity.pool == "solo":
        # There the loop stands still while a task runs, for as long as that may take.
        signals.task_prerun.connect(lambda **_: progress.mine().moved("task"), weak=False)
        signals.task_postrun.connect(lambda **_: progress.mine().moved("serve"), weak=False)


def pool_kind(pool_cls: Any) -> str:
    """`prefork`, `solo` or `threads`. Raises UserError for a pool under which actors cannot be driven."""
    name = pool_cls if isinstance(pool_cls, str) else str(pool_cls.__module__)
    if "process" in name:
        # Celery's older name for it.
        return "prefork"
    for kind in ("prefork", "solo", "thread"):
        if kind in name:
            return "threads" if kind == "thread" else kind
    raise UserError(
        f"the worker pool {name} cannot drive actors: it replaces sockets and threads by its own. Use -P threads (one "
        "thread for each slot and one more), -P prefork or -P solo; or `clawq worker start`, which chooses well"
    )


def check_options(worker: Any, kind: str) -> None:
    """UserError for what Celery would do to actors behind our back, with what to do instead."""
    ends_children = [name for name in ("max_tasks_per_child", "max_memory_per_child") if getattr(worker, name, None)]
    if kind == "prefork" and ends_children:
        raise UserError(
            f"{' and '.join(ends_children)} would end pool processes with their actors, in the midst of a fragment. "
            "Leave it out, and have actors recycle themselves: actors.recycle.fragments and actors.recycle.memory_mb "
            "in the run's configuration, or CLAWQ_ACTOR_MEMORY_MB here"
        )
    if getattr(worker, "autoscale", None):
        raise UserError("--autoscale would end pool processes with their actors; start or stop whole workers instead")


def own_signals(worker: Any, supervised: bool) -> None:
    """Put our handlers in place of Celery's, once it has installed them: status 0 for SIGINT too, a second one forces.

    Args:
        worker: Celery's, before it has begun.
        supervised: on SIGHUP it ends, and is started again; else Celery's own way of that is left to it.
    """
    installed = worker.install_platform_tweaks

    def install(instance: Any) -> None:
        installed(instance)
        seen = 0

        def on_signal(number: int, frame: Any) -> None:
            nonlocal seen
            seen += 1
            stop_or_force(seen)
            state.should_stop = AGAIN if number == getattr(signal, "SIGHUP", None) else 0

        for name in ("SIGTERM", "SIGINT", *(("SIGHUP",) if supervised else ())):
            if taken := getattr(signal, name, None):
                signal.signal(taken, on_signal)
        if cold := getattr(signal, "SIGQUIT", None):
            signal.signal(cold, lambda number, frame: force_exit(1))

    worker.install_platform_tweaks = install


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
    begun_s = time.monotonic()
    latest_s = begun_s + max(SHUTDOWN_S, identity.settings.task_grace_s)
    while time.monotonic() < (latest_s if _foreign(state.active_requests) else begun_s + SHUTDOWN_S):
        time.sleep(0.1)
    if os.getpid() == identity.main_pid:
        if cut_off := sorted(request.name for request in list(state.active_requests) if request.name not in OWN_TASKS):
            log.warning("cut off: %s (CLAWQ_TASK_GRACE_S=%g)", ", ".join(cut_off), identity.settings.task_grace_s)
        log.warning("the worker did not end within %.1f s; ending it now", SHUTDOWN_S)
        force_exit(0)


def _foreign(requests: Iterable[Any]) -> bool:
    try:
        return any(request.name not in OWN_TASKS for request in list(requests))
    except RuntimeError:
        # The set changed while we looked: somebody is still at work.
        return True


__all__ = [
    "AGAIN",
    "OWN_TASKS",
    "begin_worker",
    "bind_lifecycle",
    "check_options",
    "force_exit",
    "own_signals",
    "pool_kind",
    "stop_or_force",
]
