"""A run's live streams as a part of its log: read entry by entry, by whoever looks, without a cursor of its own.

The streams are as they are at that moment, and change while they are read: the learner trims them. One entry at a time
is fetched, so as many payloads are in memory as there are slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from clawq.core import Entry
from clawq.errors import CodecError
from clawq.transport.client import translated
from clawq.transport.codec import peek_meta
from clawq.transport.keys import NAME_PATTERN, RunKeys
from clawq.transport.retained import EntryId
from clawq.transport.stream import PAYLOAD_FIELD, id_text, parse_id


@dataclass(frozen=True, slots=True)
class Found:
    """One entry of the log.

    Attributes:
        slot, epoch, seq: which.
        made_ms: when, by the clock of the actor's host; 0 where the header cannot be read.
        size_bytes: of the payload.
        steps: env steps T·N in it; 0 where the header cannot be read.
        place: `streams` or `archive`.
        read: gives the payload; raises ArchiveDamaged if it is not what was written.
    """

    slot: str
    epoch: int
    seq: int
    made_ms: int
    size_bytes: int
    steps: int
    place: str
    read: Callable[[], bytes]

    @property
    def id(self) -> EntryId:
        """(epoch, seq)."""
        return self.epoch, self.seq

    def entry(self) -> Entry:
        """The entry with its payload."""
        return Entry(self.slot, self.epoch, self.seq, self.read())


class LiveStreams:
    """The live streams of a run, read entry by entry."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._keys = keys

    def slots(self) -> list[str]:
        """Slots that are registered."""
        with translated(self._client):
            names = [name.decode(errors="replace") for name in self._client.hkeys(self._keys.slots)]
        return sorted(name for name in names if NAME_PATTERN.fullmatch(name))

    def next(self, slot: str, after: EntryId | None, upto: EntryId | None) -> Found | None:
        """The first entry above `after`. One at a time: as many payloads are in memory as there are slots."""
        start, end = "-" if after is None else f"({id_text(after)}", "+" if upto is None else id_text(upto)
        raw = self._range(slot, start, end)
        return streamed(slot, *raw[0]) if raw else None

    def last(self, slot: str, upto: EntryId) -> Found | None:
        """The last entry up to that id."""
        with translated(self._client):
            raw = self._client.xrevrange(self._keys.stream(slot), max=id_text(upto), count=1)
        return streamed(slot, *raw[0]) if raw else None

    def find(self, slot: str, entry: EntryId) -> Found | None:
        """That entry, None if the stream does not hold it."""
        raw = self._range(slot, id_text(entry), id_text(entry))
        return streamed(slot, *raw[0]) if raw else None

    def edges(self, slot: str) -> "Edges | None":
        """First, last and count; None if the stream is empty."""
        with translated(self._client):
            pipe = self._client.pipeline(transaction=False)
            pipe.xrange(self._keys.stream(slot), count=1)
            pipe.xrevrange(self._keys.stream(slot), count=1)
            pipe.xlen(self._keys.stream(slot))
            first, last, length = pipe.execute()
        if not first or not last:
            return None
        return Edges(streamed(slot, *first[0]), streamed(slot, *last[0]), int(length))

    def _range(self, slot: str, start: str, end: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        with translated(self._client):
            raw: list[tuple[bytes, dict[bytes, bytes]]] = self._client.xrange(
                self._keys.stream(slot), min=start, max=end, count=1
            )
        return raw


@dataclass(frozen=True, slots=True)
class Edges:
    """The first and the last entry of a stream, and how many it holds."""

    first: Found
    last: Found
    entries: int


def streamed(slot: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Found:
    """A stream's entry as one of the log."""
    epoch, seq = parse_id(entry_id.decode())
    payload = fields.get(PAYLOAD_FIELD, b"")
    try:
        meta = peek_meta(payload)
        made_ms, steps = meta.created_ms, meta.steps * meta.envs
    except CodecError:
        made_ms = steps = 0
    return Found(slot, epoch, seq, made_ms, len(payload), steps, "streams", lambda: payload)
