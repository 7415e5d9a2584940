"""The rotation: which streams the next XREAD covers, so that its reply stays small, and the reading itself.

`XREAD COUNT` is per stream, so COUNT · streams · size is kept under 16 MB: a read covers a subset of the streams, and
the subsets rotate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from clawq.core import Entry
from clawq.transport.client import socket_timeout_s, translated
from clawq.transport.codec import MAX_FRAGMENT_BYTES
from clawq.transport.keys import RunKeys
from clawq.transport.positions import Positions
from clawq.transport.stream import ORDINAL_FIELD, PAYLOAD_FIELD, id_text, parse_id, parse_ordinal

#: Most bytes of one reply; more counts as used memory in the server while it is not read.
_REPLY_BYTES = 16_000_000
#: Most entries of one stream in one reply.
_MAX_COUNT = 64
#: One XREAD waits no longer, seconds: slots are to be discovered, too.
MAX_BLOCK_S = 0.5
#: With several subsets, each is waited for so long at a time.
_TURN_S = 0.01
#: Names of streams remembered beyond those that are read.
_SPARE_NAMES = 64


class Rotation:
    """Reads from many streams, some at a time.

    Args:
        client: of the data server; its socket timeout bounds how long one XREAD may block.
        keys: of the run.
        positions: where to go on.

    Attributes:
        largest_bytes: size of the largest entry that was read.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, positions: Positions) -> None:
        self.largest_bytes = 0
        self._client: Any = client
        self._keys, self._positions = keys, positions
        self._turn = 0
        self._names: dict[str, str] = {}
        self._slot_of: dict[bytes, str] = {}

    def read(self, slots: Sequence[str], timeout_s: float) -> list[tuple[str, list[Entry]]]:
        """(slot, entries after its cursor) of those streams whose turn it is, as far as they have any.

        Waits no longer than `timeout_s`, often less. Positions are not moved.
        """
        # Before anything was read, entries may have any legal size; later, a new slot's are taken to be like others.
        subset, count = next_subset(slots, self._turn, self.largest_bytes or MAX_FRAGMENT_BYTES)
        self._turn += len(subset)
        block_s = min(timeout_s, 0.4 * socket_timeout_s(self._client), MAX_BLOCK_S)
        if len(subset) < len(slots):
            block_s = min(block_s, _TURN_S)
        if len(self._names) > 2 * len(slots) + _SPARE_NAMES:
            self._names, self._slot_of = {}, {}
        with self._positions.lock:
            after = {self._stream(slot): id_text(self._positions.at(slot)) for slot in subset}
        with translated(self._client):
            # BLOCK 0 would mean for ever.
            answer = self._client.xread(after, count=count, block=int(block_s * 1000) or None)
        found = []
        for stream, raw in answer or []:
            slot = self._slot_of[stream]
            entries = [entry_of(slot, entry_id, fields) for entry_id, fields in raw]
            self.largest_bytes = max([self.largest_bytes, *(len(entry.payload) for entry in entries)])
            found.append((slot, entries))
        return found

    def _stream(self, slot: str) -> str:
        """Key of a slot's stream, remembered both ways: with hundreds of streams each wake-up would check all names."""
        name = self._names.get(slot)
        if name is None:
            name = self._names[slot] = self._keys.stream(slot)
            self._slot_of[name.encode()] = slot
        return name


def next_subset(slots: Sequence[str], turn: int, largest_bytes: int) -> tuple[list[str], int]:
    """The slots of one XREAD and its COUNT, so that a reply stays under 16 MB; `turn` is where the rotation stands."""
    width = max(1, min(len(slots), _REPLY_BYTES // max(1024, largest_bytes)))
    count = max(1, min(_MAX_COUNT, _REPLY_BYTES // (max(1024, largest_bytes) * width)))
    start = turn % len(slots)
    return [*slots, *slots][start : start + width], count


def entry_of(slot: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    """An entry as Redis gives it; without our field it is garbage of somebody: the consumer rejects it as such."""
    epoch, seq = parse_id(entry_id.decode())
    return Entry(slot, epoch, seq, fields.get(PAYLOAD_FIELD, b""), parse_ordinal(fields.get(ORDINAL_FIELD, b"")))
