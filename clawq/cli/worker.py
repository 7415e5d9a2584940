"""`clawq worker start | dead`: give this machine's slots to runs; commands that killed worker after worker."""

import sys

import click

from clawq.cli.worker_dead import dead


@click.group()
def worker() -> None:
    """Start a worker: it gives its slots to runs."""


worker.add_command(dead)


@worker.command()
@click.option("--slots", type=click.IntRange(min=1), help="Actors at a time; default: what the cores allow.")
@click.option("--runs", default="", metavar="RUN[,RUN...]", help="Serve only these runs; default: all.")
@click.option("--pool", type=click.Choice(["threads", "prefork", "solo"]), help="Celery pool; default: threads.")
@click.option("--name", help="Name of the worker, unique on this machine; default: made from its pid.")
@click.option("--log-level", default="INFO", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]))
def start(slots: int | None, runs: str, pool: str | None, name: str | None, log_level: str) -> None:
    """Serve runs until SIGTERM or Ctrl-C (a second one, or SIGQUIT, ends it at once).

    The Celery worker is a child of this process, which starts it again when it dies or hangs.

    Redis is found in CLAWQ_BROKER_URL and CLAWQ_DATA_URL, or in this machine's state file.
    """
    from clawq.control.worker import start_worker
    from clawq.cores import available_cores
    from clawq.spawning.spawner import Spawner
    from clawq.watchdog.keeping import WatchdogKeeper

    wanted = tuple(name for name in runs.split(",") if name)
    watchdog = WatchdogKeeper(Spawner())
    try:
        sys.exit(start_worker(slots=slots or available_cores(), runs=wanted, pool=pool, log_level=log_level, name=name))
    finally:
        watchdog.close()


__all__ = ["worker"]
