"""The reading end: one reader follows all slot streams of a run, with a cursor for each.

Plain XREAD, no consumer groups (they were measured: no faster, and an ack and a checkpoint can never be atomic). The
cursors belong into the reader's checkpoint; `acknowledge` mirrors them in Redis, so that actors can be paced, and
`checkpointed` says how far trimming may go for this reader.

A reader has a name and a role (clawq.transport.registry). An optional one is never waited for: where entries were
trimmed before it came, `read` gives an Entry that says how many it missed, exactly, by the ordinals in the entries.

`XREAD COUNT` is per stream, so COUNT · streams · size is kept under 16 MB: a read covers a subset of the streams, and
the subsets rotate. Slots are discovered twice a second.

A server that came back empty is noticed by its changed run id. Then every cursor that lies above what its stream has
ever given out is set back, because XREAD from there would return nothing, for ever, without an error. Ids of new
epochs are accepted whatever they are; deduplication by (slot, epoch, seq) is the consumer's.

The run's learner also trims (clawq.transport.trimming). Two threads may use one reader: one reads, the other
acknowledges and trims.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis

from clawq.core import Entry, Vanished
from clawq.errors import ClaimLost, CodecError
from clawq.transport.books import added_entries
from clawq.transport.claims import Claim
from clawq.transport.client import describe, server_run_id, socket_timeout_s, translate, translated
from clawq.transport.codec import MAX_FRAGMENT_BYTES, peek_meta
from clawq.transport.keys import ARCHIVE, LEARNER, NAME_PATTERN, RunKeys
from clawq.transport.registry import Readers, presence
from clawq.transport.retained import EntryId
from clawq.transport.stream import (
    ORDINAL_FIELD,
    PAYLOAD_FIELD,
    id_text,
    last_generated,
    parse_id,
    parse_ids,
    parse_ordinal,
    parse_trimmed,
)
from clawq.transport.texts import parse_json
from clawq.transport.trimming import Trimming

#: Most bytes of one reply; more counts as used memory in the server while it is not read.
_REPLY_BYTES = 16_000_000
#: Most entries of one stream in one reply.
_MAX_COUNT = 64
_DISCOVERY_S = 0.5
#: With several subsets, each is waited for so long at a time.
_TURN_S = 0.01
#: Names of streams remembered beyond those that are read.
_SPARE_NAMES = 64
_START = (0, 0)
_NOTHING = (-1, -1)
#: A reader that was silent for so long counts as gone, seconds.
PRESENCE_TTL_S = 10.0
#: What a reader wrote of itself is forgotten after so long, seconds: its run may have ended meanwhile.
_FORGOTTEN_S = 7 * 86_400


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

    Attributes:
        on_server: told, within `read`, when the server is another one: its run id, and for each slot what was found.
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
        self._client: Any = client
        self._keys, self.name, self._clock = keys, reader, clock
        self.required = required or reader == LEARNER
        self._what = what or reader
        self._registry = Readers(client, keys)
        self._presence: Claim | None = None
        #: Held while presence changes: several threads show it, another one gives it back.
        self._being = threading.RLock()
        self._left = False
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._cursors = parse_ids(cursors or {})
        self._ordinals: dict[str, int] = dict(ordinals or {})
        #: Slots in which reading begins with whatever comes first: nothing before that counts as missed.
        self._open_slots = set(self._cursors) - set(self._ordinals)
        self._tails: list[Entry] = []
        self._slots: list[str] = []
        self._names: dict[str, str] = {}
        self._slot_of: dict[bytes, str] = {}
        self._turn = 0
        self._next_discovery = 0.0
        self._largest_bytes = 0
        self._trimming = Trimming(client, keys, self._lock) if reader == LEARNER else None
        self._handled: dict[str, EntryId] = {}
        self._mirrored: dict[str, EntryId] = {}
        self._unread: dict[str, int] = dict(unread or {})
        self._run_id = ""
        self._told_server = server
        self.on_server: Callable[[str, Mapping[str, Vanished]], None] = lambda server, found: None
        self._changes = 0
        self._changes_told = 0
        self._shortened: dict[str, tuple[str, str]] = {}

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
            entries = tails or self._read_once(left_s)
            if entries or self._clock() >= deadline:
                return entries
            if not self._slots:
                # No stream to wait on: look for slots again when they are due.
                pause_s = min(left_s, max(0.001, self._next_discovery - self._clock()))
                threading.Event().wait(pause_s)

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry that `read` returned."""
        with self._lock:
            return {slot: id_text(entry) for slot, entry in self._cursors.items()}

    def ordinals(self) -> dict[str, int]:
        """Slot -> ordinal of the entry at the cursor, where it is known; a checkpoint holds it beside the cursors."""
        with self._lock:
            return dict(self._ordinals)

    def server_changed(self) -> bool:
        """Whether the server was restarted since the last call; the cursors were set back where that was needed."""
        with self._lock:
            changed, self._changes_told = self._changes != self._changes_told, self._changes
            return changed

    def take_shortened(self) -> dict[str, tuple[str, str]]:
        """Streams that had lost their end since the last call: slot -> (id up to which we had read, the last one now).

        The server went back to an older state (a replica that was behind, a disk that had not everything). Such a
        stream is read again from its beginning; what was taken over already is known by its marks.
        """
        with self._lock:
            taken, self._shortened = self._shortened, {}
            return taken

    def _read_once(self, left_s: float) -> list[Entry]:
        slots = self._slots
        if not slots:
            return []
        # Before anything was read, entries may have any legal size; later, a new slot's are taken to be like others.
        subset, count = next_subset(slots, self._turn, self._largest_bytes or MAX_FRAGMENT_BYTES)
        self._turn += len(subset)
        block_s = min(left_s, 0.4 * socket_timeout_s(self._client), _DISCOVERY_S)
        if len(subset) < len(slots):
            block_s = min(block_s, _TURN_S)
        if len(self._names) > 2 * len(slots) + _SPARE_NAMES:
            self._names, self._slot_of = {}, {}
        with self._lock:
            after = {self._stream(slot): id_text(self._cursors.get(slot, _START)) for slot in subset}
        with translated(self._client):
            # BLOCK 0 would mean for ever.
            answer = self._client.xread(after, count=count, block=int(block_s * 1000) or None)
        entries = []
        with self._lock:
            for stream, raw in answer or []:
                entries += self._note(self._slot_of[stream], raw)
        return entries

    def _stream(self, slot: str) -> str:
        """Key of a slot's stream, remembered both ways: with hundreds of streams each wake-up would check all names."""
        name = self._names.get(slot)
        if name is None:
            name = self._names[slot] = self._keys.stream(slot)
            self._slot_of[name.encode()] = slot
        return name

    def _note(self, slot: str, raw: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Entry]:
        entries: list[Entry] = []
        for entry in (_entry(slot, entry_id, fields) for entry_id, fields in raw):
            size, place = len(entry.payload), self._ordinals.get(slot, 0)
            # Of a required reader nothing is trimmed: on another server what is missing at first was lost with the old.
            begun = slot in self._ordinals or not (self.required and self._changes)
            if entry.ordinal > place + 1 and slot not in self._open_slots and begun:
                missed = entry.ordinal - place - 1
                entries.append(Entry(slot, entry.epoch, entry.seq - 1, b"", entry.ordinal - 1, missed))
            if entry.ordinal:
                self._ordinals[slot] = max(place, entry.ordinal)
                self._open_slots.discard(slot)
            if self._trimming is not None:
                self._trimming.retained.note(slot, (entry.epoch, entry.seq), size, entry.ordinal)
            self._largest_bytes = max(size, self._largest_bytes)
            entries.append(entry)
        if raw:
            self._cursors[slot] = (entries[-1].epoch, entries[-1].seq)
            self._unread[slot] = max(0, self._unread.get(slot, 0) - len(raw))
        return entries

    def _discover_if_due(self) -> None:
        if self._clock() < self._next_discovery:
            return
        run_id = server_run_id(self._client)
        with translated(self._client):
            registered = _registered(self._client.hgetall(self._keys.slots))
        # A lower epoch than what we read: the stream was deleted and the server's clock ran back. (Or a late write of
        # an older incarnation: the stream itself tells.)
        suspects = {slot for slot, epoch in registered.items() if epoch < self._cursors.get(slot, _START)[0]}
        restarted = run_id != self._run_id
        self._stay(registered, restarted)
        self._set_back_vanished({*registered, *self._cursors} if restarted else suspects)
        if run_id != self._told_server:
            self._tell_server(run_id, {*registered, *self._cursors, *self._unread})
        with self._lock:
            # A reader that was just made has missed nothing.
            if restarted and self._run_id:
                self._changes += 1
                self._open_slots |= {*self._ordinals, *self._cursors, *self._slots}
                self._ordinals = {}
            self._run_id = run_id
        self._slots = sorted(registered)
        self._count_unread(self._slots)
        if not self.required:
            self._find_tails()
        self._next_discovery = self._clock() + _DISCOVERY_S

    def _set_back_vanished(self, slots: Iterable[str]) -> None:
        """Begin anew where a stream has never given out what we read from it: it is another stream by now."""
        for slot in slots:
            last = last_generated(self._client, self._keys.stream(slot)) or _NOTHING
            if last < self._cursors.get(slot, _START) and not self._was_swept(slot):
                with self._lock:
                    if last > _START:
                        self._shortened[slot] = id_text(self._cursors[slot]), id_text(last)
                    self._set_back(slot)

    def _was_swept(self, slot: str) -> bool:
        """Whether the slot's stream was taken away when all that we read had been trimmed from it."""
        with translated(self._client):
            told = self._client.hget(self._keys.trimmed, slot)
        return parse_trimmed(told)[0] >= self._cursors.get(slot, _START) > _START

    def _tell_server(self, run_id: str, slots: Iterable[str]) -> None:
        """Say what the streams of a server are that was not there before; entries not read of the old one are lost."""
        found = {}
        for slot in slots if self._told_server else ():
            stream, cursor = self._keys.stream(slot), id_text(self._cursors.get(slot, _START))
            pipe = self._client.pipeline(transaction=True)
            pipe.xinfo_stream(stream)
            pipe.xlen(stream)
            # Few: the stream is as young as the server.
            pipe.xrange(stream, max=cursor)
            with translated(self._client):
                about, length, behind = pipe.execute(raise_on_error=False)
            added = added_entries(self._client, about)
            trimmed = 0 if added is None else added - length
            found[slot] = Vanished(trimmed + len(behind), self._unread.get(slot, 0), cursor)
        self.on_server(run_id, found)
        self._told_server = run_id

    def _set_back(self, slot: str) -> None:
        # A writer that has not noticed the new server yet goes on counting; where nothing ever was, all is counted.
        if self._cursors.pop(slot, None):
            self._open_slots.add(slot)
        else:
            self._open_slots.discard(slot)
        self._ordinals.pop(slot, None)
        if self._trimming is not None:
            self._trimming.retained.forget(slot)

    def _find_tails(self) -> None:
        """Note what was trimmed from streams that hold nothing any more, or that were taken away."""
        with translated(self._client):
            trimmed = {
                slot.decode(): parse_trimmed(told) for slot, told in self._client.hgetall(self._keys.trimmed).items()
            }
        for slot, (entry, ordinal) in trimmed.items():
            with self._lock:
                place, cursor = self._ordinals.get(slot, 0), self._cursors.get(slot, _START)
                if slot in self._open_slots or entry <= cursor or ordinal <= place:
                    continue
                self._cursors[slot], self._ordinals[slot] = entry, ordinal
            self._tails.append(Entry(slot, *entry, b"", ordinal, ordinal - place))

    # --- being there -------------------------------------------------------------------------------------------

    def _stay(self, registered: Iterable[str], restarted: bool) -> None:
        """Enter the registry, on this server for the first time or again; afterwards show that we are there."""
        if restarted:
            anew = not self._cursors and not self._run_id
            record = self._registry.enter(self.name, self.required, self._what, anew)
            with self._lock:
                self._mirrored = {}
                if not self._run_id:
                    # (A stream that never held anything is set back below: there all is counted.)
                    self._open_slots |= set(record.found) - set(self._ordinals)
        self.beat()

    def beat(self) -> None:
        """Show that this reader is there; `read` does it too. The learner's claim speaks for all in its process.

        Raises:
            ClaimHeld: somebody else reads under this name.
            ClaimLost: this reader was dropped.
        """
        if self.name in (LEARNER, ARCHIVE):
            return
        with self._being:
            if self._left:
                return
            if self._presence is None:
                self._presence = Claim.take(self._client, presence(self._keys, self.name), self._what, PRESENCE_TTL_S)
            elif self._presence.renewal_due and self._presence.renew():
                with translated(self._client):
                    dropped = not self._client.hexists(self._keys.readers, self.name)
                if dropped and server_run_id(self._client) == self._run_id:
                    self.close()
                    raise ClaimLost(f"reader {self.name} was dropped: its claim on the log is given up")

    def close(self) -> None:
        """Be gone; the place in the registry is kept. Idempotent."""
        with self._being:
            claim, self._presence = self._presence, None
            if claim is not None:
                claim.release()

    def leave(self) -> None:
        """Be gone for good: nobody waits for this reader any more, and `beat` does nothing."""
        with self._being:
            self._left = True
            self.close()
        self._registry.leave(self.name)

    # --- telling actors ----------------------------------------------------------------------------------------

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Mirror how far this reader has taken entries over, so that actors can be paced.

        The learner's are held back while the streams have no room for more (clawq.transport.trimming).
        """
        with self._lock:
            self._handled |= parse_ids(cursors)
        self._tell_taken()

    def _tell_taken(self) -> None:
        with self._telling:
            with self._lock:
                due = self._handled
                if self._trimming is not None and self._trimming.room_bytes is not None:
                    due = self._trimming.retained.within(due, self._trimming.room_bytes)
                due = {slot: entry for slot, entry in due.items() if entry != self._mirrored.get(slot)}
            if due:
                self._tell(self._keys.cursors(self.name), {slot: id_text(entry) for slot, entry in due.items()})
                self._mirrored |= due

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """Tell how far this reader will never have to read again: trimming may go so far for it."""
        if cursors:
            self._tell(self._keys.kept(self.name), dict(cursors))

    def _tell(self, key: str, cursors: Mapping[str, str]) -> None:
        pipe = self._client.pipeline(transaction=False)
        pipe.hset(key, mapping=cursors)
        if self.name != LEARNER:
            pipe.expire(key, _FORGOTTEN_S)
        with translated(self._client):
            pipe.execute()

    # --- what the streams hold ---------------------------------------------------------------------------------

    def unread_entries(self) -> dict[str, int]:
        """Slot -> entries not read yet, as of the last discovery and read."""
        with self._lock:
            return dict(self._unread)

    def stored_bytes(self) -> int:
        """Bytes in all streams: exact for what was read, by the mean size for what was not; of the learner."""
        with self._lock:
            retained = self.trimming.retained
            return retained.total_bytes + int(sum(self._unread.values()) * retained.mean_bytes())

    def uncheckpointed_bytes(self, cursors: Mapping[str, str]) -> int:
        """Bytes of entries read that lie after these (checkpointed) cursors: what trimming waits for."""
        with self._lock:
            return self.trimming.retained.bytes_after(parse_ids(cursors))

    def slot_bytes_after(self, cursors: Mapping[str, str]) -> dict[str, int]:
        """Of each slot the bytes of entries read that lie after these cursors."""
        with self._lock:
            return self.trimming.retained.slot_bytes_after(parse_ids(cursors))

    def unread_bytes(self) -> int:
        """Bytes not read yet, by the mean size of what was."""
        with self._lock:
            return int(sum(self._unread.values()) * self.trimming.retained.mean_bytes())

    def withheld_bytes(self) -> int:
        """Bytes that were taken over, which actors are not told while the streams have no room for more."""
        with self._lock:
            retained = self.trimming.retained
            told = {slot: self._mirrored.get(slot, _NOTHING) for slot in self._handled}
            return retained.bytes_after(told) - retained.bytes_after(told | self._handled)

    @property
    def slots(self) -> int:
        """How many slots are known."""
        return len(self._slots)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest entry that was read."""
        return self._largest_bytes

    @property
    def trimming(self) -> Trimming:
        """Of the learner's reader, what it trims with."""
        if self._trimming is None:
            raise ValueError(f"reader {self.name} does not trim; the run's learner does")
        return self._trimming

    def _count_unread(self, slots: Sequence[str]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for slot in slots:
            pipe.xlen(self._keys.stream(slot))
        with translated(self._client):
            lengths = pipe.execute(raise_on_error=False)
        for length in lengths:
            if isinstance(length, Exception):
                raise translate(length, describe(self._client)) from length
        behind = self._read_and_retained(slots)
        with self._lock:
            self._unread = {slot: max(0, length - behind(slot)) for slot, length in zip(slots, lengths, strict=True)}

    def _read_and_retained(self, slots: Sequence[str]) -> Callable[[str], int]:
        """Gives of a slot how many of the entries that it holds were read."""
        if self._trimming is not None:
            return self._trimming.retained.entries
        if not slots:
            return lambda slot: 0
        with translated(self._client):
            told = self._client.hmget(self._keys.trimmed, slots)
        gone = {slot: parse_trimmed(one)[1] for slot, one in zip(slots, told, strict=True)}
        return lambda slot: max(0, self._ordinals.get(slot, 0) - gone[slot])

    def trim(self, checkpointed: Mapping[str, str], budget_bytes: int, window_bytes: int = 0) -> int:
        """Remove the oldest entries behind all required checkpoints until the streams are within the budget.

        Args:
            checkpointed: slot -> id of the last entry in this reader's own checkpoint.
            budget_bytes: what the streams may hold.
            window_bytes: what each slot may hold that is not taken over, for which room is kept; 0 = none is.

        Returns:
            how many entries were removed.
        """
        if window_bytes:
            self.trimming.plan_room(budget_bytes, window_bytes, len(self._slots), self._largest_bytes)
        trimmed = self.trimming.trim(checkpointed, self.stored_bytes(), budget_bytes)
        self._tell_taken()
        return trimmed

    def read_back(self, upto: Mapping[str, str]) -> Iterator[Entry]:
        """The retained entries at or before these cursors, oldest first over all slots (to rebuild a ring).

        Slots are merged by the time in the fragments' headers; within a slot the order is that of the ids. Entries
        that are read back count as retained, so that `trim` knows them. Call it before the first `read`.
        """
        streams = [self._slot_back(slot, entry) for slot, entry in sorted(parse_ids(upto).items())]
        for entry in heapq.merge(*streams, key=_made_at):
            with self._lock:
                if self._trimming is not None:
                    size = len(entry.payload)
                    self._trimming.retained.note(entry.slot, (entry.epoch, entry.seq), size, entry.ordinal)
            yield entry

    def _slot_back(self, slot: str, upto: EntryId) -> Iterator[Entry]:
        after = "-"
        while True:
            with translated(self._client):
                # One at a time: as many replies are in memory as there are slots.
                raw = self._client.xrange(self._keys.stream(slot), min=after, max=id_text(upto), count=1)
            if not raw:
                return
            yield from (_entry(slot, entry_id, fields) for entry_id, fields in raw)
            after = "(" + raw[-1][0].decode()

    def sweep(self) -> list[str]:
        """Remove streams that are empty (drained and trimmed) and that nobody claims; returns their slots."""
        swept = []
        for slot in list(self._slots):
            with self._lock:
                read = self._cursors.get(slot)
            if self.trimming.sweep(slot):
                swept.append(slot)
                self._forget_swept(slot, read)
        return swept

    def _forget_swept(self, slot: str, read: EntryId | None) -> None:
        """Forget a slot whose stream was taken away when this much had been read of it."""
        with self._lock:
            # A new writer may have made the stream anew meanwhile, and the reading thread may have read of it: that is
            # not to be read again.
            if self._cursors.get(slot) == read:
                # Its ordinals go on if it comes back.
                self._cursors.pop(slot, None)
                self.trimming.retained.forget(slot)
                self._handled.pop(slot, None)
                self._mirrored.pop(slot, None)
                self._unread.pop(slot, None)
                self._slots = [one for one in self._slots if one != slot]


def next_subset(slots: Sequence[str], turn: int, largest_bytes: int) -> tuple[list[str], int]:
    """The slots of one XREAD and its COUNT, so that a reply stays under 16 MB; `turn` is where the rotation stands."""
    width = max(1, min(len(slots), _REPLY_BYTES // max(1024, largest_bytes)))
    count = max(1, min(_MAX_COUNT, _REPLY_BYTES // (max(1024, largest_bytes) * width)))
    start = turn % len(slots)
    return [*slots, *slots][start : start + width], count


def _registered(raw: Mapping[bytes, bytes]) -> dict[str, int]:
    """Slot -> epoch of its writer; entries that are not ours are left out."""
    registered = {}
    for name, text in raw.items():
        try:
            slot, epoch = name.decode(), int(parse_json(text)["epoch"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        if NAME_PATTERN.fullmatch(slot):
            registered[slot] = epoch
    return registered


def _entry(slot: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    epoch, seq = parse_id(entry_id.decode())
    # An entry without our field is garbage of somebody; the consumer rejects it as such.
    return Entry(slot, epoch, seq, fields.get(PAYLOAD_FIELD, b""), parse_ordinal(fields.get(ORDINAL_FIELD, b"")))


def _made_at(entry: Entry) -> tuple[int, int, int]:
    try:
        made_ms = peek_meta(entry.payload).created_ms
    except CodecError:
        made_ms = 0
    return made_ms, entry.epoch, entry.seq
