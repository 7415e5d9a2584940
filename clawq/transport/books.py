"""What Redis itself says of a run's streams, and where a reader says that it stands in them: the two sides of a ledger.

Redis counts every entry that it ever acknowledged in a stream (`entries-added`, from version 7). A stream that is
swept away takes that count with it, so `sweep` moves it to the hash `swept` in the same MULTI. A reader publishes of
each slot how many entries of the stream it has settled, and the id up to which they are (`Books`), always before it
trims what it has settled; so the sums can be compared exactly at any moment, from anywhere, while actors send and
readers read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from clawq.errors import RecordUnreadable
from clawq.json_text import is_whole, parse_json, parse_object
from clawq.transport.client import describe, translate, translated
from clawq.transport.keys import LEARNER, NAME_PATTERN, RunKeys
from clawq.transport.texts import parse_cursor, parse_whole, readable

#: Field of a ledger's hash that is no slot: the reader's sums.
_SUMS = "@sums"
_NO_STREAM = "no such key"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader stands in a slot's stream.

    Attributes:
        settled: entries of the stream that it has settled.
        at: id up to which they are, `0-0` = none.
        gap: entries of the stream that went away before it read them.
    """

    settled: int = 0
    at: str = "0-0"
    gap: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What Redis says of a slot.

    Attributes:
        acknowledged: entries acknowledged since the server began, swept streams included; None if it does not count.
        after: entries in the stream after the reader's position.
    """

    acknowledged: int | None
    after: int


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
        self._published: dict[str, str] = {}

    def publish(self, positions: Mapping[str, Position], sums: Mapping[str, Any]) -> None:
        """Write what has changed since the last call, in one command."""
        fields = {slot: json.dumps([one.settled, one.at, one.gap]) for slot, one in positions.items()}
        fields[_SUMS] = json.dumps(sums)
        changed = {name: text for name, text in fields.items() if self._published.get(name) != text}
        if changed:
            with translated(self._client):
                self._client.hset(self._key, mapping=changed)
            self._published |= changed

    def forget(self) -> None:
        """The server may have lost what was published: write everything with the next call."""
        self._published = {}

    def read(self) -> tuple[dict[str, Position], dict[str, Any]] | None:
        """(slot -> position, sums) of one moment; None if nothing was published on this server."""
        with translated(self._client):
            raw = self._client.hgetall(self._key)
        sums = readable({_SUMS.encode(): raw.pop(_SUMS.encode(), b"")}, parse_object).get(_SUMS)
        return None if sums is None else (readable(raw, _position), sums)

    def look(self, positions: Mapping[str, Position]) -> dict[str, Sighting]:
        """What Redis says of these slots and of all others that it knows, each slot at one moment."""
        with translated(self._client):
            known = [*self._client.hkeys(self._keys.slots), *self._client.hkeys(self._keys.swept)]
        names = {name.decode(errors="replace") for name in known} | set(positions)
        return {
            slot: self._sight(slot, positions.get(slot, Position()))
            for slot in sorted(names)
            if NAME_PATTERN.fullmatch(slot)
        }

    def _sight(self, slot: str, position: Position) -> Sighting:
        stream = self._keys.stream(slot)
        pipe = self._client.pipeline(transaction=True)
        pipe.hget(self._keys.swept, slot)
        pipe.xinfo_stream(stream)
        # One slot at a time: what is not settled yet is in memory here for a moment.
        pipe.xrange(stream, min=f"({position.at}")
        with translated(self._client):
            swept, about, after = pipe.execute(raise_on_error=False)
        added = added_entries(self._client, about)
        if isinstance(after, Exception):
            after = ()  # no stream: then there is nothing in it
        return Sighting(None if added is None else _counted(swept) + added, len(after))


def _position(text: bytes) -> Position:
    found = parse_json(text)
    if not (isinstance(found, list) and len(found) == 3 and is_whole(found[0]) and is_whole(found[2])):
        raise ValueError("no position")
    if parse_cursor(str(found[1]).encode()) is None:
        raise ValueError("no id")
    return Position(*found)


def _counted(swept: bytes | None) -> int:
    try:
        return parse_whole(swept)
    except ValueError:
        return 0  # somebody else wrote there; the ledger will show that it does not add up


def added_entries(client: Any, about: Any) -> int | None:
    """Entries that a stream ever acknowledged, from the answer to XINFO STREAM; None if the server does not count."""
    if isinstance(about, Exception):
        # Something of another type is no stream.
        if _NO_STREAM in str(about) or isinstance(translate(about), RecordUnreadable):
            return 0
        raise translate(about, describe(client)) from about
    added = about.get("entries-added")
    return None if added is None else int(added)
