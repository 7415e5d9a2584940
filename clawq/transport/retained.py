"""What a run's streams hold, as their reader knows it: which entries were read, how large they were, in which order.

Pure bookkeeping, no Redis. Entries are noted in the order in which they were read, which is close to the order in which
they were made; ids do not tell it across slots, because an id begins with the time at which its slot's epoch began.
Trimming removes from the front of that order, and only entries that a checkpoint covers.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: (epoch, seq) of a stream entry.
EntryId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Noted:
    slot: str
    entry: EntryId
    size_bytes: int


class Retained:
    """Entries that were read and are still in the streams."""

    def __init__(self) -> None:
        self._order: deque[_Noted] = deque()
        self._bytes: dict[str, int] = {}
        self._entries: dict[str, int] = {}
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self._total_bytes

    def entries(self, slot: str) -> int:
        """How many of that slot."""
        return self._entries.get(slot, 0)

    def slots(self) -> list[str]:
        """Slots that have any."""
        return list(self._entries)

    def mean_bytes(self) -> float:
        """Mean size, 0 if there are none."""
        return self._total_bytes / len(self._order) if self._order else 0.0

    def note(self, slot: str, entry: EntryId, size_bytes: int) -> None:
        """An entry was read."""
        self._order.append(_Noted(slot, entry, size_bytes))
        self._bytes[slot] = self._bytes.get(slot, 0) + size_bytes
        self._entries[slot] = self._entries.get(slot, 0) + 1
        self._total_bytes += size_bytes

    def forget(self, slot: str) -> None:
        """A slot's stream is gone."""
        self._order = deque(noted for noted in self._order if noted.slot != slot)
        self._total_bytes -= self._bytes.pop(slot, 0)
        self._entries.pop(slot, None)

    def bytes_after(self, cursors: Mapping[str, EntryId]) -> int:
        """Bytes of the entries that lie behind none of these cursors."""
        nothing = (-1, -1)
        return sum(noted.size_bytes for noted in self._order if noted.entry > cursors.get(noted.slot, nothing))

    def take_oldest(self, checkpointed: Mapping[str, EntryId], excess_bytes: int) -> dict[str, EntryId]:
        """Drop the oldest checkpointed entries until `excess_bytes` are saved; slot -> last id dropped.

        Stops at the first entry that no checkpoint covers: what was read later is not covered either.
        """
        dropped: dict[str, EntryId] = {}
        saved = 0
        for noted in self._droppable(checkpointed):
            if saved >= excess_bytes:
                break
            self._order.popleft()
            saved += noted.size_bytes
            dropped[noted.slot] = noted.entry
            self._bytes[noted.slot] -= noted.size_bytes
            self._entries[noted.slot] -= 1
            if not self._entries[noted.slot]:
                del self._entries[noted.slot], self._bytes[noted.slot]
        self._total_bytes -= saved
        return dropped

    def _droppable(self, checkpointed: Mapping[str, EntryId]) -> Iterator[_Noted]:
        nothing = (-1, -1)
        while self._order and self._order[0].entry <= checkpointed.get(self._order[0].slot, nothing):
            yield self._order[0]
