"""The backlog: how many entries each stream holds that a reader has not read, as of its last look and read."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from clawq.errors import RecordUnreadable
from clawq.transport.client import describe, translate, translated
from clawq.transport.keys import RunKeys
from clawq.transport.positions import Positions
from clawq.transport.stream import parse_trimmed

log = logging.getLogger(__name__)


class Backlog:
    """Counts.

    Args:
        client: of the data server.
        keys: of the run.
        positions: of the reader.
        unread: slot -> entries, as far as they were known before.

    Attributes:
        unread: slot -> entries; guarded by the lock of the positions.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, positions: Positions, unread: Mapping[str, int]) -> None:
        self.unread = dict(unread)
        self._no_streams: set[str] = set()
        self._client: Any = client
        self._keys, self._positions = keys, positions

    def of(self, slot: str) -> int:
        """Of one slot."""
        return self.unread.get(slot, 0)

    def total(self) -> int:
        """Of all slots."""
        return sum(self.unread.values())

    def read(self, slot: str, entries: int) -> None:
        """So many of a slot were read."""
        self.unread[slot] = max(0, self.of(slot) - entries)

    def count(self, slots: Sequence[str]) -> dict[str, int]:
        """Look how many there are; slot -> entries, which may be taken over as `unread`.

        A slot whose key holds no stream is left out: one that cannot be read must not hide the others.
        """
        pipe = self._client.pipeline(transaction=False)
        for slot in slots:
            pipe.xlen(self._keys.stream(slot))
        with translated(self._client):
            lengths = pipe.execute(raise_on_error=False)
        found = {}
        for slot, length in zip(slots, lengths, strict=True):
            if not isinstance(length, Exception):
                found[slot] = length
                continue
            error = translate(length, describe(self._client))
            if not isinstance(error, RecordUnreadable):
                raise error from length
            if slot not in self._no_streams:
                log.warning("slot %s is not read, the others are: %s", slot, error)
        self._no_streams = set(slots) - set(found)
        behind = self._read_and_retained(list(found))
        with self._positions.lock:
            return {slot: max(0, length - behind(slot)) for slot, length in found.items()}

    def _read_and_retained(self, slots: Sequence[str]) -> Callable[[str], int]:
        """Gives of a slot how many of the entries that it holds were read."""
        positions = self._positions
        if positions.retained is not None:
            return positions.retained.entries
        if not slots:
            return lambda slot: 0
        with translated(self._client):
            told = self._client.hmget(self._keys.trimmed, slots)
        gone = {slot: parse_trimmed(one)[1] for slot, one in zip(slots, told, strict=True)}
        return lambda slot: max(0, positions.ordinals.get(slot, 0) - gone[slot])
