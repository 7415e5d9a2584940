"""The readers of a run: who follows its streams, in which role, how far each has come, and who is still there.

    required   trimming waits for its checkpoints, actors for what it takes over; the run's learner is one, always
    optional   nobody waits for it; what is trimmed before it came is gone for it, and it is told how much

A reader is in the registry from `enter` to `leave`, over all its restarts. Its presence is a claim with a time limit
(`claim:reader:<name>`, the learner's own claim for the learner), so two processes cannot read under one name, and one
that died is recognised. A required reader that died still holds the log: whether it will come back only people know,
and they say so with `drop`.

The names of the required ones stand in the control record, where actors find them with every send.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from clawq.errors import TransportError
from clawq.json_text import parse_object
from clawq.transport.claims import holder_of, watched
from clawq.transport.client import translated
from clawq.transport.keys import ARCHIVE, LEARNER, MOST_READERS, RunKeys, check_name
from clawq.transport.texts import parse_cursors


@dataclass(frozen=True, slots=True)
class ReaderRecord:
    """One reader, as the registry knows it.

    Attributes:
        name: of the reader.
        required: whether trimming and actors wait for it.
        since_ms: when it entered, by the clock of the server.
        what: what it is, for people.
        found: slots whose streams were there when it entered; it began with what they held when it came to them.
        holder: who reads under that name now; None if nobody does.
        taken: slot -> id of the last entry taken over.
        kept: slot -> id of the last entry that is in a checkpoint of the reader.
    """

    name: str
    required: bool
    since_ms: int = 0
    what: str = ""
    found: tuple[str, ...] = ()
    holder: str | None = None
    taken: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)


class Readers:
    """The registry.

    Args:
        client: of the data server.
        keys: of the run.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._keys = keys

    def enter(self, name: str, required: bool, what: str = "", anew: bool = False) -> ReaderRecord:
        """Register a reader, or find it registered; an entry in the other role is changed to this one.

        Args:
            name: of the reader.
            required: its role.
            what: what it is, for people.
            anew: it has no cursors: it begins with what the streams hold now, whenever it was registered.

        Raises:
            TransportError: there are too many.
        """
        check_name(name)
        entered: list[ReaderRecord] = []

        def once(pipe: Any) -> bool:
            records = _records(pipe.hgetall(self._keys.readers))
            known = None if anew else records.get(name)
            if name not in records and len(records) >= MOST_READERS:
                raise TransportError(
                    f"the run has {len(records)} readers already ({', '.join(sorted(records))}), which is the most; "
                    "drop one that is not needed: `clawq reader drop RUN NAME`"
                )
            found = known.found if known else tuple(map(_name, pipe.hkeys(self._keys.slots)))
            since_ms = known.since_ms if known else _server_ms(pipe)
            records[name] = ReaderRecord(name, required, since_ms, what, found)
            pipe.multi()
            if known is None or known != records[name]:
                pipe.hset(self._keys.readers, name, _to_text(records[name]))
            self._tell(pipe, records)
            pipe.execute()
            entered[:] = [records[name]]
            return True

        watched(self._client, (self._keys.readers,), once)
        return entered[0]

    def leave(self, name: str) -> bool:
        """Take a reader off the list, with all that is known of it; whether it was there."""

        def once(pipe: Any) -> bool:
            records = _records(pipe.hgetall(self._keys.readers))
            gone = records.pop(name, None)
            pipe.multi()
            pipe.hdel(self._keys.readers, name)
            pipe.unlink(self._keys.cursors(name), self._keys.kept(name), self._keys.ledger(name))
            if name != ARCHIVE:
                pipe.unlink(presence(self._keys, name))
            self._tell(pipe, records)
            pipe.execute()
            return gone is not None

        if name == LEARNER:
            raise TransportError("a run's own learner cannot leave it: stop the run instead")
        return watched(self._client, (self._keys.readers,), once)

    def names(self) -> list[str]:
        """Names of all readers."""
        with translated(self._client):
            return sorted(_records(self._client.hgetall(self._keys.readers)))

    def list(self) -> list[ReaderRecord]:
        """All readers with their cursors; the learner first, then the required ones, then by name."""
        with translated(self._client):
            records = _records(self._client.hgetall(self._keys.readers))
            pipe = self._client.pipeline(transaction=False)
            for name in records:
                pipe.hgetall(self._keys.cursors(name))
                pipe.hgetall(self._keys.kept(name))
            answers = pipe.execute()
        full = [
            ReaderRecord(
                name,
                record.required,
                record.since_ms,
                record.what,
                record.found,
                holder_of(self._client, presence(self._keys, name)),
                parse_cursors(taken),
                parse_cursors(kept),
            )
            for (name, record), taken, kept in zip(records.items(), answers[::2], answers[1::2], strict=True)
        ]
        return sorted(full, key=lambda record: (record.name != LEARNER, not record.required, record.name))

    def kept_by_required(self, besides: str) -> dict[str, dict[str, str]]:
        """Of each required reader other than `besides`: slot -> id of the last entry in its checkpoints."""
        with translated(self._client):
            records = _records(self._client.hgetall(self._keys.readers))
            names = [name for name, record in records.items() if record.required and name != besides]
            if not names:
                return {}
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hgetall(self._keys.kept(name))
            return dict(zip(names, map(parse_cursors, pipe.execute()), strict=True))

    def tell(self) -> None:
        """Write the names of the required readers into the control record again."""

        def once(pipe: Any) -> bool:
            records = _records(pipe.hgetall(self._keys.readers))
            pipe.multi()
            self._tell(pipe, records)
            pipe.execute()
            return True

        watched(self._client, (self._keys.readers,), once)

    def _tell(self, pipe: Any, records: Mapping[str, ReaderRecord]) -> None:
        required = {LEARNER, *(name for name, record in records.items() if record.required)}
        pipe.hset(self._keys.control, "required", ",".join(sorted(required)))


def presence(keys: RunKeys, name: str) -> str:
    """Key of the claim that a present reader holds."""
    return keys.claim(LEARNER if name in (LEARNER, ARCHIVE) else f"reader:{name}")


def _records(raw: Mapping[bytes, bytes]) -> dict[str, ReaderRecord]:
    """Entries that are not ours are left out."""
    records = {}
    for name, text in raw.items():
        try:
            facts = parse_object(text)
            record = ReaderRecord(
                check_name(name.decode()),
                bool(facts["required"]),
                int(facts["since_ms"]),
                str(facts.get("what", "")),
                tuple(map(str, facts.get("found", ()))),
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        records[record.name] = record
    return records


def _to_text(record: ReaderRecord) -> str:
    facts = {"required": record.required, "since_ms": record.since_ms, "what": record.what}
    return json.dumps({**facts, "found": record.found})


def _name(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _server_ms(pipe: Any) -> int:
    seconds, micros = pipe.time()
    return int(seconds) * 1000 + int(micros) // 1000
