"""Dead letters: entries that the learner refused, with the reason, and enough of them to refuse them again.

Every refusal is counted by its reason, exactly. Of the newest ~200 the head is kept, with where they were and why they
were refused; of the newest ones that fit into WHOLE_BYTES the whole entry too, so that a refusal can be reproduced
(`clawq log dlq export`). Older ones may still be in the log itself. One writer: the run's learner.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from clawq.core import Entry
from clawq.errors import StoreFull
from clawq.transport.client import translated
from clawq.transport.codec import MAX_FRAGMENT_BYTES
from clawq.transport.keys import RunKeys
from clawq.transport.stream import PAYLOAD_FIELD, parse_id
from clawq.transport.texts import parse_cursor, parse_whole, readable

log = logging.getLogger(__name__)

#: Dead letters kept per run (approximately), and how much of each entry.
LETTERS_KEPT, HEAD_BYTES = 200, 4096
#: Bytes of all entries that are kept whole; one that is longer than any fragment is cut, and refused all the same.
WHOLE_BYTES, LONGEST = 8_000_000, MAX_FRAGMENT_BYTES + 1


@dataclass(frozen=True, slots=True)
class Letter:
    """One refused entry.

    Attributes:
        id: of the dead letter, `<ms>-<n>` by the clock of Redis; "" if it was found otherwise.
        slot, epoch, seq: which entry of the streams it was.
        reason: short name under which it is counted.
        detail: why, in words.
        size_bytes: of the entry.
        head: its first bytes.
    """

    id: str
    slot: str
    epoch: int
    seq: int
    reason: str
    detail: str
    size_bytes: int
    head: bytes

    @property
    def made_ms(self) -> int:
        """When it was refused, by the clock of Redis; 0 if that is not known."""
        return parse_id(self.id)[0] if self.id else 0


class DeadLetters:
    """The dead letters of a run, in Redis."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._letters, self._whole, self._counts = keys.dead_letters, keys.dead_entries, keys.dead_letter_counts
        #: (id, bytes) of the entries that are kept whole; None until it was asked for.
        self._sizes: deque[tuple[str, int]] | None = None

    def append(self, entry: Entry, reason: str, detail: str = "") -> None:
        """Keep the entry under `reason` and count it; without its whole bytes where the server is out of memory."""
        fields: Any = {
            "slot": entry.slot,
            "id": f"{entry.epoch}-{entry.seq}",
            "reason": reason,
            "detail": detail[:1000],
            "size_bytes": len(entry.payload),
            "head": bytes(entry.payload[:HEAD_BYTES]),
        }
        with translated(self._client):
            pipe = self._client.pipeline(transaction=True)
            pipe.xadd(self._letters, fields, maxlen=LETTERS_KEPT, approximate=True)
            pipe.hincrby(self._counts, reason, 1)
            letter_id = bytes(pipe.execute()[0]).decode()
        if len(entry.payload) > HEAD_BYTES:
            self._keep_whole(letter_id, bytes(entry.payload[:LONGEST]))

    def _keep_whole(self, letter_id: str, payload: bytes) -> None:
        try:
            sizes = self._sizes if self._sizes is not None else self._kept()
            with translated(self._client):
                self._client.xadd(self._whole, {PAYLOAD_FIELD: payload}, id=letter_id)
            sizes.append((letter_id, len(payload)))
            self._sizes = sizes
            while sum(size for _, size in sizes) > WHOLE_BYTES:
                sizes.popleft()
            with translated(self._client):
                self._client.xtrim(self._whole, minid=sizes[0][0], approximate=False)
        except StoreFull:
            log.info("a refused entry was not kept whole: Redis is out of memory")

    def _kept(self) -> deque[tuple[str, int]]:
        """What an earlier learner has kept."""
        with translated(self._client):
            found = self._client.xrange(self._whole)
        return deque((entry_id.decode(), len(fields.get(PAYLOAD_FIELD, b""))) for entry_id, fields in found)

    def counts(self) -> dict[str, int]:
        """Reason -> how many were refused."""
        with translated(self._client):
            raw = self._client.hgetall(self._counts)
        return readable(raw, parse_whole)

    def read(self) -> list[Letter]:
        """The letters that are kept, oldest first."""
        with translated(self._client):
            found = self._client.xrange(self._letters)
        letters = (_letter(letter_id.decode(), fields) for letter_id, fields in found)
        return [letter for letter in letters if letter is not None]

    def payload(self, letter: Letter) -> bytes | None:
        """The whole entry (cut if it was longer than any fragment), None if it is not kept."""
        if letter.size_bytes <= len(letter.head):
            return letter.head
        with translated(self._client):
            found = self._client.xrange(self._whole, letter.id, letter.id)
        return found[0][1].get(PAYLOAD_FIELD) if found else None


def _letter(letter_id: str, fields: Mapping[bytes, bytes]) -> Letter | None:
    try:
        epoch, seq = parse_id(parse_cursor(fields[b"id"]) or "")
        texts = (fields[name].decode(errors="replace") for name in (b"slot", b"reason", b"detail"))
        slot, reason, detail = texts
        return Letter(letter_id, slot, epoch, seq, reason, detail, parse_whole(fields[b"size_bytes"]), fields[b"head"])
    except (KeyError, ValueError):
        return None  # somebody else wrote into the stream
