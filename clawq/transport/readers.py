"""The reading end: one reader follows all slot streams of a run, with a cursor for each.

Plain XREAD, no consumer groups (they were measured: no faster, and an ack and a checkpoint can never be atomic). The
cursors belong into the reader's checkpoint; `acknowledge` mirrors them in Redis, so that actors can be paced.

`XREAD COUNT` is per stream, so COUNT · streams · size is kept under 16 MB: a read covers a subset of the streams, and
the subsets rotate. Slots are discovered twice a second.

A server that came back empty is noticed by its changed run id. Then every cursor that lies above what its stream has
ever given out is set back, because XREAD from there would return nothing, for ever, without an error. Ids of new
epochs are accepted whatever they are; deduplication by (slot, epoch, seq) is the consumer's.

`trim` removes oldest entries first, only behind checkpointed cursors, only as many as the budget demands. Two threads
may use one reader: one reads, the other acknowledges and trims.
"""

import heapq
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import redis

from clawq.core import Entry
from clawq.errors import CodecError, StoreUnavailable
from clawq.transport.claims import watched
from clawq.transport.client import describe, server_run_id, socket_timeout_s, translate, translated
from clawq.transport.codec import MAX_FRAGMENT_BYTES, peek_meta
from clawq.transport.keys import LEARNER, NAME_PATTERN, RunKeys
from clawq.transport.retained import EntryId, Retained
from clawq.transport.stream import PAYLOAD_FIELD, last_generated, parse_id

#: Most bytes of one reply; more counts as used memory in the server while it is not read.
_REPLY_BYTES = 16_000_000
#: Most entries of one stream in one reply.
_MAX_COUNT = 64
_DISCOVERY_S = 0.5
#: With several subsets, each is waited for so long at a time.
_TURN_S = 0.01
_START = (0, 0)
_NOTHING = (-1, -1)


class StreamReader:
    """Follows the streams of a run; a core.FragmentSource.

    Args:
        client: of the data server; its socket timeout bounds how long one XREAD may block.
        keys: of the run.
        reader: name under which cursors are mirrored; `learner` is the required one.
        cursors: slot -> id of the last entry that needs not be read again (from a checkpoint).
        clock: monotonic seconds.
        retain: remember what was read, for `trim`; a reader that never trims must not (it would grow for ever).
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: RunKeys,
        reader: str = LEARNER,
        cursors: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        retain: bool = True,
    ) -> None:
        self._client: Any = client
        self._retain = retain
        self._keys, self._mirror, self._clock = keys, keys.cursors(reader), clock
        self._lock = threading.Lock()
        self._cursors = {slot: parse_id(entry_id) for slot, entry_id in (cursors or {}).items()}
        self._slots: list[str] = []
        self._turn = 0
        self._next_discovery = 0.0
        self._largest_bytes = 0
        self._retained = Retained()
        self._unread: dict[str, int] = {}
        self._run_id = ""
        self._changes = 0
        self._changes_told = 0
        self._to_trim: dict[str, EntryId] = {}

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, timeout_s: float) -> list[Entry]:
        """Entries after the cursors, oldest first per slot; an empty list on timeout.

        Raises:
            StoreUnavailable: the cursors stand; read again later.
        """
        deadline = self._clock() + timeout_s
        while True:
            self._discover_if_due()
            left_s = max(0.0, deadline - self._clock())
            entries = self._read_once(left_s)
            if entries or self._clock() >= deadline:
                return entries
            if not self._slots:
                # No stream to wait on: look for slots again when they are due.
                pause_s = min(left_s, max(0.001, self._next_discovery - self._clock()))
                threading.Event().wait(pause_s)

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry that `read` returned."""
        with self._lock:
            return {slot: _text(entry) for slot, entry in self._cursors.items()}

    def server_changed(self) -> bool:
        """Whether the server was restarted since the last call; the cursors were set back where that was needed."""
        with self._lock:
            changed, self._changes_told = self._changes != self._changes_told, self._changes
            return changed

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
        with self._lock:
            after = {self._keys.stream(slot): _text(self._cursors.get(slot, _START)) for slot in subset}
        with translated(self._client):
            # BLOCK 0 would mean for ever.
            answer = self._client.xread(after, count=count, block=int(block_s * 1000) or None)
        entries = []
        slot_of = {self._keys.stream(slot).encode(): slot for slot in subset}
        with self._lock:
            for stream, raw in answer or []:
                entries += self._note(slot_of[stream], raw)
        return entries

    def _note(self, slot: str, raw: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Entry]:
        entries = [_entry(slot, entry_id, fields) for entry_id, fields in raw]
        for entry in entries:
            size = len(entry.payload)
            if self._retain:
                self._retained.note(slot, (entry.epoch, entry.seq), size)
            self._largest_bytes = max(size, self._largest_bytes)
        if entries:
            self._cursors[slot] = (entries[-1].epoch, entries[-1].seq)
            self._unread[slot] = max(0, self._unread.get(slot, 0) - len(entries))
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
        self._set_back_vanished({*registered, *self._cursors} if restarted else suspects)
        with self._lock:
            # A reader that was just made has missed nothing.
            self._changes += 1 if restarted and self._run_id else 0
            self._run_id = run_id
        self._slots = sorted(registered)
        self._count_unread(self._slots)
        self._next_discovery = self._clock() + _DISCOVERY_S

    def _set_back_vanished(self, slots: Iterable[str]) -> None:
        """Begin anew where a stream has never given out what we read from it: it is another stream by now."""
        for slot in slots:
            last = last_generated(self._client, self._keys.stream(slot))
            with self._lock:
                if (last or _NOTHING) < self._cursors.get(slot, _START):
                    self._set_back(slot)

    def _set_back(self, slot: str) -> None:
        self._cursors.pop(slot, None)
        self._retained.forget(slot)

    # --- telling actors ----------------------------------------------------------------------------------------

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Mirror how far this reader has taken entries over, so that actors can be paced."""
        if cursors:
            with translated(self._client):
                self._client.hset(self._mirror, mapping=dict(cursors))

    # --- what the streams hold ---------------------------------------------------------------------------------

    def unread_entries(self) -> dict[str, int]:
        """Slot -> entries not read yet, as of the last discovery and read."""
        with self._lock:
            return dict(self._unread)

    def stored_bytes(self) -> int:
        """Bytes in all streams: exact for what was read, by the mean size for what was not."""
        with self._lock:
            unread = sum(self._unread.values())
            return self._retained.total_bytes + int(unread * self._retained.mean_bytes())

    def uncheckpointed_bytes(self, cursors: Mapping[str, str]) -> int:
        """Bytes of entries read that lie after these (checkpointed) cursors: what trimming waits for."""
        with self._lock:
            return self._retained.bytes_after(_parsed(cursors))

    def _count_unread(self, slots: Sequence[str]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for slot in slots:
            pipe.xlen(self._keys.stream(slot))
        with translated(self._client):
            lengths = pipe.execute(raise_on_error=False)
        for length in lengths:
            if isinstance(length, Exception):
                raise translate(length, describe(self._client)) from length
        with self._lock:
            self._unread = {
                slot: max(0, length - self._retained.entries(slot)) for slot, length in zip(slots, lengths, strict=True)
            }

    def trim(self, checkpointed: Mapping[str, str], budget_bytes: int) -> int:
        """Remove the oldest entries behind `checkpointed` until the streams are within the budget; returns how many.

        Only one thread trims. A crash in the middle leaves some streams trimmed and others not; the rest goes with the
        next call.
        """
        with self._lock:
            unread_bytes = int(sum(self._unread.values()) * self._retained.mean_bytes())
            excess = self._retained.total_bytes + unread_bytes - budget_bytes
            if excess > 0:
                self._to_trim |= self._retained.take_oldest(_parsed(checkpointed), excess)
            dropped = dict(self._to_trim)
        if not dropped:
            return 0
        pipe = self._client.pipeline(transaction=False)
        for slot, (epoch, seq) in dropped.items():
            # MINID keeps what is at or above it. Entries are one node each, so exact trimming costs nothing more.
            pipe.xtrim(self._keys.stream(slot), minid=f"{epoch}-{seq + 1}", approximate=False)
        with translated(self._client):
            trimmed = sum(pipe.execute())
        # Kept until Redis has done it: what failed is tried again with the next call.
        self._to_trim = {}
        return int(trimmed)

    def read_back(self, upto: Mapping[str, str]) -> Iterator[Entry]:
        """The retained entries at or before these cursors, oldest first over all slots (to rebuild a ring).

        Slots are merged by the time in the fragments' headers; within a slot the order is that of the ids. Entries
        that are read back count as retained, so that `trim` knows them. Call it before the first `read`.
        """
        streams = [self._slot_back(slot, entry) for slot, entry in sorted(_parsed(upto).items())]
        for entry in heapq.merge(*streams, key=_made_at):
            with self._lock:
                self._retained.note(entry.slot, (entry.epoch, entry.seq), len(entry.payload))
            yield entry

    def _slot_back(self, slot: str, upto: EntryId) -> Iterator[Entry]:
        after = "-"
        while True:
            with translated(self._client):
                # One at a time: as many replies are in memory as there are slots.
                raw = self._client.xrange(self._keys.stream(slot), min=after, max=_text(upto), count=1)
            if not raw:
                return
            yield from (_entry(slot, entry_id, fields) for entry_id, fields in raw)
            after = "(" + raw[-1][0].decode()

    def sweep(self) -> list[str]:
        """Remove streams that are empty (drained and trimmed) and that nobody claims; returns their slots."""
        return [slot for slot in list(self._slots) if self._sweep_slot(slot)]

    def _sweep_slot(self, slot: str) -> bool:
        stream, claim = self._keys.stream(slot), self._keys.claim(f"slot:{slot}")

        def once(pipe: Any) -> bool:
            if pipe.exists(claim) or pipe.xlen(stream):
                return False
            pipe.multi()
            pipe.unlink(stream)
            pipe.hdel(self._keys.slots, slot)
            pipe.hdel(self._mirror, slot)
            pipe.execute()
            return True

        try:
            swept = watched(self._client, (stream, claim), once)
        except StoreUnavailable:
            return False
        if swept:
            with self._lock:
                self._set_back(slot)
                self._slots = [other for other in self._slots if other != slot]
                self._unread.pop(slot, None)
        return swept


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
            slot, epoch = name.decode(), int(json.loads(text)["epoch"])
        except (ValueError, KeyError, TypeError):
            continue
        if NAME_PATTERN.fullmatch(slot):
            registered[slot] = epoch
    return registered


def _entry(slot: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    epoch, seq = parse_id(entry_id.decode())
    # An entry without our field is garbage of somebody; the consumer rejects it as such.
    return Entry(slot, epoch, seq, fields.get(PAYLOAD_FIELD, b""))


def _made_at(entry: Entry) -> tuple[int, int, int]:
    try:
        made_ms = peek_meta(entry.payload).created_ms
    except CodecError:
        made_ms = 0
    return made_ms, entry.epoch, entry.seq


def _parsed(cursors: Mapping[str, str]) -> dict[str, EntryId]:
    return {slot: parse_id(entry_id) for slot, entry_id in cursors.items()}


def _text(entry: EntryId) -> str:
    return f"{entry[0]}-{entry[1]}"
