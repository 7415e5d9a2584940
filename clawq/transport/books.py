"""What Redis itself says of a run's streams, and where a reader says that it stands in them: the two sides of a ledger.

Redis counts every entry that it ever acknowledged in a stream (`entries-added`, from version 7). A stream that is
swept away takes that count with it, so `sweep` adds it to one sum (`swept`) in the same MULTI. A reader publishes of
each stream that is there how many of its entries it has settled, and the id up to which they are (`Books`), always
before it trims what it has settled, and one sum of all streams that are gone; so the sums can be compared exactly at
any moment, from anywhere, while actors send and readers read. Which stream of a slot is meant is told by the epoch with
which it began: where the two sides speak of different ones, the reader's is gone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from clawq.core import Stream
from clawq.errors import RecordUnreadable
from clawq.json_text import is_whole, parse_json, parse_object
from clawq.places import Place
from clawq.transport.client import describe, translate, translated
from clawq.transport.discovery import parse_registrations
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.texts import parse_count, parse_cursor, readable

#: Field of a ledger's hash that is no slot: the reader's sums.
_SUMS = "@sums"
_NO_STREAM = "no such key"
#: How often a look is begun anew because a stream came or went meanwhile.
_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader stands in a slot's stream.

    Attributes:
        settled: entries of the stream that it has settled.
        at: id up to which they are, `0-0` = none.
        gap: entries of the stream that went away before it read them.
        born: epoch with which the stream began.
    """

    settled: int = 0
    at: str = "0-0"
    gap: int = 0
    born: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What Redis says of a stream that is there.

    Attributes:
        acknowledged: entries acknowledged in it; None if this Redis does not count.
        after: entries in the stream after the reader's position.
        stream: which of the slot's.
    """

    acknowledged: int | None
    after: int
    stream: Stream


@dataclass(frozen=True, slots=True)
class View:
    """What Redis says of a run.

    Attributes:
        streams: those that are there, by slot.
        swept: entries acknowledged in those that were swept away; None if this Redis does not count.
    """

    streams: Mapping[str, Sighting]
    swept: int | None


class Books:
    """The published ledger of one reader.

    Args:
        client: of the data server.
        keys: of the run.
        reader: its name.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, reader: str = LEARNER) -> None:
        self._client: Any = client
        self._keys, self._key = keys, keys.ledger(reader)
        self._positions: dict[str, Position] = {}
        self._sums: str | None = None

    def publish(self, positions: Mapping[str, Position], sums: Mapping[str, Any]) -> None:
        """Write what has changed since the last call, in one MULTI."""
        told = json.dumps(sums)
        changed = {
            slot: json.dumps([one.settled, one.at, one.gap, one.born])
            for slot, one in positions.items()
            if self._positions.get(slot) != one
        }
        gone = [slot for slot in self._positions if slot not in positions]
        if not changed and not gone and told == self._sums:
            return
        pipe = self._client.pipeline(transaction=True)
        if self._sums is None:
            # What an earlier process of this reader published of other streams is in the sums by now.
            pipe.unlink(self._key)
        pipe.hset(self._key, mapping={**changed, _SUMS: told})
        if gone:
            pipe.hdel(self._key, *gone)
        with translated(self._client):
            pipe.execute()
        self._positions, self._sums = dict(positions), told

    def forget(self) -> None:
        """The server may have lost what was published: write everything with the next call."""
        self._positions, self._sums = {}, None

    def read(self) -> tuple[dict[str, Position], dict[str, Any]] | None:
        """(slot -> position, sums) of one moment; None if nothing was published on this server."""
        with translated(self._client):
            raw = self._client.hgetall(self._key)
        sums = readable({_SUMS.encode(): raw.pop(_SUMS.encode(), b"")}, parse_object).get(_SUMS)
        return None if sums is None else (readable(raw, _position), sums)

    def look(self, positions: Mapping[str, Position]) -> View:
        """What Redis says of all streams, each seen from the reader's position at one moment."""
        before = self._known()
        for _ in range(_LOOKS):
            streams, swept = before
            seen = {slot: self._sight(slot, stream, positions.get(slot)) for slot, stream in sorted(streams.items())}
            after = self._known()
            if after == before:
                break
            before = after
        return View(seen, swept if swept >= 0 else None)

    def streams(self) -> dict[str, Stream]:
        """Slot -> its stream, of those that are there."""
        return self._known()[0]

    def _known(self) -> tuple[dict[str, Stream], int]:
        """(slot -> its stream, entries of swept ones) of one moment."""
        pipe = self._client.pipeline(transaction=True)
        pipe.hgetall(self._keys.slots)
        pipe.hget(self._keys.swept, "entries")
        with translated(self._client):
            raw, swept = pipe.execute()
        return {slot: stream for slot, (_, stream) in parse_registrations(raw).items()}, parse_count(swept)

    def _sight(self, slot: str, which: Stream, position: Position | None) -> Sighting:
        at = position.at if position is not None and position.born == which.born else "0-0"
        stream = self._keys.stream(slot)
        pipe = self._client.pipeline(transaction=True)
        pipe.xinfo_stream(stream)
        # One slot at a time: what is not settled yet is in memory here for a moment.
        pipe.xrange(stream, min=f"({at}")
        with translated(self._client):
            about, after = pipe.execute(raise_on_error=False)
        added = added_entries(self._client, about)
        if isinstance(after, Exception):
            after = ()  # no stream: then there is nothing in it
        return Sighting(added, len(after), which)


def _position(text: bytes) -> Position:
    found = parse_json(text)
    if not (isinstance(found, list) and len(found) == 4 and all(map(is_whole, (found[0], found[2], found[3])))):
        raise ValueError("no position")
    if parse_cursor(str(found[1]).encode()) is None:
        raise ValueError("no id")
    return Position(*found)


def positions_of(places: Mapping[str, Place]) -> dict[str, Position]:
    """Places, as they are published."""
    return {slot: Position(*place.settled, place.gap, place.born) for slot, place in places.items()}


def added_entries(client: Any, about: Any) -> int | None:
    """Entries that a stream ever acknowledged, from the answer to XINFO STREAM; None if the server does not count."""
    if isinstance(about, Exception):
        # Something of another type is no stream.
        if _NO_STREAM in str(about) or isinstance(translate(about), RecordUnreadable):
            return 0
        raise translate(about, describe(client)) from about
    added = about.get("entries-added")
    return None if added is None else int(added)
