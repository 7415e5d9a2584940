"""Keeps a run's streams within their byte budget: oldest entries first, only behind every required reader's checkpoint.

The run's learner trims; its reader notes here what it reads. Optional readers are not asked. Two rules together keep
the streams under their budget at any moment, however long trimming has to wait:

    actors      send while the slowest required reader has less than `window_bytes` of their slot to take over
    the learner tells that it took entries over only as far as there is room for one full window for each slot

So when a required reader does not checkpoint, what is taken over fills its part of the budget, then each slot fills its
window, and then actors wait. `holding` names the readers that trimming waits for.

XTRIM works on a server that is out of memory. What is written beside it for others (`trimmed`) is denied there, and is
made good with the next call.
"""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from clawq.errors import StoreFull, StoreUnavailable
from clawq.transport.claims import watched
from clawq.transport.client import translated
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.lives import Lives
from clawq.transport.registry import Readers
from clawq.transport.retained import EntryId, Retained, slowest
from clawq.transport.stream import (
    describe_stream,
    id_text,
    parse_id,
    parse_ids,
    parse_trimmed,
    written_before,
)
from clawq.transport.texts import parse_count, readable

#: What is noted of a swept stream if this Redis does not count: the sum is below zero from then on.
UNCOUNTED = -(2**53)
#: Swept slots of which it is remembered how many entries they had.
KEPT_SWEPT = 1024


class Trimming:
    """What the streams hold, and what may go.

    Args:
        client: of the data server.
        keys: of the run.
        lock: guards `retained`, which the reading thread fills.

    Attributes:
        retained: entries read and not trimmed.
        room_bytes: how much of them may be told as taken over; None = all.
        holding: readers whose checkpoints trimming waits for.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, lock: threading.Lock) -> None:
        self.retained = Retained()
        self.room_bytes: int | None = None
        self.holding: tuple[str, ...] = ()
        self._client: Any = client
        self._keys, self._lock = keys, lock
        self._readers = Readers(client, keys)
        self._to_trim: dict[str, tuple[EntryId, int]] = {}
        self._to_tell: dict[str, tuple[EntryId, int]] = {}

    def plan_room(self, budget_bytes: int, window_bytes: int, slots: int, largest_bytes: int) -> None:
        """See `room`."""
        self.room_bytes = room(budget_bytes, window_bytes, slots, largest_bytes)

    def trim(
        self,
        checkpointed: Mapping[str, str],
        stored_bytes: int,
        budget_bytes: int,
        beside: Mapping[str, Mapping[str, str]],
    ) -> int:
        """Remove the oldest entries behind all required checkpoints as the budget demands; returns how many.

        Only one thread trims. A crash in the middle leaves some streams trimmed and others not; the rest goes with the
        next call.

        Args:
            checkpointed: slot -> id, of the learner.
            stored_bytes: what the streams hold.
            budget_bytes: what they may hold.
            beside: name of a reader that is waited for besides the required ones -> the like of it.
        """
        excess_bytes = stored_bytes - budget_bytes
        if self.room_bytes is not None:
            excess_bytes = max(excess_bytes, self.retained.total_bytes - self.room_bytes)
        if excess_bytes <= 0:
            self.holding = ()
        else:
            kept = {LEARNER: parse_ids(checkpointed)}
            others = {**self._readers.kept_by_required(LEARNER), **beside}
            kept |= {name: parse_ids(cursors) for name, cursors in others.items()}
            with self._lock:
                dropped = self.retained.take_oldest(slowest(list(kept.values())), excess_bytes)
                self.holding = tuple(name for name, cursors in kept.items() if self.retained.uncovered(cursors))
            self._to_trim |= dropped
        trimmed = self._drop() if self._to_trim else 0
        self._tell()
        return trimmed

    def _drop(self) -> int:
        pipe = self._client.pipeline(transaction=False)
        for slot, ((epoch, seq), _) in self._to_trim.items():
            # MINID keeps what is at or above it. Entries are one node each, so exact trimming costs nothing more.
            pipe.xtrim(self._keys.stream(slot), minid=f"{epoch}-{seq + 1}", approximate=False)
        with translated(self._client):
            trimmed = sum(pipe.execute())
        # Kept until Redis has done it: what failed is tried again with the next call.
        self._to_tell |= self._to_trim
        self._to_trim = {}
        return int(trimmed)

    def _tell(self) -> None:
        """Say up to where streams were trimmed, for their writers and other readers."""
        told = {slot: f"{id_text(entry)} {ordinal}" for slot, (entry, ordinal) in self._to_tell.items() if ordinal}
        if told:
            with contextlib.suppress(StoreFull), translated(self._client):
                self._client.hset(self._keys.trimmed, mapping=told)
                self._to_tell = {}

    def sweepable(self, slots: Sequence[str]) -> list[str]:
        """Those of these slots that are worth a try of `sweep`."""
        pipe = self._client.pipeline(transaction=False)
        for slot in slots:
            pipe.exists(self._keys.claim(f"slot:{slot}"))
            pipe.xlen(self._keys.stream(slot))
        try:
            with translated(self._client):
                answers = pipe.execute(raise_on_error=False)
        except StoreUnavailable:
            return []
        return [slot for slot, used, held in zip(slots, answers[::2], answers[1::2], strict=True) if not (used or held)]

    def sweep(self, slot: str) -> bool:
        """Remove a slot's stream if it is empty and nobody claims it; whether it was."""
        stream, claim = self._keys.stream(slot), self._keys.claim(f"slot:{slot}")
        readers = self._readers.names() or [LEARNER]

        def once(pipe: Any) -> bool:
            if pipe.exists(claim) or pipe.xlen(stream):
                return False
            about, known = describe_stream(self._client, stream), pipe.hget(self._keys.trimmed, slot)
            written = written_before(about, known)
            last = bytes(about["last-generated-id"]).decode() if about else id_text(parse_trimmed(known)[0])
            added = about.get("entries-added", UNCOUNTED) if about else 0
            lost = Lives.of(pipe.hget(self._keys.slots, slot)).lost_if(living=False)
            newest = max(parse_count(pipe.hget(self._keys.swept, "epoch")), parse_id(last)[0])
            pipe.multi()
            pipe.unlink(stream)
            # What Redis itself had counted goes on counting, for the ledger; later epochs are above this one.
            pipe.hincrby(self._keys.swept, "entries", int(added))
            pipe.hset(self._keys.swept, "epoch", newest)
            pipe.hincrby(self._keys.swept, "lost", lost)
            pipe.hdel(self._keys.slots, slot)
            if written:
                # Readers that come late, and the slot's next writer, go on counting from here.
                pipe.hset(self._keys.trimmed, slot, f"{last} {written}")
            for reader in readers:
                pipe.hdel(self._keys.cursors(reader), slot)
                pipe.hdel(self._keys.kept(reader), slot)
            pipe.execute()
            return True

        try:
            swept = watched(self._client, (stream, claim), once)
            if swept:
                self._to_tell.pop(slot, None)
                self._forget_swept()
            return swept
        except (StoreUnavailable, StoreFull):
            return False

    def _forget_swept(self) -> None:
        """Bound what is remembered of slots that are gone."""
        with translated(self._client):
            if self._client.hlen(self._keys.trimmed) <= KEPT_SWEPT + self._client.hlen(self._keys.slots):
                return
            live = set(self._client.hkeys(self._keys.slots))
            gone = [(parse_trimmed(told), slot) for slot, told in self._client.hgetall(self._keys.trimmed).items()]
            oldest = sorted(entry for entry in gone if entry[1] not in live)[:-KEPT_SWEPT]
            if oldest:
                self._client.hdel(self._keys.trimmed, *(slot for _, slot in oldest))


def trimmed_upto(client: Any, keys: RunKeys) -> dict[str, tuple[str, int]]:
    """Slot -> id and ordinal of the last entry that was trimmed from its stream."""
    with translated(client):
        told = readable(client.hgetall(keys.trimmed), parse_trimmed)
    return {slot: (id_text(entry), ordinal) for slot, (entry, ordinal) in told.items()}


def room(budget_bytes: int, window_bytes: int, slots: int, largest_bytes: int) -> int:
    """How many bytes of the budget may hold entries that are taken over; the rest is for the slots' windows.

    One slot more than are known may begin to write at any time, and the fragment that passes a window is sent whole.
    """
    return max(0, budget_bytes - (slots + 1) * (window_bytes + largest_bytes))
