"""Starts and ends Celery workers, one after the other, as quickly as they go: `python restarts.py COUNT [NAME]`.

Each worker is forked from this process, which has imported everything once, and is killed or told to end as soon as it
is connected: three of four by SIGKILL. Its name is NAME, or another one for each.
"""

import os
import signal
import sys

from celery import signals

from clawq.control.app import app


def live(name: str, connected: int) -> None:
    """Be a worker; a byte goes down the pipe once it is connected."""
    signals.worker_ready.connect(lambda **_: os.write(connected, b"r"), weak=False)
    worker = app.Worker(
        hostname=name, pool_cls="solo", concurrency=1, loglevel="ERROR", quiet=True,
        without_gossip=True, without_mingle=True, without_heartbeat=True,
    )  # fmt: skip
    worker.start()
    os._exit(int(worker.exitcode or 0))


def main() -> None:
    """Start and end them all."""
    count, names = int(sys.argv[1]), sys.argv[2:]
    for number in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            live(f"{names[0] if names else f'w{number}'}@host", writer)
        os.close(writer)
        assert os.read(reader, 1) == b"r", "the worker did not connect"
        os.close(reader)
        os.kill(pid, signal.SIGTERM if number % 4 == 3 else signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
