"""`clawq worker start`: a supervised Celery worker, with the pool and the flags that suit clawq.

`start_worker` checks what it is told and becomes the supervisor (clawq.control.supervisor); this module, run as a
program, is its child: the Celery worker. Threads: one worker for each host, one thread for each slot and one more,
which keeps the next lease at hand and lets an evaluation begin while all slots are busy. Gossip, mingle and Celery's
own heartbeat are off (their traffic grows with the square of the number of workers); clawq's heartbeats go to the data
server.

SIGTERM or SIGINT: actors end their fragment, send it and stop; the process is gone in less than 5 s with status 0, or
when a plugin's task is done. A second signal, or SIGQUIT, ends everything at once (status 1). SIGHUP to the Celery
worker: it ends in order, and is started again.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from clawq.control.settings import SHUTDOWN_S, HostSettings
from clawq.control.supervisor import supervise
from clawq.errors import UserError

POOLS = ("threads", "prefork", "solo")
#: How long past its own bound a worker that was told to end may take, seconds.
_STOP_MARGIN_S = 2.0


def default_pool(platform: str = sys.platform) -> tuple[str, str]:
    """(pool, reason) for a platform: threads everywhere, since fork is neither needed nor, on Windows, there."""
    if platform == "win32":
        return "threads", "Windows has no fork, so Celery's prefork pool does not work there; using threads"
    return "threads", "actors are processes of their own, so threads are enough to drive them"


def check_pool(pool: str, slots: int = 1, platform: str = sys.platform) -> str:
    """The pool itself. Raises UserError if it is unknown, or cannot do that here."""
    if pool not in POOLS:
        raise UserError(f"there is no worker pool {pool!r}; choose one of {', '.join(POOLS)}")
    if pool == "prefork" and platform == "win32":
        raise UserError("the prefork pool needs fork, which Windows does not have; use --pool threads or --pool solo")
    if pool == "solo" and slots > 1:
        raise UserError(f"the solo pool drives one actor at a time, not {slots}; use --slots 1, or --pool threads")
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
    """Run a worker, supervised, until it is told to stop; returns its exit status.

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
        StoreUnfit: a URL is none of Redis, or its server cannot be used.
    """
    chosen = check_pool(pool or default_pool()[0], slots)
    # The app reads its host's environment when it is imported, as under a bare `celery worker`.
    for variable, value in (("CLAWQ_BROKER_URL", broker_url), ("CLAWQ_DATA_URL", data_url)):
        if value:
            os.environ[variable] = value
    if runs:
        os.environ["CLAWQ_RUNS"] = ",".join(runs)
    settings = HostSettings.from_host()
    # What no waiting would mend is told here, once, and not by each try of the supervisor's.
    settings.check_servers()
    # The name is chosen here: it stays the same however often the worker is started again.
    order = {"name": name or f"w{os.getpid()}", "pool": chosen, "slots": slots, "log_level": log_level}
    stop_s = SHUTDOWN_S + settings.task_grace_s + _STOP_MARGIN_S
    return supervise(["clawq.control.worker", json.dumps(order)], stop_s)


def serve(order: dict[str, Any]) -> int:
    """Be the Celery worker that was ordered; returns its exit status."""
    from clawq.control.app import app

    threads, slots = order["pool"] == "threads", int(order["slots"])
    worker = app.Worker(
        hostname=f"{order['name']}@{socket.gethostname()}",
        pool_cls=order["pool"],
        concurrency=slots + 1 if threads else slots,
        loglevel=order["log_level"],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


if __name__ == "__main__":
    sys.exit(serve(json.loads(sys.argv[1])))

__all__ = ["POOLS", "check_pool", "default_pool", "serve", "start_worker"]
