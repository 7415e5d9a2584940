"""Reading back: what streams still hold up to some cursors, once more, to rebuild a ring.

Slots are merged by the time in the fragments' headers, oldest first; within a slot the order is that of the ids.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

from clawq.core import Entry
from clawq.errors import CodecError
from clawq.transport.client import translated
from clawq.transport.codec import peek_meta
from clawq.transport.keys import RunKeys
from clawq.transport.retained import EntryId
from clawq.transport.rotation import entry_of
from clawq.transport.stream import id_text, parse_ids


def read_back(client: Any, keys: RunKeys, upto: Mapping[str, str]) -> Iterator[Entry]:
    """The entries at or before these cursors (slot -> id); see the module's text."""
    streams = [slot_entries(client, keys, slot, None, entry) for slot, entry in sorted(parse_ids(upto).items())]
    return heapq.merge(*streams, key=made_at)


def slot_entries(client: Any, keys: RunKeys, slot: str, behind: EntryId | None, upto: EntryId) -> Iterator[Entry]:
    """A stream's entries with ids above `behind`, up to `upto`, lazily."""
    after = "-" if behind is None else f"({id_text(behind)}"
    while True:
        with translated(client):
            # One at a time: as many replies are in memory as there are slots.
            raw = client.xrange(keys.stream(slot), min=after, max=id_text(upto), count=1)
        if not raw:
            return
        yield from (entry_of(slot, entry_id, fields) for entry_id, fields in raw)
        after = "(" + raw[-1][0].decode()


def made_at(entry: Entry) -> tuple[int, int, int]:
    """Its place in the order over slots."""
    try:
        made_ms = peek_meta(entry.payload).created_ms
    except CodecError:
        made_ms = 0
    return made_ms, entry.epoch, entry.seq
