"""The word that a worker is ending, told to every thread and every pool process of it at once.

It is a pipe that becomes readable and is never read: made in the worker's main process before the pool forks, it is
inherited by prefork children and shared by pool threads, so one byte written in a signal handler (which is safe
there) reaches every lease under every pool. Whoever waits on a socket waits on `fileno()` too.
"""

import contextlib
import os

from clawq.spawning.spawner import wait_readable


class Shutdown:
    """One-way switch, set once, seen by all threads and forked children."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def begin(self) -> None:
        """The worker is ending. Safe in a signal handler; may be called again."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"x")

    @property
    def begun(self) -> bool:
        """Whether the worker is ending."""
        return bool(wait_readable([self._read], 0.0))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; whether it has begun."""
        return bool(wait_readable([self._read], timeout_s))

    def fileno(self) -> int:
        """Readable once the end has begun."""
        return self._read


__all__ = ["Shutdown"]
