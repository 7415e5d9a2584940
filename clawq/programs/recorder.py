"""The recorder: writes the learner's schedule (see `clawq.programs.schedule`), cheaply, beside its loop.

The loop only counts and appends to a buffer; `flush` (once a second) hands that to the operating system. A checkpoint
takes `mark()`, the position at which the next block begins, and calls `sync` in the thread that writes it, before it is
renamed: what a checkpoint points at is on disk. A resumed learner cuts off what lies behind its checkpoint's position:
that part did not happen.

A disk that refuses is told once and tried again; the buffer is bounded, and beyond that recording ends, which is told
too: training goes on. Two threads: one records, marks and flushes, the other syncs.
"""

import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from clawq.errors import CheckpointNotWritten, ScheduleInvalid
from clawq.programs.schedule import (
    BLOCK_BYTES,
    CHANGE_NAME,
    FILE_BYTES,
    FORMAT,
    MAGIC,
    end_line,
    older,
    read_base,
)
from clawq.types import Voided

log = logging.getLogger(__name__)

#: Bytes that wait for a disk that refuses.
MOST_WAITING_BYTES = 16_000_000


class Recorder:
    """Writes one run's schedule. Nothing is kept before `begin`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        #: Lines of the block that is being made, and their bytes.
        self._lines: list[bytes] = []
        self._size = 0
        #: What was made and is not in the file; of the block that is being made the first `_handed` bytes are over.
        #: (A number among it: a new file begins there, at that position.)
        self._waiting: deque[bytes | int] = deque()
        self._handed = 0
        self._position = self._base = 0
        self._version = self._thousandths = 0
        self._updates = 0
        self._numbers: dict[tuple[str, int], int] = {}
        self._seqs: dict[int, int] = {}
        self._refused = self._broken = False
        self._lock = threading.Lock()

    # --- begin and end ------------------------------------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any], position: int = 0) -> None:
        """Begin a session: what lies behind `position` is cut off, and the session's facts are recorded.

        A file that does not hold everything up to `position` is put aside (`.old`), and a new one begins there; a
        negative position says that the past was not recorded.

        Raises CheckpointNotWritten if the file cannot be written.
        """
        self._position, self._version = max(0, position), int(facts.get("version", 0))
        try:
            if position == 0 or not self._cut(position):
                older(self.path).unlink(missing_ok=True)
                self._create(self._position)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritten(error) from error
        self._line(b"session " + _json(facts))

    def _cut(self, position: int) -> bool:
        """Cut the file off at a position; False, and the file put aside, if no block ends there."""
        try:
            if not self.path.exists() and older(self.path).exists():
                # Killed while one file gave way to the next.
                older(self.path).replace(self.path)
            with self.path.open("rb") as file:
                if 0 <= position < read_base(self.path, file.readline()) and older(self.path).exists():
                    # The checkpoint is older than this whole file.
                    older(self.path).replace(self.path)
            with self.path.open("r+b") as file:
                base = self._base = read_base(self.path, file.readline())
                at = file.tell() + position - base
                if position < base or (position > base and not _ends_block(file, at)):
                    raise ScheduleInvalid(f"{self.path}: no block ends at {position}")
                file.truncate(at)
                return True
        except (ScheduleInvalid, FileNotFoundError) as error:
            log.warning("%s; the schedule begins anew here, what there is goes to %s.old", error, self.path.name)
            with contextlib.suppress(FileNotFoundError):
                self.path.replace(self.path.with_name(self.path.name + ".old"))
            return False

    def _create(self, base: int) -> None:
        self._base = base
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.write_bytes(_first_line(base))
        partial.replace(self.path)

    def close(self) -> None:
        """Write what is left. Idempotent; call it when nothing syncs any more."""
        self.mark()
        try:
            self.sync()
        except CheckpointNotWritten as error:
            log.warning("%s", error)
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- what took effect ---------------------------------------------------------------------------------------

    def committed(self, slot: str, epoch: int, seq: int, version: int, inherited: Sequence[Voided] = ()) -> None:
        """A fragment went into the ring (see schedule.FragmentCommitted)."""
        self.published(version)
        self._end_updates()
        number = self._number(slot, epoch)
        for notice in inherited:
            self._line(b"v %d %d %d %d" % (number, notice.env, notice.seq, notice.t))
        self._line(b"f %d" % number if seq == self._seqs[number] + 1 else b"f %d %d" % (number, seq))
        self._seqs[number] = seq
        if self._size >= BLOCK_BYTES:
            self.mark()

    def voided(self, slot: str, epoch: int, notice: Voided) -> None:
        """A notice was heeded whose fragment was refused after all."""
        self._end_updates()
        self._line(b"x %d %d %d %d" % (self._number(slot, epoch), notice.env, notice.seq, notice.t))

    def updated(self, thousandths: int) -> None:
        """An update was tried, under that progress (in 1/PROGRESS_STEPS)."""
        if thousandths != self._thousandths:
            self._end_updates()
            self._thousandths = thousandths
            self._line(b"p %d" % thousandths)
        self._updates += 1

    def published(self, version: int) -> None:
        """The learner's weights version from here on."""
        if version != self._version:
            self._end_updates()
            self._version = version
            self._line(b"w %d" % version)
            if self._size >= BLOCK_BYTES:
                self.mark()

    def changed(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Something was changed live: JSON-able facts under a word of at least four letters."""
        if not CHANGE_NAME.fullmatch(kind) or kind == "session":
            raise ValueError(f"{kind!r} cannot name a live change")
        self._end_updates()
        self._line(kind.encode() + b" " + _json(facts))

    def _number(self, slot: str, epoch: int) -> int:
        """What stands for that slot and epoch in this block."""
        number = self._numbers.get((slot, epoch))
        if number is None:
            number = self._numbers[slot, epoch] = len(self._numbers)
            self._seqs[number] = 0
            self._line(f"o {number} {slot} {epoch}".encode())
        return number

    def _end_updates(self) -> None:
        if self._updates:
            count, self._updates = self._updates, 0
            self._line(b"u %d" % count)

    def _line(self, line: bytes) -> None:
        if self._file is None or self._broken:
            return
        if not self._lines:
            # Every block says what is in force, so that reading may begin with it.
            self._add(b"w %d" % self._version)
            self._add(b"p %d" % self._thousandths)
        self._add(line)

    def _add(self, line: bytes) -> None:
        self._lines.append(line + b"\n")
        self._size += len(line) + 1

    # --- to disk ------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """End the block; the position at which the next one begins. It is on disk after `sync`.

        Negative once recording had to end: then there is no such place.
        """
        self._end_updates()
        if self._lines:
            block = b"".join(self._lines)
            ending = end_line(block)
            self._hand_over(block[self._handed :] + ending)
            self._position += len(block) + len(ending)
            if self._position - self._base >= FILE_BYTES and not self._broken:
                self._base = self._position
                self._waiting.append(self._position)
        self._numbers.clear()
        self._seqs.clear()
        self._lines, self._size, self._handed = [], 0, 0
        return -1 if self._broken else self._position

    def flush(self) -> None:
        """Hand what was recorded to the operating system, unless the disk is busy."""
        self._end_updates()
        if self._lines:
            block = b"".join(self._lines)
            self._hand_over(block[self._handed :])
            self._handed = len(block)
        if self._lock.acquire(blocking=False):
            try:
                self._write()
            except OSError as error:
                if not self._refused:
                    log.warning("%s; tried again", self._unwritten(error))
                self._refused = True
            finally:
                self._lock.release()

    def sync(self) -> None:
        """Bring everything up to the last mark to the disk. Raises CheckpointNotWritten if it refuses."""
        try:
            with self._lock:
                self._write()
                if self._file is not None:
                    os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritten(error) from error

    def _write(self) -> None:
        """Write what waits; the lock is held."""
        while self._file is not None and self._waiting:
            chunk = self._waiting.popleft()
            try:
                if isinstance(chunk, int):
                    self._turn_over(chunk)
                    continue
                written = self._file.write(chunk)
            except OSError:
                self._waiting.appendleft(chunk)
                raise
            if written < len(chunk):
                self._waiting.appendleft(chunk[written:])
        self._refused = False

    def _turn_over(self, base: int) -> None:
        """Begin a new file at that position; the old one is kept, and the one before it goes."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.write_bytes(_first_line(base))
        new = partial.open("ab", buffering=0)
        if self.path.exists():
            self.path.replace(older(self.path))
        partial.replace(self.path)
        self._file.close()
        self._file = new

    def _hand_over(self, made: bytes) -> None:
        """Leave bytes for whichever thread writes next."""
        if self._broken:
            return
        if made:
            self._waiting.append(made)
        if self._refused and sum(len(one) for one in self._waiting if isinstance(one, bytes)) > MOST_WAITING_BYTES:
            log.error("%s could not be written for too long; nothing is recorded any more", self.path)
            self._broken = True
            self._waiting.clear()

    def _unwritten(self, error: OSError) -> CheckpointNotWritten:
        return CheckpointNotWritten(f"{self.path} was not written: {error.strerror or error}")


def _first_line(base: int) -> bytes:
    return b"%s %d base=%d\n" % (MAGIC.encode(), FORMAT, base)


def _json(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()


def _ends_block(file: IO[bytes], at: int) -> bool:
    """Whether the last line before `at` is one that ends a block."""
    size = min(64, at)
    file.seek(at - size)
    before = file.read(size)
    return len(before) == size and before.endswith(b"\n") and before[:-1].rpartition(b"\n")[2].startswith(b"# ")
