"""Discovery: which slots a run has, looked up twice a second, and which streams were trimmed to their end."""

from collections.abc import Callable, Mapping
from typing import Any

import redis

from clawq.core import OVER, Stream
from clawq.transport.client import translated
from clawq.transport.keys import NAME_PATTERN, RunKeys
from clawq.transport.live_streams import LiveStreams
from clawq.transport.retained import EntryId
from clawq.transport.stream import parse_registration, parse_trimmed
from clawq.transport.texts import parse_count, readable

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

    def hasten(self) -> None:
        """The next look is due now."""
        self._next_s = self._clock()

    def registered(self) -> tuple[dict[str, tuple[int, Stream]], int]:
        """(slot -> epoch of its writer, and its stream, now; entries in all streams that were swept away)."""
        registered, swept, _ = self._look(trimmed=False)
        return registered, swept

    def beginning(self) -> tuple[int, dict[str, int]]:
        """For who begins now: entries in all streams that were swept away, and ordinals of slots that are gone."""
        registered, swept, trimmed = self._look(trimmed=True)
        return swept, {slot: ordinal for slot, (_, ordinal) in trimmed.items() if slot not in registered}

    def trimmed(self) -> dict[str, tuple[EntryId, int, Stream]]:
        """Slot -> id and ordinal of the last entry that was trimmed, and its stream; of streams taken away, too."""
        registered, _, trimmed = self._look(trimmed=True)
        return {slot: (*told, registered[slot][1] if slot in registered else OVER) for slot, told in trimmed.items()}

    def _look(self, trimmed: bool) -> tuple[dict[str, tuple[int, Stream]], int, dict[str, tuple[EntryId, int]]]:
        pipe = self._client.pipeline(transaction=True)
        pipe.hgetall(self._keys.slots)
        pipe.hget(self._keys.swept, "entries")
        if trimmed:
            pipe.hgetall(self._keys.trimmed)
        with translated(self._client):
            slots, swept, *told = pipe.execute()
        trims: Mapping[bytes, bytes] = told[0] if told else {}
        gone = readable(trims, parse_trimmed)
        return parse_registrations(slots), max(0, parse_count(swept)), gone

    def stream_of(self, slot: str) -> Stream | None:
        """The stream of a slot, now; None if there is none."""
        with translated(self._client):
            text = self._client.hget(self._keys.slots, slot)
        found = {} if text is None else parse_registrations({slot.encode(): text})
        return found[slot][1] if slot in found else None

    def holds(self, slot: str, entry: EntryId) -> bool:
        """Whether the slot's stream has that entry, now."""
        return LiveStreams(self._client, self._keys).find(slot, entry) is not None

    def done(self) -> None:
        """All that follows from this look was done: the next one is due an interval later."""
        self._next_s = self._clock() + _INTERVAL_S


def parse_registrations(raw: Mapping[bytes, bytes]) -> dict[str, tuple[int, Stream]]:
    """Slot -> (epoch of its writer, its stream); entries that are not ours are left out."""
    return {slot: found for slot, found in readable(raw, parse_registration).items() if NAME_PATTERN.fullmatch(slot)}
