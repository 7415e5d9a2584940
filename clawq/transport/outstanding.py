"""What the streams of a run hold that its required readers have not checkpointed: it is lost when they are deleted.

Asked for again and again while a finished run waits for its readers. Redis tells the end of a stream only with the
payloads of its first and last entry, so the end of a stream that nobody writes to any more is asked for once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from clawq.transport.client import translated
from clawq.transport.keys import LEARNER, NAME_PATTERN, RunKeys
from clawq.transport.registry import ReaderRecord, Readers
from clawq.transport.retained import EntryId
from clawq.transport.stream import ORDINAL_FIELD, describe_stream, id_text, parse_id, parse_ordinal

_START = (0, 0)


@dataclass(frozen=True, slots=True)
class _End:
    """The last entry of a stream that holds any."""

    id: EntryId
    ordinal: int
    entries: int


class Outstanding:
    """Looks at the streams.

    Args:
        client: of the data server.
        keys: of the run.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._keys, self._readers = keys, Readers(client, keys)
        self._ends: dict[str, _End | None] = {}
        #: Slot -> its registration when its end was looked at and nobody wrote to it any more.
        self._final: dict[str, bytes] = {}

    def readers(self) -> list[ReaderRecord]:
        """The required readers beside the learner that have not checkpointed all that the streams hold."""
        required = [one for one in self._readers.list() if one.required and one.name != LEARNER]
        if required:
            self._look()
        return [one for one in required if self._behind(one.kept)]

    def fragments(self, reader: ReaderRecord) -> int:
        """How many fragments one of these has not checkpointed, as of the last look."""
        return sum(self._after(slot, kept) for slot, kept in self._behind(reader.kept).items())

    def _look(self) -> None:
        with translated(self._client):
            found = {
                name.decode(errors="replace"): told for name, told in self._client.hgetall(self._keys.slots).items()
            }
            slots = {slot: told for slot, told in found.items() if NAME_PATTERN.fullmatch(slot)}
            pipe = self._client.pipeline(transaction=False)
            for slot in slots:
                pipe.exists(self._keys.claim(f"slot:{slot}"))
            written = dict(zip(slots, pipe.execute(), strict=True))
        free = {slot: told for slot, told in slots.items() if not written[slot]}
        # A free slot may have been taken again since, if only for a moment: then it is registered anew.
        known = {slot: self._ends[slot] for slot, told in free.items() if self._final.get(slot) == told}
        self._ends = {slot: known[slot] if slot in known else self._end(slot) for slot in slots}
        self._final = free

    def _end(self, slot: str) -> _End | None:
        about = describe_stream(self._client, self._keys.stream(slot))
        last = about.get("last-entry") if about else None
        if not about or not last:
            return None
        return _End(parse_id(last[0].decode()), parse_ordinal(last[1].get(ORDINAL_FIELD) or b""), int(about["length"]))

    def _behind(self, kept: Mapping[str, str]) -> dict[str, EntryId]:
        """Of each slot that has something after what is kept, up to where it is."""
        at = {slot: parse_id(kept[slot]) if slot in kept else _START for slot in self._ends}
        return {slot: at[slot] for slot, end in self._ends.items() if end is not None and at[slot] < end.id}

    def _after(self, slot: str, kept: EntryId) -> int:
        end = self._ends[slot]
        assert end is not None
        with translated(self._client):
            first = self._client.xrange(self._keys.stream(slot), min=f"({id_text(kept)}", count=1)
        ordinal = parse_ordinal(first[0][1].get(ORDINAL_FIELD) or b"") if first else 0
        # Without ordinals (somebody else's entries) it is no more than what the stream holds.
        return end.ordinal - ordinal + 1 if ordinal and end.ordinal else end.entries
