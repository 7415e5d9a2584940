"""Progress: a few shared bytes by which a process shows that its work goes on.

Each process that clawq starts has a small file, mapped into its memory. The *work loop* writes there, after every piece
of real work: in which phase it is, a counter, the time (no thread beside it does: a heartbeat proves only that a
heartbeat beats). Writing is a memory copy, no system call; reading needs nothing of the process, which may be stopped
or hang in C with the interpreter's lock held. Times are CLOCK_MONOTONIC, the same for all processes of a boot.

One byte goes the other way: the wish that the process ends by itself.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

#: Environment variable with the path of a process's own file.
PROGRESS_VARIABLE = "CLAWQ_PROGRESS"
_MAGIC = b"clawqpg1"
#: counter, time, phase | works, time of the last one, busy | stop | claim.
_MOVE, _WORK, _STOP, _CLAIM = (
    struct.Struct("<QQ16s"),
    struct.Struct("<QQI"),
    struct.Struct("<B"),
    struct.Struct("<128s"),
)
_MOVE_AT = len(_MAGIC)
_WORK_AT = _MOVE_AT + _MOVE.size
_STOP_AT = _WORK_AT + _WORK.size
_CLAIM_AT = _STOP_AT + _STOP.size
SIZE = _CLAIM_AT + _CLAIM.size


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process has shown.

    Attributes:
        phase: what it is at; empty = nothing yet.
        counter: grows with every piece of progress.
        at_s: monotonic time of the last one, seconds.
        works: commands that it has taken up so far (a worker).
        worked_s: monotonic time at which that, or `busy`, changed last.
        busy: commands that it is at now.
        claim: name of the claim that it holds, as `slot:NAME`.
        stop_wanted: whether somebody (the watchdog) has asked it to end.
    """

    phase: str
    counter: int
    at_s: float
    works: int = 0
    worked_s: float = 0.0
    busy: int = 0
    claim: str = ""
    stop_wanted: bool = False


class Progress:
    """The file of one process, as that process has it.

    Args:
        memory: SIZE bytes, shared or not.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._counter = self._works = self._busy = 0

    @classmethod
    def open(cls, path: Path) -> "Progress":
        """The file that `create` made; OSError if it is not there."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), SIZE))

    @classmethod
    def unseen(cls) -> "Progress":
        """For a process that nobody watches."""
        return cls(mmap.mmap(-1, SIZE))

    def moved(self, phase: str) -> None:
        """A piece of work is done; `phase` is what comes next."""
        self._counter += 1
        _MOVE.pack_into(self._memory, _MOVE_AT, self._counter, time.monotonic_ns(), phase.encode()[:16])

    def worked(self, works: int, busy: int) -> None:
        """So many commands were taken up in all, and so many are at work now."""
        if (works, busy) != (self._works, self._busy):
            self._works, self._busy = works, busy
            _WORK.pack_into(self._memory, _WORK_AT, works, time.monotonic_ns(), busy)

    def holds(self, claim: str) -> None:
        """Name the claim that must be taken away from this process before it is killed."""
        _CLAIM.pack_into(self._memory, _CLAIM_AT, claim.encode()[:128])

    @property
    def stop_wanted(self) -> bool:
        """Whether somebody wants this process to end by itself."""
        return self._memory[_STOP_AT] != 0


def create(path: Path) -> None:
    """Make the file of a process that is about to start, as if it had just moved."""
    memory = bytearray(SIZE)
    memory[:_MOVE_AT] = _MAGIC
    _MOVE.pack_into(memory, _MOVE_AT, 0, time.monotonic_ns(), b"exec")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, memory)
    finally:
        os.close(fd)


def read(path: Path) -> Reading | None:
    """What the process has shown; None if there is no such file, or it is none of ours."""
    try:
        memory = path.read_bytes()
    except OSError:
        return None
    if len(memory) < SIZE or memory[:_MOVE_AT] != _MAGIC:
        return None
    counter, at_ns, phase = _MOVE.unpack_from(memory, _MOVE_AT)
    works, worked_ns, busy = _WORK.unpack_from(memory, _WORK_AT)
    (claim,) = _CLAIM.unpack_from(memory, _CLAIM_AT)
    stop = memory[_STOP_AT] != 0
    return Reading(_text(phase), counter, at_ns / 1e9, works, worked_ns / 1e9, busy, _text(claim), stop)


def ask_to_stop(path: Path) -> None:
    """Tell a process that it should end by itself; one that does not look is not moved by it. OSError if gone."""
    with path.open("r+b") as file:
        file.seek(_STOP_AT)
        file.write(b"\1")


_mine: Progress | None = None


def mine() -> Progress:
    """This process's own; unseen by others if it was not started, or enrolled, by clawq."""
    global _mine
    if _mine is None:
        path = os.environ.get(PROGRESS_VARIABLE)
        try:
            _mine = Progress.open(Path(path)) if path else Progress.unseen()
        except OSError:
            _mine = Progress.unseen()
    return _mine


def use(path: Path) -> Progress:
    """Show this process's progress in that file from now on; OSError if it cannot be opened."""
    global _mine
    _mine = Progress.open(path)
    return _mine


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


__all__ = ["PROGRESS_VARIABLE", "SIZE", "Progress", "Reading", "ask_to_stop", "create", "mine", "read", "use"]
