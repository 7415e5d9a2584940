"""Sessions of the tests that are at work on this machine at the same time, and tell one another of it.

What cannot be told to be of one or the other, shared memory that a child process made, is nobody's only while there is
another.
"""

import contextlib
import os
import time
from pathlib import Path

import psutil

#: In a session's folder, with a file for each that it met: since when that one was at work, and until when.
MET = "met"
#: When a process began is known to the second.
_SLACK_S = 1.0


class Session:
    """One session.

    Args:
        folder: its own, beside those of the others.
        prefix: of the names of all folders; the pid of the session and a dash follow it.
        pid: of the session.
    """

    def __init__(self, folder: Path, prefix: str, pid: int) -> None:
        self._folder, self._prefix, self._pid = folder, prefix, pid
        (folder / MET).mkdir(exist_ok=True)

    def meet(self) -> None:
        """Tell the others that are at work of this one, and this one of them."""
        for pid, folder in self._others():
            _tell(folder, self._pid)
            _tell(self._folder, pid)

    def part(self) -> None:
        """Tell the others that this one makes nothing any more."""
        for _, folder in self._others():
            _tell(folder, self._pid, time.time())

    def was_alone(self, at_s: float) -> bool:
        """Whether no other session was at work at that time (of the wall clock)."""
        spans = [[float(word) for word in path.read_text().split()] for path in (self._folder / MET).glob("[0-9]*")]
        return not any(since_s - _SLACK_S <= at_s <= until_s for since_s, until_s in spans)

    def _others(self) -> list[tuple[int, Path]]:
        """Pids and folders. A session that was started by a test of another one belongs to it."""
        above = {0, self._pid, *(process.pid for process in psutil.Process(self._pid).parents())}
        named = [(path.name.removeprefix(self._prefix), path) for path in self._folder.parent.glob(f"{self._prefix}*")]
        found = [(int(word), path) for name, path in named if (word := name.partition("-")[0]).isdecimal()]
        return [(pid, path) for pid, path in found if pid not in above and psutil.pid_exists(pid)]


def _tell(folder: Path, pid: int, until_s: float = float("inf")) -> None:
    """Of that session; it or the folder may be gone meanwhile."""
    with contextlib.suppress(OSError, psutil.Error):
        new = folder / MET / f".{pid}-{os.getpid()}"
        new.write_text(f"{psutil.Process(pid).create_time()} {until_s}")
        new.rename(folder / MET / str(pid))
