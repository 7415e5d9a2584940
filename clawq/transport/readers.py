"""The reading end: one reader follows all slot streams of a run, with a cursor for each.

Plain XREAD, no consumer groups (they were measured: no faster, and an ack and a checkpoint can never be atomic). The
cursors belong into the reader's checkpoint; `acknowledge` mirrors them in Redis, so that actors can be paced, and
`checkpointed` says how far trimming may go for this reader.

A reader has a name and a role (clawq.transport.registry). An optional one is never waited for: where entries were
trimmed before it came, `read` gives an Entry that says how many it missed, exactly, by the ordinals in the entries.

It is put together from

    discovery          which slots there are, twice a second
    rotation           XREAD of as many streams at a time as make a small reply
    positions          cursors, ordinals, what was missed
    arrears            what only an archive has: read first
    backlog            how much is not read yet
    restarts           a server that came back empty or older: cursors are set back, and reading goes on
    presence           the place in the registry
    acknowledgements   what is told to actors and to trimming
    trimming           of the run's learner alone

Ids of new epochs are accepted whatever they are; deduplication by (slot, epoch, seq) is the consumer's. Two threads may
use one reader: one reads, the other acknowledges and trims.
"""

import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

import redis

from clawq.core import FIRST, OVER, Entry, Slots, Stream, Vanished
from clawq.errors import StoreUnavailable
from clawq.transport.acknowledgements import Acknowledgements
from clawq.transport.arrears import Arrears
from clawq.transport.backlog import Backlog
from clawq.transport.discovery import Discovery
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.positions import Positions
from clawq.transport.presence import Presence
from clawq.transport.read_back import read_back
from clawq.transport.restarts import Restarts, server_of
from clawq.transport.retained import EntryId
from clawq.transport.rotation import Rotation
from clawq.transport.stream import id_text, parse_ids
from clawq.transport.trimming import Trimming


class StreamReader:
    """Follows the streams of a run; a core.FragmentSource.

    Args:
        client: of the data server; its socket timeout bounds how long one XREAD may block.
        keys: of the run.
        reader: its name in the registry; `learner` is the run's learner, which also trims.
        cursors: slot -> id of the last entry that needs not be read again (from a checkpoint).
        clock: monotonic seconds.
        required: whether trimming and actors wait for it; the learner is required, always.
        ordinals: slot -> ordinal of the entry at the cursor (from a checkpoint).
        what: what it is, for people.
        server: run id of the server that these cursors are of; empty if they are of none.
        unread: slot -> entries behind these cursors when they were taken, as far as is known.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: RunKeys,
        reader: str = LEARNER,
        cursors: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        required: bool = False,
        ordinals: Mapping[str, int] | None = None,
        what: str = "",
        server: str = "",
        unread: Mapping[str, int] | None = None,
    ) -> None:
        self.name, self.required = reader, required or reader == LEARNER
        self._client: Any = client
        self._keys, self._clock = keys, clock
        self._positions = Positions(self.required, cursors or {}, ordinals or {})
        self._trimming = Trimming(client, keys, self._positions.lock) if reader == LEARNER else None
        self._positions.retained = None if self._trimming is None else self._trimming.retained
        self._backlog = Backlog(client, keys, self._positions, unread or {})
        self._restarts = Restarts(client, keys, self._positions, self._backlog, server)
        self._presence = Presence(client, keys, reader, self.required, what or reader)
        self._acknowledgements = Acknowledgements(client, keys, reader, self._positions.lock, self._trimming)
        self._discovery = Discovery(client, keys, clock)
        self._rotation = Rotation(client, keys, self._positions)
        self._tails: list[Entry] = []
        self._arrears: Arrears | None = None
        self._told_slots: Callable[[Slots], None] = lambda slots: None
        #: What was swept away when this reader began, until that is told.
        self._begun: int | None = None

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, timeout_s: float) -> list[Entry]:
        """Entries after the cursors, oldest first per slot; an empty list on timeout.

        Raises:
            StoreUnavailable: the cursors stand; read again later.
            ClaimHeld: somebody else reads under this name.
            ClaimLost: this reader was dropped.
        """
        deadline = self._clock() + timeout_s
        while True:
            self._discover_if_due()
            left_s = max(0.0, deadline - self._clock())
            tails, self._tails = self._tails, []
            try:
                entries = tails or self._read_owed() or self._read_once(left_s)
            except StoreUnavailable:
                # It may be another server by now: that is to be known before anything is read.
                self._discovery.hasten()
                raise
            if entries or self._clock() >= deadline:
                return entries
            if not self._discovery.slots:
                # No stream to wait on: look for slots again when they are due.
                threading.Event().wait(min(left_s, max(0.001, self._discovery.left_s())))

    def _read_owed(self) -> list[Entry]:
        """The next of what only an archive has: before there is none of it, the streams are not read on."""
        while self._arrears is not None:
            owed = self._arrears.next()
            if owed is None:
                break
            entry = owed.entry
            placed = self._placed(entry.slot, [entry]) if owed.streamed else []
            with self._positions.lock:
                entries = self._positions.note(entry.slot, placed) or self._positions.pass_by(entry)
                self._backlog.read(entry.slot, len(placed))
            if entries:
                return entries
        return []

    def _read_once(self, left_s: float) -> list[Entry]:
        if not self._discovery.slots:
            return []
        found = self._rotation.read(self._discovery.slots, left_s)
        placed = [(slot, self._placed(slot, read)) for slot, read in found]
        entries = []
        with self._positions.lock:
            for slot, read in placed:
                entries += self._positions.note(slot, read)
                self._backlog.read(slot, len(read))
        return entries

    def _placed(self, slot: str, read: list[Entry]) -> list[Entry]:
        """These entries, each in its stream: it is asked for whenever an epoch begins."""
        placed: list[Entry] = []
        for entry in read:
            known = placed[-1].stream if placed and placed[-1].epoch == entry.epoch else None
            if not placed:
                with self._positions.lock:
                    known = self._positions.stream(slot, entry.epoch)
            placed.append(replace(entry, stream=known or self._stream(entry)))
        return placed

    def _stream(self, entry: Entry) -> Stream:
        """The stream of an entry that was just read."""
        stream = self._discovery.stream_of(entry.slot)
        if self.required:
            # It is not taken away before we have it. (Without a registration the server is empty by now.)
            return stream or FIRST
        if stream is None:
            return OVER
        # By now the slot may have another one. (Or it was sent before its writer had noticed an empty server.)
        old = 0 < entry.epoch < stream.born
        return OVER if old and not self._discovery.holds(entry.slot, (entry.epoch, entry.seq)) else stream

    def _discover_if_due(self) -> None:
        if self._discovery.left_s() > 0:
            return
        server, positions = server_of(self._client, self._keys, self._restarts.server), self._positions
        registered, swept = self._discovery.registered()
        # A lower epoch than what we read: the stream was deleted and the server's clock ran back. (Or a late write of
        # an older incarnation: the stream itself tells.)
        suspects = {slot for slot, (epoch, _) in registered.items() if epoch < positions.at(slot)[0]}
        restarted = server != self._restarts.server
        if restarted:
            self._enter()
        self.beat()
        if self._arrears is not None:
            self._arrears.look(server, self._discovery.trimmed)
        self._restarts.set_back_vanished({*registered, *positions.cursors} if restarted else suspects)
        self._restarts.tell(server, {slot: stream for slot, (_, stream) in registered.items()})
        self._restarts.settle(server, self._discovery.slots)
        unread = self._backlog.count(sorted(registered))
        if server_of(self._client, self._keys, server) != server:
            # Restarted while we looked: what was seen is of either server. The next look is due at once.
            return
        with positions.lock:
            self._discovery.slots, self._backlog.unread = sorted(unread), unread
        trimmed = set() if self.required else self._find_tails()
        self._forget_gone(registered, trimmed)
        epochs = {slot: epoch for slot, (epoch, _) in registered.items()}
        born = {slot: stream.born or epoch for slot, (epoch, stream) in registered.items()}
        if self._arrears is not None:
            # What is still to come of a slot is there, wherever it is.
            epochs, born = self._arrears.slots | epochs, self._arrears.slots | born
        first, self._begun = self._begun, None
        self._told_slots(Slots(epochs, born, swept if first is None else first, first is not None))
        self._discovery.done()

    def _forget_gone(self, registered: Container[str], trimmed: Container[str]) -> None:
        with self._positions.lock:
            self._acknowledgements.forget(self._positions.keep(registered, trimmed))

    def _enter(self) -> None:
        """Enter the registry, on this server for the first time or again."""
        positions, first = self._positions, not self._restarts.server
        anew = first and not positions.cursors
        record = self._presence.enter(anew)
        if anew:
            self._begun, before = self._discovery.beginning()
        with positions.lock:
            if anew and not self.required:
                # What those had is nothing that this reader will miss.
                positions.ordinals = before | positions.ordinals
            self._acknowledgements.begin_anew()
            if first:
                # (A stream that never held anything is set back below: there all is counted.)
                positions.open_slots |= set(record.found) - set(positions.ordinals)

    def _find_tails(self) -> set[str]:
        """Note what was trimmed from streams that are empty, or that were taken away; returns all slots trimmed."""
        trimmed = self._discovery.trimmed()
        for slot, (entry, ordinal, stream) in trimmed.items():
            with self._positions.lock:
                missed = self._positions.skip(slot, entry, ordinal, stream)
            if missed is not None:
                self._tails.append(missed)
        return set(trimmed)

    def read_back(self, upto: Mapping[str, str]) -> Iterator[Entry]:
        """The retained entries at or before these cursors, oldest first over all slots (to rebuild a ring).

        Entries that are read back count as retained, so that `trim` knows them. Call it before the first `read`.
        """
        for entry in read_back(self._client, self._keys, upto):
            with self._positions.lock:
                self._positions.retain(entry)
            yield entry

    # --- where it stands ----------------------------------------------------------------------------------------

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry that `read` returned."""
        with self._positions.lock:
            return {slot: id_text(entry) for slot, entry in self._positions.cursors.items()}

    def ordinals(self) -> dict[str, int]:
        """Slot -> ordinal of the entry at the cursor, where it is known; a checkpoint holds it beside the cursors."""
        with self._positions.lock:
            return dict(self._positions.ordinals)

    def begin_with(self, arrears: Arrears) -> None:
        """Have these read first, now and whenever the server is another one. Call it before the first `read`."""
        self._arrears, self._restarts.kept = arrears, arrears.found

    def tell_server(self, told: Callable[[str, Mapping[str, Vanished]], None]) -> None:
        """Have it told, within `read`, when the server is another one: its run id, and of each slot what was found."""
        self._restarts.on_server = told

    def tell_slots(self, told: Callable[[Slots], None]) -> None:
        """Have it told, within `read`, which streams there are, whenever that was looked up."""
        self._told_slots = told

    def server_changed(self) -> bool:
        """Whether the server was restarted since the last call; the cursors were set back where that was needed."""
        with self._positions.lock:
            return self._restarts.take_changed()

    def take_shortened(self) -> dict[str, tuple[str, str]]:
        """Streams that had lost their end since the last call: slot -> (id up to which we had read, the last one now).

        The server went back to an older state (a replica that was behind, a disk that had not everything). Such a
        stream is read again from its beginning; what was taken over already is known by its marks.
        """
        with self._positions.lock:
            taken, self._positions.shortened = self._positions.shortened, {}
            return taken

    # --- being there, and telling -------------------------------------------------------------------------------

    def beat(self) -> None:
        """Show that this reader is there; `read` does it too. The learner's claim speaks for all in its process.

        Raises:
            ClaimHeld: somebody else reads under this name.
            ClaimLost: this reader was dropped.
        """
        self._presence.beat(self._restarts.server)

    def tell_required(self) -> None:
        """Write the names of the required readers into the control record again: somebody spoiled it."""
        self._presence.tell()

    def close(self) -> None:
        """Be gone; the place in the registry is kept. Idempotent."""
        self._presence.close()

    def leave(self) -> None:
        """Be gone for good: nobody waits for this reader any more, and `beat` does nothing."""
        self._presence.leave()

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Mirror how far this reader has taken entries over, so that actors can be paced.

        The learner's are held back while the streams have no room for more (clawq.transport.trimming).
        """
        self._acknowledgements.acknowledge(cursors)

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """Tell how far this reader will never have to read again: trimming may go so far for it."""
        self._acknowledgements.checkpointed(cursors)

    # --- what the streams hold ----------------------------------------------------------------------------------

    def unread_entries(self) -> dict[str, int]:
        """Slot -> entries not read yet, as of the last discovery and read."""
        with self._positions.lock:
            return dict(self._backlog.unread)

    def unread_bytes(self) -> int:
        """Bytes not read yet, by the mean size of what was."""
        with self._positions.lock:
            return int(self._backlog.total() * self.trimming.retained.mean_bytes())

    def stored_bytes(self) -> int:
        """Bytes in all streams: exact for what was read, by the mean size for what was not; of the learner."""
        with self._positions.lock:
            retained = self.trimming.retained
            return retained.total_bytes + int(self._backlog.total() * retained.mean_bytes())

    def uncheckpointed_bytes(self, cursors: Mapping[str, str]) -> int:
        """Bytes of entries read that lie after these (checkpointed) cursors: what trimming waits for."""
        with self._positions.lock:
            return self.trimming.retained.bytes_after(parse_ids(cursors))

    def slot_bytes_after(self, cursors: Mapping[str, str]) -> dict[str, int]:
        """Of each slot the bytes of entries read that lie after these cursors."""
        with self._positions.lock:
            return self.trimming.retained.slot_bytes_after(parse_ids(cursors))

    def withheld_bytes(self) -> int:
        """Bytes that were taken over, which actors are not told while the streams have no room for more."""
        with self._positions.lock:
            return self._acknowledgements.withheld_bytes()

    @property
    def slots(self) -> int:
        """How many slots are known."""
        return len(self._discovery.slots)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest entry that was read."""
        return self._rotation.largest_bytes

    @property
    def trimming(self) -> Trimming:
        """Of the learner's reader, what it trims with."""
        if self._trimming is None:
            raise ValueError(f"reader {self.name} does not trim; the run's learner does")
        return self._trimming

    def trim(
        self,
        checkpointed: Mapping[str, str],
        budget_bytes: int,
        window_bytes: int = 0,
        beside: Mapping[str, Mapping[str, str]] | None = None,
    ) -> int:
        """Remove the oldest entries behind all required checkpoints until the streams are within the budget.

        Args:
            checkpointed: slot -> id of the last entry in this reader's own checkpoint.
            budget_bytes: what the streams may hold.
            window_bytes: what each slot may hold that is not taken over, for which room is kept; 0 = none is.
            beside: the like of `checkpointed` of readers that trimming waits for, whatever their role (the archive).

        Returns:
            how many entries were removed.
        """
        if window_bytes:
            self.trimming.plan_room(budget_bytes, window_bytes, self.slots, self.largest_bytes)
        trimmed = self.trimming.trim(checkpointed, self.stored_bytes(), budget_bytes, beside or {})
        self._acknowledgements.tell()
        return trimmed

    def sweep(self) -> list[str]:
        """Remove streams that are empty (drained and trimmed) and that nobody claims; returns their slots."""
        swept = []
        for slot in self.trimming.sweepable(list(self._discovery.slots)):
            with self._positions.lock:
                read = self._positions.cursors.get(slot)
            if self.trimming.sweep(slot):
                swept.append(slot)
                self._forget_swept(slot, read)
        return swept

    def _forget_swept(self, slot: str, read: EntryId | None) -> None:
        """Forget a slot whose stream was taken away when this much had been read of it."""
        with self._positions.lock:
            # A new writer may have made the stream anew meanwhile, and the reading thread may have read of it: that is
            # not to be read again.
            if self._positions.cursors.get(slot) == read:
                self._positions.drop(slot)
                self._acknowledgements.forget([slot])
                self._backlog.unread.pop(slot, None)
                self._discovery.slots = [one for one in self._discovery.slots if one != slot]
