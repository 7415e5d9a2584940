"""Arrears: what an archive holds that no stream holds any more, and that a reader has not read.

When a reader finds another server than it read from, or begins where an earlier process was killed, entries may be on
disk alone: the server came back empty or older, or they were trimmed behind a checkpoint that can be read no more. They
are read before the streams are read on: of a slot in the order of its ids, over slots by the time in their headers;
what a stream holds in their midst is read from there in its turn. So every entry comes once, in its order.

One payload at a time is read, whatever there is of them. What is damaged is told and counted: an Entry that says so.
"""

import contextlib
import heapq
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import redis

from clawq.core import BYGONE, OVER, Entry, Stream
from clawq.errors import ArchiveDamaged, RecordUnreadable, StoreUnavailable
from clawq.transport.archive import Archive, Located
from clawq.transport.keys import RunKeys
from clawq.transport.live_streams import LiveStreams
from clawq.transport.read_back import made_at, slot_entries
from clawq.transport.retained import EntryId
from clawq.transport.stream import id_text, parse_id

log = logging.getLogger(__name__)

#: Damaged entries that are told one by one.
_LOSSES_TOLD = 20
#: Gives slot -> id and ordinal of the last entry that was trimmed, and its stream (`Discovery.trimmed`).
Trimmed: TypeAlias = Callable[[], Mapping[str, tuple[EntryId, int, Stream]]]


@dataclass(frozen=True, slots=True)
class Owed:
    """An entry of the arrears.

    Attributes:
        entry: with its payload; or the word that it is lost.
        streamed: its stream holds it, and it was read from there.
    """

    entry: Entry
    streamed: bool


class Arrears:
    """Reads them. One thread uses it.

    Args:
        client: of the data server.
        keys: of the run.
        open_archive: gives the archive as it is now.
        seen: slot -> the largest id that was read of it; asked when arrears are looked for.

    Attributes:
        slots: of which some are still to come -> epoch of the last.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: RunKeys,
        open_archive: Callable[[], Archive],
        seen: Callable[[str], EntryId],
    ) -> None:
        self.slots: dict[str, int] = {}
        self._client, self._keys = client, keys
        self._streams = LiveStreams(client, keys)
        self._open_archive, self._seen = open_archive, seen
        self._archive: Archive | None = None
        self._server: str | None = None
        self._trimmed: Mapping[str, tuple[EntryId, int, Stream]] = {}
        self._due: Iterator[Located | Entry] = iter(())
        #: Slot -> the archive's last id; how many are still to come; how many of these were found by the last look.
        self._newest: dict[str, EntryId] = {}
        self._left: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._lost = 0

    def look(self, server: str, trimmed: Trimmed) -> None:
        """Look for them: once on each server, and again where the last look, or reading, failed.

        Args:
            server: which it is now.
            trimmed: what its streams have given up.
        """
        if server == self._server:
            return
        self._server = None
        self._close()
        self._trimmed, self._archive = trimmed(), self._open_archive()
        archive, newest = self._archive, _newest(self._archive)
        after = {slot: self._seen(slot) for slot in newest}
        due = {slot: _Due(slot, after[slot], newest[slot]) for slot in newest if newest[slot] > after[slot]}
        for one in due.values():
            one.look(self._streams)
        left = {slot: sum(1 for _ in one.archived(archive)) for slot, one in due.items()}
        left = {slot: count for slot, count in left.items() if count}
        self._found = {slot: count - self._left.get(slot, 0) for slot, count in left.items()}
        self._newest, self._left, self.slots = newest, left, {slot: newest[slot][0] for slot in left}
        self._due = heapq.merge(*(self._of_slot(due[slot], archive) for slot in left), key=_order)
        self._server = server
        if left:
            log.warning(
                "%d fragments of %d slots are in the archive alone; they are read before the streams are read on",
                sum(left.values()), len(left),
            )  # fmt: skip
        _tell_missing(archive, after)

    def found(self, slot: str) -> int:
        """How many of a slot the last look found that were not known before: they are not lost with their server."""
        return self._found.get(slot, 0)

    def next(self) -> Owed | None:
        """The next one; None if there are none (any more).

        Raises:
            StoreUnavailable: nothing was read; they must be looked for again before anything else is read.
        """
        try:
            due = next(self._due, None)
        except StoreUnavailable:
            self._server = None
            raise
        if due is None:
            return self._gone()
        return Owed(due, True) if isinstance(due, Entry) else Owed(self._read(due), False)

    def _gone(self) -> Owed | None:
        """All was read that is there; the word of what went with its segment while we read."""
        self._close()
        if not self._left:
            return None
        slot, count = self._left.popitem()
        del self.slots[slot]
        self._lose(f"{count} fragments of {slot} went with the archive's oldest segments before they were read")
        entry = self._newest[slot]
        return Owed(Entry(slot, *entry, b"", missed=count, stream=self._stream(slot, entry)), False)

    def _of_slot(self, due: "_Due", archive: Archive) -> Iterator[Located | Entry]:
        for before, streamed in due.parts():
            yield from archive.records(due.slot, *before)
            if streamed is not None:
                yield from slot_entries(self._client, self._keys, due.slot, *streamed)

    def _read(self, located: Located) -> Entry:
        record, archive = located.record, self._archive
        assert archive is not None
        self._left[record.slot] -= 1
        if not self._left[record.slot]:
            del self._left[record.slot], self.slots[record.slot]
        stream = self._stream(record.slot, (record.epoch, record.seq))
        try:
            return Entry(record.slot, record.epoch, record.seq, archive.read(located), stream=stream)
        except ArchiveDamaged as error:
            self._lose(str(error))
            return Entry(record.slot, record.epoch, record.seq, b"", missed=1, stream=stream)

    def _lose(self, text: str) -> None:
        self._lost += 1
        if self._lost <= _LOSSES_TOLD:
            log.warning("%s; that is lost, and counted", text)

    def _stream(self, slot: str, entry: EntryId) -> Stream:
        """In which stream it was."""
        trimmed, _, stream = self._trimmed.get(slot, ((-1, -1), 0, OVER))
        if entry > trimmed:
            # This server has never seen it, or does not know.
            return BYGONE
        return stream if entry[0] >= stream.born else OVER

    def _close(self) -> None:
        if self._archive is not None:
            self._archive.close()
        self._archive, self._due = None, iter(())


@dataclass(slots=True)
class _Due:
    """What is due of one slot: ids above `after`, up to `newest`, the archive's last.

    `first` and `last` are the first and the last of these ids that the stream holds, None if it holds none.
    """

    slot: str
    after: EntryId
    newest: EntryId
    first: EntryId | None = None
    last: EntryId | None = None

    def look(self, streams: LiveStreams) -> None:
        """See what the stream holds."""
        # Something of another type is no stream.
        with contextlib.suppress(RecordUnreadable):
            first = streams.next(self.slot, self.after, self.newest)
            last = streams.last(self.slot, self.newest)
            if first is not None and last is not None:
                self.first, self.last = first.id, last.id

    def parts(self) -> Iterator[tuple["_Range", "_Range | None"]]:
        """(what to read from the archive, what to read from the stream then), twice at most; ids in (after, upto]."""
        if self.first is None or self.last is None:
            yield (self.after, self.newest), None
            return
        epoch, seq = self.first
        more = self.last < self.newest
        yield (self.after, (epoch, seq - 1)), (self.after, self.last) if more else None
        if more:
            yield (self.last, self.newest), None

    def archived(self, archive: Archive) -> Iterator[Located]:
        """The part of it that only the archive has."""
        for before, _ in self.parts():
            yield from archive.records(self.slot, *before)


#: Ids above the first, up to the second.
_Range: TypeAlias = tuple[EntryId, EntryId]


def _newest(archive: Archive) -> dict[str, EntryId]:
    """Slot -> the largest id that the archive holds of it."""
    found: dict[str, EntryId] = {}
    for index in archive.segments:
        for slot, held in index.summary.slots.items():
            found[slot] = max(held.last, found.get(slot, held.last))
    return found


def _order(due: Located | Entry) -> tuple[int, int, int]:
    if isinstance(due, Entry):
        return made_at(due)
    return due.record.made_ms, due.record.epoch, due.record.seq


def _tell_missing(archive: Archive, after: Mapping[str, EntryId]) -> None:
    """Say so if unread entries went with the oldest segments of an archive that is bounded."""
    begins = archive.segments[0].summary.header.cursors if archive.segments else {}
    short = [slot for slot, entry in begins.items() if slot in after and parse_id(entry) > after[slot]]
    if short:
        log.warning(
            "the archive begins behind what was read of %d slots (of %s after %s): fragments went with its oldest "
            "segments unread; their env steps are counted as lost when a later header of the same actor tells of them",
            len(short), short[0], id_text(after[short[0]]),
        )  # fmt: skip


__all__ = ["Arrears", "Owed"]
