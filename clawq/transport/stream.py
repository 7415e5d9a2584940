"""The writing end of a slot's stream: explicit ids, one claim, nothing lost silently and nothing twice.

`StreamWriter.open` takes the slot's claim and a new epoch = max(server time in ms, last generated ms + 1). Entries get
the ids `<epoch>-<seq>`, so whatever an older incarnation of the slot still has under way is refused by the stream
itself. One `send` is one non-transactional pipeline: XADD, the control record, and the mirrored cursors of all required
readers: what the slowest of them has not taken over is unread.

Beside the fragment an entry holds its ordinal, counted from 1 over all that the slot's stream ever had, so that a
reader knows exactly how many entries were trimmed before it came.

After an unclear failure the caller sends the same seq again. If Redis then answers "equal or smaller", it is success
only if the entry is really there, or if a required reader's cursor shows that it took it over (it may be trimmed);
otherwise StreamRejected: this writer is closed, the caller opens a new one and with it a new epoch. The same when the
claim lapsed, which means that the server came back empty or that we were stopped for long.

What it does not do: wait, retry or drop. That is for the outbox.
"""

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from clawq.core import Control, Stream
from clawq.errors import (
    ClaimLost,
    FragmentTooLarge,
    RecordUnreadable,
    StoreFull,
    StoreUnavailable,
    StreamRejected,
    TransportError,
)
from clawq.json_text import is_whole, parse_object
from clawq.transport.claims import Claim
from clawq.transport.client import describe, translate, translated
from clawq.transport.codec import MAX_FRAGMENT_BYTES
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.lives import Lives
from clawq.transport.signing import CONTROL_FIELDS, ControlSeal
from clawq.transport.texts import parse_count, parse_cursor

#: The fields of a stream entry: the encoded fragment, and its ordinal in digits.
PAYLOAD_FIELD, ORDINAL_FIELD = b"f", b"n"
#: A stream never gets that many entries; longer numbers are somebody else's garbage.
_ORDINAL_DIGITS = 18
_NOT_ABOVE_TOP = "equal or smaller than the target stream top item"


class StreamWriter:
    """A slot's stream for as long as one actor owns it; a core.FragmentSink. Made by `open`.

    Not thread-safe: one sender thread uses it.

    Attributes:
        slot: name of the slot.
        incarnation: how many writers the slot had before, as far as the server knows; it goes into seeds.
    """

    incarnation = 0

    def __init__(
        self, client: redis.Redis, keys: RunKeys, slot: str, claim: Claim, epoch: int, written: int = 0
    ) -> None:
        self.slot = slot
        self._client: Any = client
        self._keys, self._claim, self._epoch = keys, claim, epoch
        self._stream = keys.stream(slot)
        self._required: tuple[str, ...] = (LEARNER,)
        #: Entries that the slot had before ours, and seq -> place of ours after them. (A seq may be left out.)
        self._written, self._last_seq = written, 0
        #: (seq, bytes) of what was sent and, as far as we know, not taken over by all required readers.
        self._unread: deque[tuple[int, int]] = deque()
        self._unread_bytes = 0
        self._closed = False
        self._facts: dict[str, Any] = {}
        self._seal = ControlSeal(keys.tag)

    @classmethod
    def open(
        cls,
        client: redis.Redis,
        keys: RunKeys,
        slot: str,
        worker: str,
        claim_ttl_s: float = 10.0,
        after_epoch: int = 0,
    ) -> "StreamWriter":
        """Take the slot and begin an epoch.

        Args:
            client: of the data server.
            keys: of the run.
            slot: name of the slot, also the name of its stream.
            worker: host and worker, for people.
            claim_ttl_s: the slot is free again when its writer was silent for so long.
            after_epoch: the new epoch is larger than this too (the caller's last one).

        Raises:
            ClaimHeld: another actor has the slot.
            StoreUnavailable, StoreFull: try again later.
        """
        claim = Claim.take(client, keys.claim(f"slot:{slot}"), worker, claim_ttl_s)
        try:
            epoch, written, swept = _begin_epoch(client, keys, slot, after_epoch)
            with translated(client):
                previous = client.hget(keys.slots, slot)
                # A stream is taken away together with its slot's registration, so that tells when it began.
                incarnation, stream = _next_incarnation(previous), _stream_of(previous) or Stream(epoch, written)
                # The caller itself, under its last epoch, has lost nothing.
                before = Lives.of(previous)
                lost = before.lost_if(living=before.epoch == after_epoch)
                if previous is None and 0 < after_epoch <= swept:
                    # It was silent for so long that its slot was swept, and it was taken for lost.
                    lost = -1
                facts = {"worker": worker, "epoch": epoch, "incarnation": incarnation, **stream._asdict()}
                facts |= {"lost": lost, "open": True}
                client.hset(keys.slots, slot, json.dumps(facts))
        except BaseException:
            _release_quietly(claim)
            raise
        writer = cls(client, keys, slot, claim, epoch, written)
        writer.incarnation, writer._facts = incarnation, facts
        return writer

    @property
    def epoch(self) -> int:
        """The epoch taken with the slot's claim."""
        return self._epoch

    def send(self, seq: int, payload: bytes | bytearray | memoryview) -> Control | None:
        """Append `<epoch>-<seq>`; returns the control record, None if there is none.

        Raises:
            FragmentTooLarge: over the cap of the wire; it will never fit.
            StoreUnavailable, StoreFull: send the same seq again later, and nothing after it before.
            StreamRejected: it is not there and cannot be any more; open a new writer.
            ClaimLost: another actor owns the slot.
        """
        if len(payload) > MAX_FRAGMENT_BYTES:
            raise FragmentTooLarge(f"{len(payload)} bytes; at most {MAX_FRAGMENT_BYTES} travel in one fragment")
        self._renew_if_due()
        entry_id = f"{self._epoch}-{seq}"
        # redis-py measures a memoryview by items, not by bytes.
        blob = memoryview(payload).cast("B") if isinstance(payload, memoryview) else payload
        pipe = self._client.pipeline(transaction=False)
        ordinal = self._written + (1 if seq > self._last_seq else 0)
        pipe.execute_command("XADD", self._stream, entry_id, PAYLOAD_FIELD, blob, ORDINAL_FIELD, ordinal)
        self._queue_poll(pipe)
        with translated(self._client):
            added, control, *cursors = pipe.execute(raise_on_error=False)
        if isinstance(added, Exception):
            self._settle(entry_id, seq, added, cursors)
        if seq > self._last_seq:
            self._last_seq, self._written = seq, ordinal
            self._unread.append((seq, len(payload)))
            self._unread_bytes += len(payload)
        return self._note(control, cursors)

    def poll(self) -> Control | None:
        """The control record alone; renews the claim when it is due.

        Raises:
            StoreUnavailable: try again later.
            StreamRejected, ClaimLost: as `send`.
        """
        self._renew_if_due()
        pipe = self._client.pipeline(transaction=False)
        self._queue_poll(pipe)
        with translated(self._client):
            control, *cursors = pipe.execute(raise_on_error=False)
        return self._note(control, cursors)

    def unread_bytes(self) -> int:
        """Bytes sent by this epoch that the slowest required reader had not taken over at the last send or poll."""
        return self._unread_bytes

    def close(self, all_sent: bool = False) -> None:
        """Give the slot back. Idempotent; a server that is away is left to let the claim run out.

        Args:
            all_sent: whoever wrote here leaves nothing unsent, so that nothing need be counted as lost.
        """
        if all_sent and not self._closed:
            told = json.dumps({**self._facts, "open": False})
            with contextlib.suppress(StoreUnavailable, StoreFull, ClaimLost):
                self._claim.fenced(lambda pipe: pipe.hset(self._keys.slots, self.slot, told))
        self._closed = True
        _release_quietly(self._claim)

    def _queue_poll(self, pipe: Any) -> None:
        pipe.hmget(self._keys.control, CONTROL_FIELDS)
        for reader in self._required:
            pipe.hget(self._keys.cursors(reader), self.slot)

    def _note(self, control: Any, cursors: Sequence[Any]) -> Control | None:
        for answer in (control, *cursors):
            if isinstance(answer, Exception):
                raise translate(answer, describe(self._client)) from answer
        taken = min(map(_taken, cursors))
        while self._unread and (self._epoch, self._unread[0][0]) <= taken:
            self._unread_bytes -= self._unread.popleft()[1]
        record = self._seal.parse(control)
        if record is not None:
            self._required = record.required
        return record

    def _settle(self, entry_id: str, seq: int, error: Exception, cursors: Sequence[Any]) -> None:
        """Return if the refused entry got there all the same, raise what the caller has to know otherwise."""
        if _NOT_ABOVE_TOP not in str(error):
            raise translate(error, describe(self._client)) from error
        with translated(self._client):
            if self._client.xrange(self._stream, entry_id, entry_id):
                return
        taken = max(map(_taken, cursors))
        # Only entries that were there are taken over, and what was taken over may have been trimmed since.
        if taken[0] == self._epoch and taken[1] >= seq:
            return
        # Who else could have written above us? If the slot is somebody else's by now, say that.
        self._renew()
        self.close()
        raise StreamRejected(f"slot {self.slot}: {entry_id} is below what the stream has seen, and it is not there")

    def _renew_if_due(self) -> None:
        if self._closed:
            # Going on without the claim could interleave with the slot's next writer.
            raise StreamRejected(f"slot {self.slot}: this writer is closed; open a new one")
        if self._claim.renewal_due:
            self._renew()

    def _renew(self) -> None:
        if self._claim.renew():
            # The stream, our registration, or our exclusive hold on the slot may be gone: begin anew, visibly.
            self.close()
            raise StreamRejected(
                f"slot {self.slot}: the claim lapsed (the server came back empty, or this process was stopped)"
            )


def parse_id(entry_id: str) -> tuple[int, int]:
    """`<epoch>-<seq>` as numbers, which compare as ids do."""
    epoch, _, seq = entry_id.partition("-")
    return int(epoch), int(seq or 0)


def parse_ids(cursors: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """The same for cursors."""
    return {slot: parse_id(entry_id) for slot, entry_id in cursors.items()}


def id_text(entry: tuple[int, int]) -> str:
    """Inverse of `parse_id`."""
    return f"{entry[0]}-{entry[1]}"


def last_generated(client: Any, stream: str) -> tuple[int, int] | None:
    """The largest id that a stream has ever given out, None if there is no such stream."""
    about = describe_stream(client, stream)
    return parse_id(bytes(about["last-generated-id"]).decode()) if about else None


def describe_stream(client: Any, stream: str) -> Mapping[str, Any] | None:
    """What XINFO STREAM says, None if there is no such stream."""
    try:
        with translated(client):
            about: Mapping[str, Any] = client.xinfo_stream(stream)
            return about
    except TransportError as error:
        # Something of another type is no stream: writing to it says so.
        if "no such key" in str(error) or isinstance(error, RecordUnreadable):
            return None
        raise


def written_before(about: Mapping[str, Any] | None, trimmed: bytes | None) -> int:
    """How many entries a slot ever had, from XINFO STREAM of its stream (None if there is none) and from `trimmed`."""
    newest = about.get("last-entry") if about else None
    told = parse_ordinal(newest[1].get(ORDINAL_FIELD) or b"") if newest else 0
    if told:
        return told
    # All trimmed; or the newest is none of ours, and then nobody's count is exact.
    behind = parse_trimmed(trimmed)[1]
    return max(behind, int(about.get("entries-added", 0))) if about else behind


def parse_ordinal(text: bytes) -> int:
    """The ordinal in an entry; 0 if there is none, or none that a stream could have come to."""
    return int(text) if text.isdigit() and len(text) <= _ORDINAL_DIGITS else 0


def parse_trimmed(text: bytes | None) -> tuple[tuple[int, int], int]:
    """(id, ordinal) of the last entry trimmed; zeros if there is none, or if somebody else wrote there."""
    entry_id, _, ordinal = (text or b"").partition(b" ")
    cursor = parse_cursor(entry_id)
    return (parse_id(cursor), parse_ordinal(ordinal)) if cursor else ((0, 0), 0)


def parse_registration(text: bytes | str) -> tuple[int, Stream]:
    """(epoch of its writer, its stream) of a slot, from its registration; ValueError for what is none of ours."""
    facts = parse_object(text)
    numbers = [facts.get("epoch"), facts.get("born", 0), facts.get("before", 0)]
    if not all(map(is_whole, numbers)):
        raise ValueError("no registration")
    epoch, born, before = map(int, numbers)
    return epoch, Stream(born, before)


def _begin_epoch(client: Any, keys: RunKeys, slot: str, after_epoch: int) -> tuple[int, int, int]:
    """(the next epoch, how many entries the slot ever had, the largest epoch that was swept)."""
    with translated(client):
        seconds, micros = client.time()
        trimmed, told = client.hget(keys.trimmed, slot), client.hget(keys.swept, "epoch")
    about = describe_stream(client, keys.stream(slot))
    last = parse_id(bytes(about["last-generated-id"]).decode()) if about else None
    # The clock of a server may run back; ids of a stream must not, nor those of a slot whose stream was swept away.
    swept = parse_count(told) if told else -1
    least = max(after_epoch, last[0] if last else -1, swept)
    epoch = max(int(seconds) * 1000 + int(micros) // 1000, least + 1)
    return epoch, written_before(about, trimmed), swept


def _taken(cursor: Any) -> tuple[int, int]:
    text = parse_cursor(cursor)
    return parse_id(text) if text else (0, 0)


def _next_incarnation(previous: bytes | str | None) -> int:
    try:
        before = parse_object(previous).get("incarnation", 0) if previous else -1
    except ValueError:
        before = 0
    return before + 1 if is_whole(before) or before == -1 else 1


def _stream_of(previous: bytes | str | None) -> Stream | None:
    """The stream of a slot with that registration; None if it has none, or somebody else wrote there."""
    try:
        return parse_registration(previous)[1] if previous else None
    except ValueError:
        return None


def _release_quietly(claim: Claim) -> None:
    try:
        claim.release()
    except (StoreUnavailable, ClaimLost):
        return
