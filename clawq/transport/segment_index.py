"""The index of one segment: which fragments it holds and where, so that nothing has to be read to find one.

A sealed segment has its index beside it (`<name>.idx`); one that is missing, damaged or of another size of the segment
is made again from the segment's record heads. Layout: magic, checksum, length, then a small summary (msgpack): slots
with their first and last ids and times. It is all that opening an archive reads; then the rows, raw, with a checksum in
the summary, read when a fragment is looked for.
"""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from clawq.errors import ArchiveDamaged
from clawq.transport.retained import EntryId
from clawq.transport.segments import Record, Scan, SegmentHeader, read_header, scan
from clawq.types import Array

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"CLQI"
_NAME = re.compile(r"segment-\d{12}\.clq")
_MAX_SUMMARY_BYTES = 64_000_000
#: One row of the index; `slot` counts in the summary's slots.
ROW = np.dtype(
    [
        ("slot", "<u4"),
        ("codec", "<u4"),
        ("epoch", "<u8"),
        ("seq", "<u8"),
        ("made_ms", "<i8"),
        ("steps", "<u4"),
        ("size", "<u4"),
        ("stored", "<u4"),
        ("spare", "<u4"),
        ("offset", "<u8"),
        ("checksum", "<u8"),
    ]
)


class SlotSummary(msgspec.Struct, forbid_unknown_fields=True):
    """What a segment holds of one slot: entries, the smallest and largest id and time, and the sums.

    `newest` is the id of the entry written last: the largest, unless the stream began anew under lower ids.
    """

    entries: int
    first: EntryId
    last: EntryId
    newest: EntryId
    first_ms: int
    last_ms: int
    steps: int
    size_bytes: int


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    """What a segment holds.

    Attributes:
        header: the segment's own.
        file_bytes: size of the segment file that this was made for.
        records_at: where its records begin.
        end: where its last good record ends.
        slots: slot -> what it holds of it, in the order of first appearance.
        losses: what is damaged, in words.
        rows_checksum: XXH3-64 of the rows.
    """

    header: SegmentHeader
    file_bytes: int
    records_at: int
    end: int
    slots: dict[str, SlotSummary]
    losses: list[str]
    rows_checksum: int = 0

    @property
    def entries(self) -> int:
        """Records held."""
        return sum(slot.entries for slot in self.slots.values())

    @property
    def size_bytes(self) -> int:
        """Payload bytes held."""
        return sum(slot.size_bytes for slot in self.slots.values())


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """One segment, found.

    Attributes:
        path: of the segment file.
        summary: what it holds.
        rows: of dtype ROW, in the order of the file; None until they are asked for (`with_rows`).
    """

    path: Path
    summary: Summary
    rows: Array | None = None

    def with_rows(self) -> "SegmentIndex":
        """With its rows read; made again from the segment if the index file is damaged."""
        if self.rows is not None:
            return self
        rows = _read_rows(index_path(self.path), self.summary)
        return SegmentIndex(self.path, self.summary, rows) if rows is not None else build(self.path)

    def records(self, chosen: Array | None = None) -> Iterator[Record]:
        """The records of the chosen rows (all if None); `with_rows` must have been called."""
        assert self.rows is not None
        names = list(self.summary.slots)
        for row in (self.rows if chosen is None else self.rows[chosen]).tolist():
            slot, codec, epoch, seq, made_ms, steps, size, stored, _, offset, checksum = row
            yield Record(names[slot], epoch, seq, made_ms, steps, offset, size, stored, codec, checksum)


def segment_path(folder: Path, number: int) -> Path:
    """The segment file of that number."""
    return folder / f"segment-{number:012d}.clq"


def segment_number(path: Path) -> int:
    """Inverse of `segment_path`."""
    return int(path.stem.rpartition("-")[2])


def segment_paths(folder: Path) -> list[Path]:
    """The segment files in a folder, oldest first."""
    return sorted(path for path in folder.glob("segment-*.clq") if _NAME.fullmatch(path.name))


def index_path(segment: Path) -> Path:
    """Where the index of a segment stands."""
    return segment.with_suffix(".idx")


def open_index(path: Path) -> SegmentIndex:
    """The index of a segment: from its file, or made from the segment where that does not fit (not written then).

    Raises:
        ArchiveUnfit: written by another version of clawq.
        FileNotFoundError: the segment was removed meanwhile.
    """
    summary = _read_summary(index_path(path))
    if summary is not None and summary.file_bytes == path.stat().st_size:
        return SegmentIndex(path, summary)
    return build(path)


def build(path: Path, verify: bool = False) -> SegmentIndex:
    """Make the index from the segment itself; `verify` reads the bodies too.

    A segment with a damaged header loses its header: its records are looked for from its first byte on.
    """
    try:
        header, start = read_header(path)
    except ArchiveDamaged as error:
        found = scan(path, 0, verify)
        found.losses.insert(0, str(error))
        return index_of(path, SegmentHeader("", segment_number(path), 0), 0, found)
    return index_of(path, header, start, scan(path, start, verify))


def index_of(path: Path, header: SegmentHeader, start: int, found: Scan) -> SegmentIndex:
    """The index of what a scan has found."""
    slots: dict[str, SlotSummary] = {}
    numbers: dict[str, int] = {}
    for record in found.records:
        numbers.setdefault(record.slot, len(numbers))
        note(slots, record)
    rows = np.zeros(len(found.records), ROW)
    for index, record in enumerate(found.records):
        rows[index] = row_of(record, numbers[record.slot])
    summary = Summary(header, found.size, start, found.end, slots, found.losses)
    return SegmentIndex(path, summary, rows)


def row_of(record: Record, slot: int) -> tuple[Any, ...]:
    """The row of a record whose slot has that number."""
    return (
        slot, record.codec, record.epoch, record.seq, record.made_ms, record.steps, record.size, record.stored, 0,
        record.offset, record.checksum,
    )  # fmt: skip


def note(slots: dict[str, SlotSummary], record: Record) -> None:
    """Add a record to the summaries."""
    entry, known = (record.epoch, record.seq), slots.get(record.slot)
    if known is None:
        made_ms = record.made_ms
        slots[record.slot] = SlotSummary(1, entry, entry, entry, made_ms, made_ms, record.steps, record.size)
        return
    known.entries += 1
    known.first, known.last, known.newest = min(known.first, entry), max(known.last, entry), entry
    known.first_ms, known.last_ms = min(known.first_ms, record.made_ms), max(known.last_ms, record.made_ms)
    known.steps += record.steps
    known.size_bytes += record.size


def write_index(index: SegmentIndex) -> None:
    """Write the index file of a sealed segment: whole or not at all. OSError if the disk refuses."""
    assert index.rows is not None
    rows = index.rows.tobytes()
    text = msgspec.msgpack.encode(msgspec.structs.replace(index.summary, rows_checksum=_digest(rows)))
    path = index_path(index.path)
    partial = path.with_suffix(".tmp")
    try:
        partial.write_bytes(_HEAD.pack(_MAGIC, len(text), _digest(text)) + text + rows)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read_summary(path: Path) -> Summary | None:
    """The summary in an index file, None if there is none that can be used."""
    try:
        with path.open("rb") as file:
            magic, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
            text = file.read(min(length, _MAX_SUMMARY_BYTES))
        if magic != _MAGIC or _digest(text) != checksum:
            return None
        return msgspec.msgpack.decode(text, type=Summary)
    except (OSError, struct.error, msgspec.MsgspecError):
        return None


def _read_rows(path: Path, summary: Summary) -> Array | None:
    try:
        content = path.read_bytes()
        _, length, _ = _HEAD.unpack_from(content)
    except (OSError, struct.error):
        return None
    rows = content[_HEAD.size + length :]
    if len(rows) != summary.entries * ROW.itemsize or _digest(rows) != summary.rows_checksum:
        return None
    return np.frombuffer(rows, ROW)


def _digest(content: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(content))
