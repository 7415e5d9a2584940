"""Positions: where one reader stands in each slot's stream, and what it has missed; pure bookkeeping, no Redis.

A position is a cursor (id of the last entry read) and, where writers tell it, an ordinal (how many entries the slot
had by then). Ids of a slot grow but not by one, so what was trimmed before it was read is known by the ordinals alone:
`note` and `skip` say how many entries were missed, exactly.

Two threads use a reader. Whoever changes positions, or reads them beside the thread that reads, holds the lock.
"""

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from clawq.core import BYGONE, FIRST, OVER, Entry, Stream
from clawq.transport.retained import EntryId, Retained
from clawq.transport.stream import id_text, parse_ids

#: Before the first entry of a stream.
START = (0, 0)


class Positions:
    """See the module's text.

    Args:
        required: nothing is trimmed before this reader has it.
        cursors: slot -> id of the last entry that needs not be read again.
        ordinals: slot -> ordinal of the entry at the cursor.

    Attributes:
        open_slots: slots in which reading begins with whatever comes first: nothing before that counts as missed.
        shortened: see StreamReader.take_shortened.
        retained: of a reader that trims, told what was read.
        lock: see above.
    """

    def __init__(self, required: bool, cursors: Mapping[str, str], ordinals: Mapping[str, int]) -> None:
        self.cursors = parse_ids(cursors)
        self.ordinals = dict(ordinals)
        self.open_slots = set(self.cursors) - set(self.ordinals)
        self.shortened: dict[str, tuple[str, str]] = {}
        self.retained: Retained | None = None
        self.lock = threading.Lock()
        self._required, self._on_other_server = required, False
        #: Slot -> its stream, as far as it was read from.
        self._streams: dict[str, Stream] = {}

    def at(self, slot: str) -> EntryId:
        """The slot's cursor."""
        return self.cursors.get(slot, START)

    def note(self, slot: str, read: Sequence[Entry]) -> list[Entry]:
        """Entries of a slot were read; they, and before each gap an Entry that says how many were missed."""
        entries: list[Entry] = []
        for entry in read:
            place = self._ordinal(slot, entry.stream)
            # Of a required reader nothing is trimmed: on another server what is missing at first was lost with the old.
            begun = slot in self.ordinals or not (self._required and self._on_other_server)
            if entry.ordinal > place + 1 and slot not in self.open_slots and begun:
                missed = entry.ordinal - place - 1
                entries.append(Entry(slot, entry.epoch, entry.seq - 1, b"", entry.ordinal - 1, missed, entry.stream))
            if entry.ordinal:
                self.ordinals[slot] = max(place, entry.ordinal)
                self.open_slots.discard(slot)
            self.retain(entry)
            entries.append(entry)
        if read:
            self.cursors[slot] = (read[-1].epoch, read[-1].seq)
        return entries

    def pass_by(self, entry: Entry) -> list[Entry]:
        """An entry that was read from an archive, as it counts: its stream, if that is there, does not hold it."""
        slot = entry.slot
        if entry.stream in (BYGONE, OVER):
            return [entry]
        if entry.missed:
            # The ordinal of the next one tells.
            return []
        place = self._ordinal(slot, entry.stream)
        self.cursors[slot] = (entry.epoch, entry.seq)
        if slot in self.open_slots:
            return [entry]
        self.ordinals[slot] = place + 1
        return [replace(entry, ordinal=place + 1)]

    def _ordinal(self, slot: str, stream: Stream) -> int:
        """Ordinal of the entry at the cursor, in the count of that stream's writers."""
        begun, self._streams[slot] = self._streams.get(slot), stream
        # Of a required reader nothing was trimmed in streams that it has forgotten.
        place = self.ordinals.get(slot, stream.before if self._required else 0)
        if begun not in (None, stream) and place > stream.before:
            # Writers that know nothing of earlier streams count anew.
            place = self.ordinals[slot] = stream.before
        return place

    def retain(self, entry: Entry) -> None:
        """An entry was read that is still in its stream."""
        if self.retained is not None:
            self.retained.note(entry.slot, (entry.epoch, entry.seq), len(entry.payload), entry.ordinal)

    def skip(self, slot: str, entry: EntryId, ordinal: int, stream: Stream = FIRST) -> Entry | None:
        """All of a slot's entries up to this one were trimmed; the word of what was missed, None if nothing was."""
        if slot in self.open_slots or entry <= self.at(slot):
            return None
        place = self._ordinal(slot, stream)
        if ordinal <= place:
            return None
        self.cursors[slot], self.ordinals[slot] = entry, ordinal
        return Entry(slot, *entry, b"", ordinal, ordinal - place, stream)

    def stream(self, slot: str, epoch: int) -> Stream | None:
        """The stream of an entry with that epoch, if entries of it were read before."""
        return self._streams.get(slot) if self.at(slot)[0] == epoch else None

    def keep(self, slots: Container[str], trimmed: Container[str]) -> list[str]:
        """Forget slots that are gone; returns those that had a cursor.

        Args:
            slots: those whose streams are there.
            trimmed: those whose writers would go on counting; of an optional reader their ordinals are remembered.
        """
        gone = [slot for slot in self.cursors if slot not in slots]
        for slot in [*gone, *(slot for slot in self.open_slots if slot not in slots)]:
            self.drop(slot)
        for slot in [slot for slot in self.ordinals if slot not in slots and slot not in trimmed]:
            del self.ordinals[slot]
        return gone

    def set_back(self, slot: str, last: EntryId) -> None:
        """The slot's stream is another one than was read: begin anew.

        Args:
            slot: which one.
            last: id of the last entry that its stream has ever given out.
        """
        if last > START:
            self.shortened[slot] = id_text(self.cursors[slot]), id_text(last)
        # A writer that has not noticed the new server yet goes on counting; where nothing ever was, all is counted.
        if self.cursors.pop(slot, None):
            self.open_slots.add(slot)
        else:
            self.open_slots.discard(slot)
        self.ordinals.pop(slot, None)
        self._streams.pop(slot, None)
        if self.retained is not None:
            self.retained.forget(slot)

    def count_anew(self, slots: Iterable[str]) -> None:
        """The server is another one: there writers may count as they will."""
        self._on_other_server = True
        self.open_slots |= {*self.ordinals, *self.cursors, *slots}
        self.ordinals, self._streams = {}, {}

    def drop(self, slot: str) -> None:
        """The slot's stream was taken away, read to its end."""
        self.cursors.pop(slot, None)
        self._streams.pop(slot, None)
        self.open_slots.discard(slot)
        if self._required:
            self.ordinals.pop(slot, None)
        if self.retained is not None:
            self.retained.forget(slot)
