"""`clawq worker start`: a Celery worker in this process, with the pool and the flags that suit clawq.

Threads: one worker for each host, one thread for each slot and one more, which keeps the next lease at hand and lets
an evaluation begin while all slots are busy. Gossip, mingle and Celery's own heartbeat are off (their traffic grows
with the square of the number of workers); clawq's heartbeats go to the data server.

SIGTERM or SIGINT: actors end their fragment, send it and stop; the process is gone in less than 5 s with status 0. A
second signal ends everything at once (status 1).
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from clawq.control.settings import HostSettings
from clawq.errors import UserError
from clawq.transport.client import connect

POOLS = ("threads", "prefork", "solo")


def default_pool(platform: str = sys.platform) -> tuple[str, str]:
    """(pool, reason) for a platform: threads everywhere, since fork is neither needed nor, on Windows, there."""
    if platform == "win32":
        return "threads", "Windows has no fork, so Celery's prefork pool does not work there; using threads"
    return "threads", "actors are processes of their own, so threads are enough to drive them"


def check_pool(pool: str, platform: str = sys.platform) -> str:
    """The pool itself. Raises UserError if it is unknown, or cannot work on this platform."""
    if pool not in POOLS:
        raise UserError(f"there is no worker pool {pool!r}; choose one of {', '.join(POOLS)}")
    if pool == "prefork" and platform == "win32":
        raise UserError("the prefork pool needs fork, which Windows does not have; use --pool threads or --pool solo")
    return pool


def start_worker(
    broker_url: str | None = None,
    data_url: str | None = None,
    slots: int = 1,
    runs: Sequence[str] = (),
    pool: str | None = None,
    log_level: str = "INFO",
    name: str | None = None,
) -> int:
    """Run a worker until it is told to stop; returns its exit status.

    Args:
        broker_url: Celery and the run specs; None: from the environment or the host's state file.
        data_url: streams, weights, events; None: likewise.
        slots: actors at a time.
        runs: run ids to serve; empty = all.
        pool: `threads`, `prefork` or `solo` (one slot); None: what suits the platform.
        log_level: of the worker's own log (stderr).
        name: unique on this host; default: made from the pid.

    Raises:
        UserError: no Redis is known, or the pool cannot work here.
        StoreUnfit: a URL is none of Redis.
    """
    chosen = check_pool(pool or default_pool()[0])
    # The app reads its host's environment when it is imported, as under a bare `celery worker`.
    for variable, value in (("CLAWQ_BROKER_URL", broker_url), ("CLAWQ_DATA_URL", data_url)):
        if value:
            os.environ[variable] = value
    if runs:
        os.environ["CLAWQ_RUNS"] = ",".join(runs)
    settings = HostSettings.from_host()
    for url in settings.require_urls():
        # Nothing is sent; a URL that cannot be one is told here, not by a traceback of Celery's.
        connect(url).close()
    from clawq.control.app import app

    worker = app.Worker(
        hostname=f"{name or f'w{os.getpid()}'}@{socket.gethostname()}",
        pool_cls=chosen,
        concurrency=slots + 1 if chosen == "threads" else slots,
        loglevel=log_level,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    _own_signals(worker)
    worker.start()
    return int(worker.exitcode or 0)


def _own_signals(worker: Any) -> None:
    """Put our handlers in place of Celery's, once it has installed them: status 0 for SIGINT too, second one forces."""
    installed = worker.install_platform_tweaks

    def install(instance: Any) -> None:
        from celery.worker import state

        from clawq.control.lifecycle import stop_or_force

        installed(instance)
        seen = 0

        def on_signal(number: int, frame: Any) -> None:
            nonlocal seen
            seen += 1
            stop_or_force(seen)
            state.should_stop = 0

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)

    worker.install_platform_tweaks = install


__all__ = ["POOLS", "check_pool", "default_pool", "start_worker"]
