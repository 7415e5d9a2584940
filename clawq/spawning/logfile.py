"""A bounded log file that a child process writes to directly.

The child has the file open for appending, so nobody stands between it and its log: what it wrote before it was killed
is there. The parent trims: when the file is over its bound, its tail is copied to `<name>.1` and the file emptied in
place (the child goes on at the new end). A few lines written during the copy may be lost; the disk never fills.

How much our own programs write there is said by CLAWQ_LOG_LEVEL, which children inherit.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from clawq.errors import UserError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

#: Size at which a log is trimmed; with the kept tail it is the most that one process leaves on disk.
LIMIT_BYTES = 4_000_000
_TAIL_BYTES = 512_000


def log_level(default: str, env: Mapping[str, str] | None = None) -> str:
    """The level that CLAWQ_LOG_LEVEL names, else `default`; UserError if there is no such level."""
    text = (os.environ if env is None else env).get("CLAWQ_LOG_LEVEL") or default
    if text.upper() not in LEVELS:
        raise UserError(f"CLAWQ_LOG_LEVEL={text!r} is no log level; it may be {', '.join(LEVELS)}")
    return text.upper()


class LogFile:
    """One child's log."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._trimming = threading.Lock()
        #: Where the newest child's own lines begin.
        self._begin = 0

    def open(self) -> int:
        """A file descriptor for the child's stdout and stderr; the caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log_fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._begin = os.fstat(log_fd).st_size
        return log_fd

    def trim(self) -> None:
        """Bring the file under its bound if it is over it. Any thread may call it; cheap if there is nothing to do."""
        with self._trimming:
            self._trim()

    def _trim(self) -> None:
        try:
            if self.path.stat().st_size <= self._limit_bytes:
                return
            self.path.with_name(self.path.name + ".1").write_bytes(self._read_tail(_TAIL_BYTES))
            os.truncate(self.path, 0)
            self._begin = 0
        except OSError:
            # A full or vanished disk must not stop the actor; the next trim tries again.
            return

    def tail(self, lines: int = 15) -> str:
        """The last lines of the newest child, for error messages; empty if there are none."""
        try:
            return "\n".join(self._read_tail(8192).decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def _read_tail(self, size: int) -> bytes:
        with self.path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            # Shorter than where we began: somebody else has emptied it.
            file.seek(max(self._begin if self._begin <= end else 0, end - size))
            return file.read()


class SharedStderr(LogFile):
    """No file: the child writes to our own stderr, which somebody else keeps (a terminal, a journal, a file)."""

    def __init__(self) -> None:
        super().__init__(_file_behind(2))

    def open(self) -> int:
        """Our own stderr."""
        return os.dup(2)

    def trim(self) -> None:
        """Not ours to trim."""

    def tail(self, lines: int = 15) -> str:
        """Nothing: whoever reads our stderr has it."""
        return ""


def _file_behind(fd: int) -> Path:
    """The file that a descriptor writes to, for who looks for what was written there; /dev/null if it is none."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return path if path.is_file() else Path(os.devnull)
    except OSError:
        return Path(os.devnull)


__all__ = ["LEVELS", "LIMIT_BYTES", "LogFile", "SharedStderr", "log_level"]
