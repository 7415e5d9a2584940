"""The archive: a run's streams on disk, so that the log can be larger than memory and outlive Redis. Reading.

A folder of segment files (`segments`), each with an index (`segment_index`); `archive_writer` makes them. Entries of a
slot are in the order of its stream. Reading needs no lock and may go on while the learner writes: what is whole when it
is looked at is seen, and a segment that the writer removed meanwhile counts as gone. Damage costs what it hit and
nothing else; it is listed in `losses`.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from clawq.errors import ArchiveDamaged, ArchiveUnfit
from clawq.transport.retained import EntryId
from clawq.transport.segment_index import SegmentIndex, build, open_index, segment_number, segment_paths
from clawq.transport.segments import Record, read_payload
from clawq.types import Array

#: Indexes whose rows, and files that are held open while reading.
_HELD = 32


@dataclass(frozen=True, slots=True)
class Located:
    """A record and the segment file that it lies in."""

    path: Path
    record: Record

    @property
    def place(self) -> "Place":
        """Where it lies, in the order of writing."""
        return segment_number(self.path), self.record.offset


#: Number of a segment and an offset in it.
Place: TypeAlias = tuple[int, int]


class Archive:
    """What an archive holds, as of the last `refresh`. Not thread-safe.

    Args:
        folder: of the segments; one that does not exist is an empty archive.
        tag: of the run; "" = whatever run it is.

    Raises:
        ArchiveUnfit: it is another run's, or of another version of clawq.
    """

    def __init__(self, folder: Path, tag: str = "") -> None:
        self.folder, self.tag = folder, tag
        self.segments: list[SegmentIndex] = []
        self._rows: OrderedDict[Path, SegmentIndex] = OrderedDict()
        self._files: OrderedDict[Path, int] = OrderedDict()
        self.refresh()

    def refresh(self) -> None:
        """Look again: segments may have been added, grown or removed."""
        known = {index.path: index for index in self.segments}
        self.segments = []
        for path in segment_paths(self.folder):
            try:
                index = known.get(path)
                if index is None or index.summary.file_bytes != path.stat().st_size:
                    self._rows.pop(path, None)
                    index = open_index(path)
            except FileNotFoundError:
                continue
            if self.tag and index.summary.header.tag not in ("", self.tag):
                raise ArchiveUnfit(f"{path} is of the run with tag {index.summary.header.tag}, not of {self.tag}")
            self.segments.append(index)

    # --- what is held -------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Fragments held."""
        return sum(index.summary.entries for index in self.segments)

    @property
    def size_bytes(self) -> int:
        """Payload bytes held."""
        return sum(index.summary.size_bytes for index in self.segments)

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""
        return sum(index.summary.file_bytes for index in self.segments)

    @property
    def dropped(self) -> tuple[int, int]:
        """Fragments that went with the oldest segments, and their payload bytes."""
        if not self.segments:
            return 0, 0
        header = self.segments[0].summary.header
        return header.entries_before, header.bytes_before

    @property
    def losses(self) -> list[str]:
        """What is damaged, in words."""
        return [loss for index in self.segments for loss in index.summary.losses]

    def slots(self) -> list[str]:
        """Slots that have entries here."""
        return sorted({slot for index in self.segments for slot in index.summary.slots})

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the entry written last, also where that went with an old segment."""
        cursors: dict[str, str] = {}
        for index in self.segments:
            cursors |= index.summary.header.cursors
            cursors |= {slot: "{}-{}".format(*held.newest) for slot, held in index.summary.slots.items()}
        return cursors

    # --- finding ------------------------------------------------------------------------------------------------

    def find(self, slot: str, epoch: int, seq: int) -> Located | None:
        """Where that entry lies, None if it is not held."""
        for index in reversed(self.segments):
            held = index.summary.slots.get(slot)
            if held is None or not held.first <= (epoch, seq) <= held.last:
                continue
            full = self._with_rows(index)
            if full is not None and full.rows is not None:
                rows = full.rows
                chosen = (rows["seq"] == seq) & (rows["epoch"] == epoch) & _is_slot(full, slot)
                for record in full.records(chosen):
                    return Located(index.path, record)
        return None

    def records(
        self, slot: str, after: EntryId | None = None, upto: EntryId | None = None, behind: Place = (0, 0)
    ) -> Iterator[Located]:
        """The entries of a slot in order, their payloads unread.

        Args:
            slot: whose.
            after: only ids above this one.
            upto: only ids up to this one.
            behind: only records behind this place.
        """
        for index in self.segments:
            held, number = index.summary.slots.get(slot), segment_number(index.path)
            if held is None or number < behind[0] or (after and held.last <= after) or (upto and held.first > upto):
                continue
            full = self._with_rows(index)
            if full is None:
                continue
            for record in full.records(_is_slot(full, slot)):
                entry = (record.epoch, record.seq)
                if (after is None or entry > after) and (upto is None or entry <= upto):
                    located = Located(index.path, record)
                    if located.place > behind:
                        yield located

    def read(self, located: Located) -> bytes:
        """The payload.

        Raises:
            ArchiveDamaged: it is not what was written, or its segment was removed meanwhile.
        """
        with self._file(located.path) as fd:
            return read_payload(fd, located.record)

    @contextmanager
    def _file(self, path: Path) -> Iterator[int]:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise ArchiveDamaged(f"{path} cannot be read: {error.strerror or error}") from None
            if len(self._files) > _HELD:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(path)
        try:
            yield self._files[path]
        except OSError as error:
            raise ArchiveDamaged(f"{path} cannot be read: {error.strerror or error}") from None

    def _with_rows(self, index: SegmentIndex) -> SegmentIndex | None:
        """The index with its rows, kept for a while; None if the segment was removed meanwhile."""
        if index.path not in self._rows:
            try:
                self._rows[index.path] = index.with_rows()
            except OSError:
                return None
            if len(self._rows) > _HELD:
                self._rows.popitem(last=False)
        self._rows.move_to_end(index.path)
        return self._rows[index.path]

    def check(self) -> list[str]:
        """Read everything and compare it with its checksums; what is damaged, in words."""
        return [loss for index in self.segments for loss in build(index.path, verify=True).summary.losses]

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._files:
            os.close(self._files.popitem()[1])


def _is_slot(index: SegmentIndex, slot: str) -> Array:
    assert index.rows is not None
    chosen: Array = index.rows["slot"] == np.uint32(list(index.summary.slots).index(slot))
    return chosen
