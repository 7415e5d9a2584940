"""Discovery: which slots a run has, looked up twice a second, and which streams were trimmed to their end."""

from collections.abc import Callable, Mapping
from typing import Any

import redis

from clawq.json_text import is_whole, parse_object
from clawq.transport.client import translated
from clawq.transport.keys import NAME_PATTERN, RunKeys
from clawq.transport.retained import EntryId
from clawq.transport.stream import parse_trimmed
from clawq.transport.texts import readable

_INTERVAL_S = 0.5


class Discovery:
    """Knows the slots.

    Args:
        client: of the data server.
        keys: of the run.
        clock: monotonic seconds.

    Attributes:
        slots: as of the last look, in the order of their names.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, clock: Callable[[], float]) -> None:
        self.slots: list[str] = []
        self._client: Any = client
        self._keys, self._clock = keys, clock
        self._next_s = 0.0

    def left_s(self) -> float:
        """Until the next look is due; not above 0 when it is."""
        return self._next_s - self._clock()

    def registered(self) -> dict[str, int]:
        """Slot -> epoch of its writer, now; entries that are not ours are left out."""
        with translated(self._client):
            raw = self._client.hgetall(self._keys.slots)
        registered: dict[str, int] = {}
        for name, text in raw.items():
            try:
                slot, epoch = name.decode(), parse_object(text).get("epoch")
            except ValueError:
                continue
            if NAME_PATTERN.fullmatch(slot) and isinstance(epoch, int) and is_whole(epoch):
                registered[slot] = epoch
        return registered

    def trimmed(self) -> dict[str, tuple[EntryId, int]]:
        """Slot -> id and ordinal of the last entry that was trimmed from its stream; of streams taken away, too."""
        with translated(self._client):
            raw: Mapping[bytes, bytes] = self._client.hgetall(self._keys.trimmed)
        return readable(raw, parse_trimmed)

    def done(self) -> None:
        """All that follows from this look was done: the next one is due an interval later."""
        self._next_s = self._clock() + _INTERVAL_S
