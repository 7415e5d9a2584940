"""What a run's streams hold, as their reader knows it: which entries were read, how large they were, in which order.

Pure bookkeeping, no Redis. Entries are noted in the order in which they were read, which is close to the order in which
they were made; ids do not tell it across slots, because an id begins with the time at which its slot's epoch began.
Trimming removes from the front of that order, and only entries that checkpoints cover.

Questions about cursors cost a binary search in each slot, so they may be asked often and for many readers.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

#: (epoch, seq) of a stream entry.
EntryId = tuple[int, int]
#: A column of a slot is compacted when so many of its entries, and more than half of them, are gone.
_COMPACT = 1024


@dataclass(frozen=True, slots=True)
class _Noted:
    slot: str
    entry: EntryId
    size_bytes: int
    ordinal: int


@dataclass(slots=True)
class _Column:
    """One slot's entries in the order of their ids; those before `first` are gone.

    `slot_ends` and `ends` are bytes noted up to and with each entry, of the slot and of all slots.
    """

    ids: list[EntryId] = field(default_factory=list)
    slot_ends: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    first: int = 0

    def __len__(self) -> int:
        return len(self.ids) - self.first

    def upto(self, cursor: EntryId) -> int:
        """Index of the first entry after the cursor."""
        return max(self.first, bisect_right(self.ids, cursor))

    def bytes_before(self, index: int) -> int:
        return self.slot_ends[index - 1] if index else 0

    def drop_first(self) -> None:
        self.first += 1
        if self.first >= _COMPACT and 2 * self.first >= len(self.ids):
            base = self.slot_ends[self.first - 1]
            self.slot_ends = [end - base for end in self.slot_ends[self.first :]]
            del self.ids[: self.first], self.ends[: self.first]
            self.first = 0


class Retained:
    """Entries that were read and are still in the streams."""

    def __init__(self) -> None:
        self._order: deque[_Noted] = deque()
        self._columns: dict[str, _Column] = {}
        self._noted_bytes = self._dropped_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self._noted_bytes - self._dropped_bytes

    def entries(self, slot: str) -> int:
        """How many of that slot."""
        return len(self._columns.get(slot, ()))

    def slots(self) -> list[str]:
        """Slots that have any."""
        return [slot for slot, column in self._columns.items() if len(column)]

    def mean_bytes(self) -> float:
        """Mean size, 0 if there are none."""
        return self.total_bytes / len(self._order) if self._order else 0.0

    def note(self, slot: str, entry: EntryId, size_bytes: int, ordinal: int = 0) -> None:
        """An entry was read; entries of a slot come in the order of their ids."""
        self._order.append(_Noted(slot, entry, size_bytes, ordinal))
        self._noted_bytes += size_bytes
        column = self._columns.setdefault(slot, _Column())
        column.slot_ends.append(column.bytes_before(len(column.ids)) + size_bytes)
        column.ids.append(entry)
        column.ends.append(self._noted_bytes)

    def forget(self, slot: str) -> None:
        """A slot's stream is gone."""
        kept = [noted for noted in self._order if noted.slot != slot]
        self._order, self._columns = deque(), {}
        self._noted_bytes = self._dropped_bytes = 0
        for noted in kept:
            self.note(noted.slot, noted.entry, noted.size_bytes, noted.ordinal)

    def bytes_after(self, cursors: Mapping[str, EntryId]) -> int:
        """Bytes of the entries that lie behind none of these cursors."""
        return sum(self.slot_bytes_after(cursors).values())

    def slot_bytes_after(self, cursors: Mapping[str, EntryId]) -> dict[str, int]:
        """Of each slot the bytes of the entries that lie after its cursor."""
        return {slot: self._after(slot, column, cursors) for slot, column in self._columns.items()}

    def _after(self, slot: str, column: _Column, cursors: Mapping[str, EntryId]) -> int:
        first = column.upto(cursors[slot]) if slot in cursors else column.first
        return column.bytes_before(len(column.ids)) - column.bytes_before(first)

    def within(self, cursors: Mapping[str, EntryId], room_bytes: int) -> dict[str, EntryId]:
        """These cursors, each held back to where the oldest `room_bytes` of all entries end."""
        limit = self._dropped_bytes + room_bytes
        found: dict[str, EntryId] = {}
        for slot, cursor in cursors.items():
            column = self._columns.get(slot, _Column())
            upto = column.upto(cursor)
            fits = min(upto, bisect_right(column.ends, limit))
            if fits == upto:
                found[slot] = cursor
            elif fits > column.first:
                found[slot] = column.ids[fits - 1]
        return found

    def uncovered(self, checkpointed: Mapping[str, EntryId]) -> bool:
        """Whether the oldest entry is behind no checkpoint, so that nothing can be dropped."""
        return bool(self._order) and not _covers(checkpointed, self._order[0])

    def take_oldest(self, checkpointed: Mapping[str, EntryId], excess_bytes: int) -> dict[str, tuple[EntryId, int]]:
        """Drop the oldest checkpointed entries until `excess_bytes` are saved; slot -> id and ordinal of its last one.

        Stops at the first entry that no checkpoint covers: what was read later is not covered either.
        """
        dropped: dict[str, tuple[EntryId, int]] = {}
        enough = self._dropped_bytes + excess_bytes
        for noted in self._droppable(checkpointed):
            if self._dropped_bytes >= enough:
                break
            self._order.popleft()
            self._dropped_bytes += noted.size_bytes
            self._columns[noted.slot].drop_first()
            dropped[noted.slot] = noted.entry, noted.ordinal
        return dropped

    def _droppable(self, checkpointed: Mapping[str, EntryId]) -> Iterator[_Noted]:
        while self._order and _covers(checkpointed, self._order[0]):
            yield self._order[0]


def slowest(checkpoints: list[Mapping[str, EntryId]]) -> dict[str, EntryId]:
    """Of each slot the least of several readers' cursors; slots that one of them lacks are left out."""
    first, *others = checkpoints
    return {
        slot: min([entry, *(other[slot] for other in others)])
        for slot, entry in first.items()
        if all(slot in other for other in others)
    }


def _covers(checkpointed: Mapping[str, EntryId], noted: _Noted) -> bool:
    return noted.entry <= checkpointed.get(noted.slot, (-1, -1))
