"""The learner's schedule: what took effect on learning, in which order. Records, and the file that they are read from.

A learner is a function of its log and its schedule (DESIGN §5): the streams say what the fragments were, the schedule
says when each was committed and how many updates lay between. `schedule.log` in the run folder is text, one record a
line, in blocks that end with their size and CRC-32:

    clawq-schedule 1 base=0
    session {"n":1,"torch":"2.9.1","threads":2, ...}      a process began; JSON
    w 1                        weights version in force: it was published, or gone on with
    p 0                        progress in force, in thousandths of the budget
    o 0 host-w1-0 1764450000000        from here on 0 stands for that slot and epoch
    f 0 1                      its fragment 1 was committed (no seq: the one after the last)
    v 0 3 7 2                  its next fragment brought another's notice: env 3 from fragment 7, t 2 on
    x 0 3 7 2                  the like notice of a fragment that was not committed, heeded at once
    u 12                       12 updates were tried
    tune {"rate_limit.samples_per_insert":4}      a live change; JSON under any name of letters
    # 93 1b851995

Every block tells version, progress and slots anew, so reading may begin at any block; a checkpoint holds the position
at which one begins. `clawq.programs.recorder` writes it. About 4 to 8 bytes for each fragment and as many for the
updates after it: 0.4 MB an hour at 10 fragments a second, 8 MB at 200. Of a very long run the beginning goes: what is
older lies in `schedule.1.log`, and each of the two is at most FILE_BYTES large. No torch here.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from clawq.errors import ScheduleInvalid
from clawq.json_text import parse_json
from clawq.types import Voided

#: Name of the file in the run folder.
SCHEDULE_FILE = "schedule.log"
#: Bytes after which a file gives way to a new one.
FILE_BYTES = 64_000_000
MAGIC, FORMAT = "clawq-schedule", 1
#: Progress is counted in steps of 1/this: a value that changes rarely can be recorded.
PROGRESS_STEPS = 1000
#: Bytes after which a block ends; no block is ever larger than the second.
BLOCK_BYTES, LARGEST_BLOCK_BYTES = 32_768, 4_000_000
#: How a live change may be called; shorter words are the schedule's own.
CHANGE_NAME = re.compile(r"[a-z][a-z_]{3,31}")


@dataclass(frozen=True, slots=True)
class SessionBegun:
    """A learner process began, or went on from a checkpoint.

    Attributes:
        facts: n (1, 2, ...), updates, version, config (the whole one, without secrets), config_digest, torch, threads,
            device, and what a resume could not bring back (`missing`); see `clawq.programs.learner`.
    """

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FragmentCommitted:
    """A fragment went into the ring.

    Attributes:
        slot: with `epoch` and `seq` the fragment's identity, and its place in the streams.
        epoch: see `slot`.
        seq: see `slot`.
        version: the learner's weights version then.
        inherited: notices of refused fragments of its slot, which it brought beside its own.
    """

    slot: str
    epoch: int
    seq: int
    version: int
    inherited: tuple[Voided, ...] = ()


@dataclass(frozen=True, slots=True)
class RowsVoided:
    """A notice of a fragment that was refused after all was heeded."""

    slot: str
    epoch: int
    notice: Voided


@dataclass(frozen=True, slots=True)
class UpdatesTried:
    """Updates in a row with nothing between them (a non-finite one counts: it drew its batch).

    Attributes:
        count: how many.
        progress: spent share of the budget that they were told, 0..1.
        version: the learner's weights version then.
    """

    count: int
    progress: float
    version: int


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """The learner's weights version from here on."""

    version: int


@dataclass(frozen=True, slots=True)
class LiveChange:
    """Something was changed while the run went on, as `tune` or `quarantine`.

    Attributes:
        kind: a word.
        facts: what was changed; whoever records a kind knows how to apply it.
    """

    kind: str
    facts: Mapping[str, Any]


Record = SessionBegun | FragmentCommitted | RowsVoided | UpdatesTried | WeightsPublished | LiveChange


def older(path: Path) -> Path:
    """The file with what came before."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read_schedule(path: Path, since: int = 0) -> Iterator[Record]:
    """The records of a schedule, lazily.

    A last line that was torn by a crash is passed over; so is nothing else.

    Args:
        path: of the file.
        since: position at which a block begins (a checkpoint's), 0 = from the beginning.

    Raises:
        ScheduleInvalid: missing, of another format, damaged (the text says where), or it begins after `since`.
    """
    for _, record in read_positions(path, since):
        yield record


def read_positions(path: Path, since: int = 0) -> Iterator[tuple[int, Record]]:
    """As `read_schedule`, each record with the position at which its block ends (of the unfinished last one: begins).

    Replaying may begin at such a position; so may a checkpoint be looked up by it.
    """
    before = older(path)
    state = _State()
    try:
        files = [path]
        with path.open("rb") as file:
            base = read_base(path, file.readline())
        if since < base and before.exists():
            with before.open("rb") as file:
                base = read_base(before, file.readline())
            files.insert(0, before)
        if since < base and since != 0:
            raise ScheduleInvalid(f"{path}: position {since} is asked for, but it begins at {base}")
        for one in files:
            yield from _read_file(one, state, since if one == files[0] else 0)
    except OSError as error:
        raise ScheduleInvalid(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_file(path: Path, state: "_State", since: int) -> Iterator[tuple[int, Record]]:
    with path.open("rb") as file:
        base = read_base(path, file.readline())
        start = file.tell()
        file.seek(max(0, since - base), 1)
        for offset, lines, whole in _blocks(path, file):
            state.begin_block()
            yield from ((base + offset - start, record) for record in _parsed(path, state, lines, whole))


def read_base(path: Path, line: bytes) -> int:
    """The position at which a file begins, from its first line."""
    try:
        magic, version, base = line.decode("ascii").split()
        if magic != MAGIC or not line.endswith(b"\n"):
            raise ValueError
        if version != str(FORMAT):
            raise ScheduleInvalid(f"{path}: format {version}; this clawq reads format {FORMAT}")
        return int(base.removeprefix("base="))
    except ValueError:
        raise ScheduleInvalid(f"{path}: not a schedule of clawq, or its first line is damaged") from None


def end_line(block: bytes) -> bytes:
    """The line that ends a block."""
    return b"# %d %08x\n" % (len(block), zlib.crc32(block))


def _blocks(path: Path, file: IO[bytes]) -> Iterator[tuple[int, list[bytes], bool]]:
    """(where it ends, its lines, is it whole?) of each block."""
    lines: list[bytes] = []
    size, begins = 0, file.tell()
    while line := file.readline(LARGEST_BLOCK_BYTES):
        if line.startswith(b"#"):
            if line != end_line(b"".join(lines)):
                if not line.endswith(b"\n"):
                    break  # torn
                raise _damaged(path, begins, file.tell())
            yield file.tell(), lines, True
            lines, size, begins = [], 0, file.tell()
        else:
            lines.append(line)
            size += len(line)
            if size > LARGEST_BLOCK_BYTES:
                raise _damaged(path, begins, file.tell())
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if lines:
        yield begins, lines, False


def _damaged(path: Path, begins: int, ends: int) -> ScheduleInvalid:
    return ScheduleInvalid(f"{path}: damaged between bytes {begins} and {ends}; what lies before can be used")


@dataclass(slots=True)
class _State:
    """What the lines have told so far."""

    version: int = 0
    thousandths: int = 0
    #: number -> (slot, epoch, last seq)
    open: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    notices: dict[int, list[Voided]] = field(default_factory=dict)

    def begin_block(self) -> None:
        """Numbers stand for nothing until the block says so."""
        self.open.clear()
        self.notices.clear()

    def take(self, line: bytes) -> Record | None:
        """What a line says, None if it only prepares others. Raises ValueError or KeyError."""
        word, _, rest = line.decode("utf-8").rstrip("\n").partition(" ")
        if word == "f":
            return self._fragment(*map(int, rest.split()))
        if word == "u":
            return UpdatesTried(int(rest), self.thousandths / PROGRESS_STEPS, self.version)
        if word == "w":
            if (version := int(rest)) != self.version:
                self.version = version
                return WeightsPublished(version)
        elif word == "p":
            self.thousandths = int(rest)
        elif word == "o":
            number, slot, epoch = rest.split()
            self.open[int(number)] = slot, int(epoch), 0
        elif word == "v":
            number_, env, seq, t = map(int, rest.split())
            self.notices.setdefault(number_, []).append(Voided(env, seq, t))
        elif word == "x":
            number_, env, seq, t = map(int, rest.split())
            slot, epoch_, _ = self.open[number_]
            return RowsVoided(slot, epoch_, Voided(env, seq, t))
        elif word == "session":
            return SessionBegun(_facts(rest))
        elif CHANGE_NAME.fullmatch(word):
            return LiveChange(word, _facts(rest))
        else:
            raise ValueError(word)
        return None

    def _fragment(self, number: int, seq: int | None = None) -> FragmentCommitted:
        slot, epoch, last = self.open[number]
        seq = last + 1 if seq is None else seq
        self.open[number] = slot, epoch, seq
        return FragmentCommitted(slot, epoch, seq, self.version, tuple(self.notices.pop(number, ())))


def _facts(text: str) -> Mapping[str, Any]:
    facts = parse_json(text)
    if not isinstance(facts, dict):
        raise ValueError(text)
    return facts


def _parsed(path: Path, state: _State, lines: list[bytes], whole: bool) -> Iterator[Record]:
    for line in lines:
        try:
            record = state.take(line)
        except (ValueError, KeyError, TypeError):
            shown = line[:60].decode("utf-8", "replace").rstrip()
            more = "" if whole else " (after the last block that was checked)"
            raise ScheduleInvalid(f"{path}: the line {shown!r} cannot be understood{more}") from None
        if record is not None:
            yield record
