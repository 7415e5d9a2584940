"""The archive's one writer: appends entries, begins new segments, drops the oldest ones when a bound is set.

Guarantees: an entry is written once (its cursor is the last record of its slot, kept nowhere else). `durable_cursors`
tells what is on the disk for sure: everything is fsynced at most SYNC_S after it was written, and trimming of the
streams follows that. A crash leaves at most a torn last record, which the next writer cuts off, and reads again from
the streams. When the disk refuses, `append` raises and changes nothing: the same entry may be given again.

Not thread-safe: one thread writes. The folder is locked against a second writer as long as this one is open.
"""

import logging
import os
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from clawq.core import Entry
from clawq.transport.archive import Archive
from clawq.transport.archive_files import locked, sync_folder, write_all
from clawq.transport.segment_index import (
    SegmentIndex,
    build,
    index_of,
    index_path,
    open_index,
    segment_path,
    segment_paths,
    write_index,
)
from clawq.transport.segments import Record, Scan, SegmentHeader, pack_header, pack_record
from clawq.transport.stream import parse_id

log = logging.getLogger(__name__)

#: Written entries are on the disk for sure after this time at the latest, seconds.
SYNC_S = 1.0
#: Slots whose cursors are remembered beyond their records; the ones that wrote longest ago are forgotten first.
CURSORS_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How large things may get.

    Attributes:
        segment_bytes: a new segment begins when one has this size.
        total_bytes: most bytes of all segment files; the oldest ones go. None = no bound.
        compress: whether bodies are compressed where that pays.
    """

    segment_bytes: int = 64_000_000
    total_bytes: int | None = None
    compress: bool = True


class ArchiveWriter:
    """Writes an archive; use it as the only writer of its folder.

    Args:
        folder: made if it is missing.
        tag: of the run.
        limits: see ArchiveLimits.
        clock: monotonic seconds.

    Attributes:
        losses: what was found damaged or torn when it was opened, in words.
        entries: fragments written over all sessions.
        dropped_entries: of these, gone with the oldest segments.
        gap_fragments: seq numbers missing between the entries written by this session.

    Raises:
        ArchiveUnfit: the folder is another run's, or has a writer already.
        OSError: the disk refuses.
    """

    def __init__(
        self, folder: Path, tag: str, limits: ArchiveLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self._tag, self._limits, self._clock = folder, tag, limits, clock
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = locked(folder)
        self._fd = -1
        #: Of the segment that is being written: its records, and what is damaged in it.
        self._records: list[Record] = []
        self._losses: list[str] = []
        try:
            self.losses = self._recover()
        except BaseException:
            self.close()
            raise
        self.gap_fragments = 0
        #: Slots that were in the archive when there were so many sealed segments.
        self._slots_of, self._known_slots = -1, set[str]()
        self._dirty_since_s: float | None = None

    def _recover(self) -> list[str]:
        """Make what a crash left usable, and go on behind it; returns what was lost."""
        for left in self.folder.glob("*.tmp"):
            left.unlink(missing_ok=True)
        losses = self._mend()
        archive = Archive(self.folder, self._tag)
        losses += [loss for loss in archive.losses if loss not in losses]
        #: Sealed segments that are kept: their paths and sizes.
        self._sealed = [(index.path, index.summary.file_bytes) for index in archive.segments[:-1]]
        self._archive = archive
        self._cursors = archive.cursors()
        self._durable = dict(self._cursors)
        self.dropped_entries = archive.dropped[0]
        last = archive.segments[-1].with_rows() if archive.segments else None
        if last is None or last.summary.header.tag == "":
            self._begin(last)
        else:
            self._go_on(last)
        self._drop_oldest()
        return losses

    def _mend(self) -> list[str]:
        """Cut off a torn last record, and write the indexes that are missing."""
        losses: list[str] = []
        paths = segment_paths(self.folder)
        for path in paths[:-1]:
            if not index_path(path).exists():
                write_index(open_index(path).with_rows())
        if paths:
            index_path(paths[-1]).unlink(missing_ok=True)
            summary = build(paths[-1], verify=True).summary
            losses += summary.losses
            if summary.end < summary.file_bytes:
                os.truncate(paths[-1], summary.end)
                torn = summary.file_bytes - summary.end
                losses.append(f"{paths[-1].name}: a torn end of {torn} bytes was cut off")
        return losses

    def _go_on(self, last: SegmentIndex) -> None:
        header, self._at = last.summary.header, last.summary.records_at
        self._header, self._records = header, list(last.records())
        self._losses = list(last.summary.losses)
        self._path, self._end = last.path, last.summary.end
        self._fd = os.open(last.path, os.O_WRONLY)
        self.entries = header.entries_before + len(self._records)
        self._bytes = header.bytes_before + last.summary.size_bytes

    def _begin(self, last: SegmentIndex | None) -> None:
        """The first segment, or one behind a segment whose header is damaged."""
        if last is not None:
            write_index(last)
            self._sealed.append((last.path, last.summary.file_bytes))
        headers = [index.summary.header for index in self._archive.segments]
        self.entries = max((h.entries_before for h in headers), default=0)
        self._bytes = max((h.bytes_before for h in headers), default=0)
        for index in self._archive.segments[-1:]:
            self.entries += index.summary.entries
            self._bytes += index.summary.size_bytes
        self._open_next(headers[-1].number + 1 if headers else 1)

    def _open_next(self, number: int) -> None:
        """Make the next segment and write there from now on; on failure nothing has changed."""
        kept = dict(list(self._cursors.items())[-CURSORS_KEPT:])
        header = SegmentHeader(self._tag, number, int(time.time() * 1000), self.entries, self._bytes, kept)
        path, head = segment_path(self.folder, number), pack_header(header)
        partial = path.with_suffix(".tmp")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, head, 0)
            os.fsync(fd)
            os.rename(partial, path)
            sync_folder(self.folder)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path, self._header = fd, path, header
        self._at = self._end = len(head)
        self._records, self._losses = [], []

    # --- writing ------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> bool:
        """Write one entry; False if it is here already.

        Raises:
            OSError: the disk refuses; nothing has changed, and the entry may be given again.
        """
        if self._known(entry):
            return False
        if self._end >= self._limits.segment_bytes and self._records:
            self._rotate()
        content, record = pack_record(entry, self._limits.compress, self._end)
        # At the end that we know: a write that failed half-way is written over by the next one.
        write_all(self._fd, content, self._end)
        self._end = record.end
        self._records.append(record)
        self._note_gap(entry)
        # Moved to the end of the order: the slots that wrote longest ago come first.
        self._cursors.pop(entry.slot, None)
        self._cursors[entry.slot] = f"{entry.epoch}-{entry.seq}"
        self.entries += 1
        self._bytes += record.size
        if self._dirty_since_s is None:
            self._dirty_since_s = self._clock()
        return True

    def _known(self, entry: Entry) -> bool:
        """Whether that entry was written. A stream that began anew under lower ids holds new entries."""
        last = self._cursors.get(entry.slot)
        if last is not None and (entry.epoch, entry.seq) > parse_id(last):
            return False
        here = (entry.slot, entry.epoch, entry.seq)
        if any((record.slot, record.epoch, record.seq) == here for record in self._records):
            return True
        if last is None and entry.slot not in self._sealed_slots():
            return False
        self._archive.refresh()
        return self._archive.find(*here) is not None

    def _sealed_slots(self) -> Container[str]:
        """Slots of sealed segments."""
        if self._slots_of != len(self._sealed):
            self._slots_of = len(self._sealed)
            self._archive.refresh()
            self._known_slots = set(self._archive.slots())
        return self._known_slots

    def _note_gap(self, entry: Entry) -> None:
        last = self._cursors.get(entry.slot)
        epoch, seq = (0, 0) if last is None else parse_id(last)
        missing = entry.seq - 1 - (seq if epoch == entry.epoch else 0)
        # A slot that is new to the archive may be old in the streams: nothing is known of what it had before.
        if last is not None and missing > 0:
            self.gap_fragments += missing

    def sync_if_due(self) -> bool:
        """Fsync what has waited for SYNC_S; whether all is on the disk. OSError if the disk refuses."""
        if self._dirty_since_s is not None and self._clock() - self._dirty_since_s >= SYNC_S:
            self.sync()
        return self._dirty_since_s is None

    def forget(self, slots: Iterable[str]) -> None:
        """The streams of these slots are gone: their cursors are kept no longer, only their records."""
        for slot in slots:
            self._cursors.pop(slot, None)
            self._durable.pop(slot, None)

    def sync(self) -> None:
        """Fsync now; then `durable_cursors` are the cursors. OSError if the disk refuses."""
        if self._dirty_since_s is not None:
            os.fsync(self._fd)
        self._dirty_since_s = None
        self._durable = dict(self._cursors)

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry written."""
        return dict(self._cursors)

    def durable_cursors(self) -> dict[str, str]:
        """Slot -> id up to which entries are on the disk for sure: how far the streams may be trimmed."""
        return dict(self._durable)

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(size for _, size in self._sealed) + self._end

    def _rotate(self) -> None:
        """Seal the segment and begin the next one."""
        self.sync()
        sealed = (self._path, self._end)
        found = Scan(self._records, self._losses, self._end, self._end)
        index = index_of(self._path, self._header, self._at, found)
        # A write that failed left bytes behind the last record, and the index names the size without them.
        os.ftruncate(self._fd, self._end)
        self._open_next(self._header.number + 1)
        self._sealed.append(sealed)
        try:
            write_index(index)
        except OSError as error:
            log.warning("the index of %s was not written (%s); it is made again when it is needed", sealed[0], error)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Remove the oldest segments, so that there is room for a whole one within the bound."""
        most = self._limits.total_bytes
        while most is not None and self._sealed and self._sealed_bytes() + self._limits.segment_bytes > most:
            path, _ = self._sealed.pop(0)
            path.unlink(missing_ok=True)
            index_path(path).unlink(missing_ok=True)
            after = self._sealed[0][0] if self._sealed else self._path
            self.dropped_entries = open_index(after).summary.header.entries_before

    def _sealed_bytes(self) -> int:
        return sum(size for _, size in self._sealed)

    def close(self) -> None:
        """Fsync what can be and let the folder go. Idempotent."""
        if self._fd >= 0:
            try:
                self.sync()
            except OSError as error:
                log.warning("the end of the archive may not be on the disk: %s", error)
            os.close(self._fd)
            self._fd = -1
        self._lock.close()
