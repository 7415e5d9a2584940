"""The in-memory twin of the transport: the same protocols, in one process, safe to use from several threads.

For `clawq local`, for tests of everything above the transport, and as the plain statement of what the Redis adapter
must do: one contract suite runs over both. Streams, cursors, control record and weights are dicts behind one condition
variable; payloads and arrays are copied on the way in, so nobody sees a buffer change under him.

What it does not have: a server that can go away or run full, and claims that run out.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clawq.core import Control, Entry, Weights
from clawq.errors import ClaimHeld, FragmentTooLarge, StreamRejected, TransportError, WeightsCorrupt, WeightsGone
from clawq.transport.codec import MAX_FRAGMENT_BYTES
from clawq.transport.keys import LEARNER
from clawq.transport.registry import ReaderRecord
from clawq.transport.retained import EntryId, Retained, slowest
from clawq.transport.signing import WRITTEN_FIELDS
from clawq.transport.stream import parse_id, parse_ids
from clawq.transport.trimming import room

_START = (0, 0)


@dataclass(slots=True)
class _Stream:
    """One slot's stream: ids in order, and what the writers need to know."""

    ids: list[EntryId] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    top: EntryId = _START
    written: int = 0
    holder: object | None = None

    def after(self, cursor: EntryId) -> int:
        return bisect_right(self.ids, cursor)

    def ordinal(self, index: int) -> int:
        """Of the entry at that place in the lists."""
        return self.written - len(self.ids) + index + 1


@dataclass(slots=True)
class _Reader:
    """What is known of a reader: the in-memory entry of the registry."""

    required: bool
    found: frozenset[str]
    what: str
    present: object | None = None
    taken: dict[str, EntryId] = field(default_factory=dict)
    kept: dict[str, EntryId] = field(default_factory=dict)


class MemoryTransport:
    """A run's transport within one process. Make one, and hand out its ends.

    Args:
        clock_ms: wall clock in milliseconds, for epochs.
    """

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._changed = threading.Condition()
        self._clock_ms = clock_ms
        self._streams: dict[str, _Stream] = {}
        self._control: dict[str, int] = {}
        self._readers: dict[str, _Reader] = {}
        #: Slot -> id and ordinal of the last entry trimmed; outlives the stream.
        self._trimmed: dict[str, tuple[EntryId, int]] = {}
        self._weights: dict[int, Weights] = {}
        self._pins: dict[str, int] = {}

    @property
    def control(self) -> "MemoryControl":
        """The control record."""
        return MemoryControl(self)

    def sink(self, slot: str, after_epoch: int = 0) -> "MemorySink":
        """Take a slot and begin an epoch; ClaimHeld if somebody has it."""
        with self._changed:
            top, written = self._trimmed.get(slot, (_START, 0))
            stream = self._streams.setdefault(slot, _Stream(top=top, written=written))
            if stream.holder is not None:
                raise ClaimHeld(f"slot:{slot}", "another actor of this process")
            epoch = max(self._clock_ms(), after_epoch + 1, stream.top[0] + 1)
            sink = MemorySink(self, slot, stream, epoch)
            stream.holder = sink
            return sink

    def source(
        self,
        cursors: Mapping[str, str] | None = None,
        reader: str = LEARNER,
        required: bool = False,
        ordinals: Mapping[str, int] | None = None,
    ) -> "MemorySource":
        """A reader of all streams; the one called `learner` trims them."""
        return MemorySource(self, cursors or {}, reader, required, ordinals or {})

    @property
    def readers(self) -> "MemoryReaders":
        """The registry of readers."""
        return MemoryReaders(self)

    def required(self) -> tuple[str, ...]:
        """Names of the required readers."""
        return tuple(sorted({LEARNER, *(name for name, one in self._readers.items() if one.required)}))

    def publisher(self, keep: int = 3) -> "MemoryPublisher":
        """The learner's end of weights."""
        return MemoryPublisher(self, keep)

    def weights(self) -> "MemoryWeights":
        """The actors' end of weights."""
        return MemoryWeights(self)


class MemoryControl:
    """Twin of ControlRecord."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    def write(self, **fields: int | bool) -> None:
        """Set some fields; the others keep their values."""
        unknown = set(fields) - set(WRITTEN_FIELDS)
        if unknown:
            raise TypeError(f"the control record has no field {', '.join(sorted(unknown))}; it has {WRITTEN_FIELDS}")
        with self._transport._changed:
            self._transport._control |= {name: int(value) for name, value in fields.items()}

    def read(self) -> Control | None:
        """The record, None if there is none."""
        with self._transport._changed:
            fields = self._transport._control
            if "window_bytes" not in fields or "config_epoch" not in fields:
                return None
            stop = bool(fields.get("stop", 0))
            required = self._transport.required()
            return Control(fields.get("head", 0), stop, fields["window_bytes"], fields["config_epoch"], required)

    def request_stop(self) -> None:
        """Tell all actors that the run is over."""
        self.write(stop=True)


class MemorySink:
    """Twin of StreamWriter; a core.FragmentSink."""

    def __init__(self, transport: MemoryTransport, slot: str, stream: _Stream, epoch: int) -> None:
        self._transport, self._slot, self._stream, self._epoch = transport, slot, stream, epoch

    @property
    def epoch(self) -> int:
        """The epoch taken with the slot."""
        return self._epoch

    def send(self, seq: int, payload: bytes | bytearray | memoryview) -> Control | None:
        """Append an entry; sending the newest one again is success."""
        size = memoryview(payload).nbytes
        if size > MAX_FRAGMENT_BYTES:
            raise FragmentTooLarge(f"{size} bytes; at most {MAX_FRAGMENT_BYTES} travel in one fragment")
        entry = (self._epoch, seq)
        with self._transport._changed:
            if entry > self._stream.top:
                self._stream.ids.append(entry)
                self._stream.payloads.append(bytes(payload))
                self._stream.top = entry
                self._stream.written += 1
                self._transport._changed.notify_all()
            elif entry not in self._stream.ids and entry > max(self._taken(), default=_START):
                self.close()
                raise StreamRejected(f"{self._epoch}-{seq} is below what the stream has seen, and it is not there")
        return self.poll()

    def poll(self) -> Control | None:
        """The control record alone."""
        return self._transport.control.read()

    def unread_bytes(self) -> int:
        """Bytes of this epoch that the slowest required reader has not taken over."""
        with self._transport._changed:
            stream, taken = self._stream, min(self._taken())
            first = max(stream.after(taken), stream.after((self._epoch, 0)))
            return sum(map(len, stream.payloads[first:]))

    def _taken(self) -> list[EntryId]:
        readers = self._transport._readers
        known = (readers.get(name) for name in self._transport.required())
        return [one.taken.get(self._slot, _START) if one else _START for one in known]

    def close(self, all_sent: bool = False) -> None:
        """Give the slot back. Idempotent; here nobody counts what was left unsent."""
        with self._transport._changed:
            if self._stream.holder is self:
                self._stream.holder = None


class MemoryReaders:
    """Twin of Readers, the registry."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    def list(self) -> list[ReaderRecord]:
        """All readers with their cursors."""
        with self._transport._changed:
            records = [
                ReaderRecord(
                    name,
                    one.required,
                    what=one.what,
                    found=tuple(sorted(one.found)),
                    holder=one.what if one.present else None,
                    taken={slot: f"{epoch}-{seq}" for slot, (epoch, seq) in one.taken.items()},
                    kept={slot: f"{epoch}-{seq}" for slot, (epoch, seq) in one.kept.items()},
                )
                for name, one in self._transport._readers.items()
            ]
        return sorted(records, key=lambda record: (record.name != LEARNER, not record.required, record.name))

    def leave(self, name: str) -> bool:
        """Take a reader off the list; whether it was there."""
        if name == LEARNER:
            raise TransportError("a run's own learner cannot leave it: stop the run instead")
        with self._transport._changed:
            return self._transport._readers.pop(name, None) is not None


class MemorySource:
    """Twin of StreamReader; a core.FragmentSource."""

    def __init__(
        self,
        transport: MemoryTransport,
        cursors: Mapping[str, str],
        name: str,
        required: bool,
        ordinals: Mapping[str, int],
    ) -> None:
        self.name, self.required = name, required or name == LEARNER
        self._transport = transport
        self._cursors, self._ordinals = parse_ids(cursors), dict(ordinals)
        self._open_slots: set[str] | None = None
        self._retained = Retained()
        self._handled: dict[str, EntryId] = {}
        self._room_bytes: int | None = None
        self._holding: tuple[str, ...] = ()

    @property
    def trimming(self) -> "MemorySource":
        """Itself, if it trims."""
        if self.name != LEARNER:
            raise ValueError(f"reader {self.name} does not trim; the run's learner does")
        return self

    @property
    def holding(self) -> tuple[str, ...]:
        """Required readers whose checkpoints trimming waits for."""
        return self._holding

    def read(self, timeout_s: float) -> list[Entry]:
        """Entries after the cursors, oldest first per slot, and what was missed; an empty list on timeout."""
        with self._transport._changed:
            self._enter()
            return self._transport._changed.wait_for(lambda: list(self._collect()), timeout_s)

    def _enter(self) -> "_Reader":
        readers = self._transport._readers
        found = frozenset(slot for slot, stream in self._transport._streams.items() if stream.written)
        known = readers.setdefault(self.name, _Reader(self.required, found, self.name))
        if known.present not in (None, self) and self.name != LEARNER:
            raise ClaimHeld(f"reader:{self.name}", "another reader of this process")
        if self._open_slots is None:
            if not self._cursors:
                known.found = found
            self._open_slots = {*known.found, *self._cursors} - self._ordinals.keys()
        known.required, known.present = self.required, self
        return known

    def _collect(self) -> Iterator[Entry]:
        for slot, (entry, ordinal) in self._transport._trimmed.items():
            yield from self._missed(slot, entry, ordinal)
        for slot, stream in self._transport._streams.items():
            first = stream.after(self._cursors.get(slot, _START))
            for index in range(first, len(stream.ids)):
                entry, payload, ordinal = stream.ids[index], stream.payloads[index], stream.ordinal(index)
                yield from self._missed(slot, (entry[0], entry[1] - 1), ordinal - 1)
                self._cursors[slot], self._ordinals[slot] = entry, ordinal
                self._open(slot).discard(slot)
                if self.name == LEARNER:
                    self._retained.note(slot, entry, len(payload), ordinal)
                yield Entry(slot, *entry, payload, ordinal)

    def _open(self, slot: str) -> set[str]:
        assert self._open_slots is not None
        return self._open_slots

    def _missed(self, slot: str, upto: EntryId, ordinal: int) -> Iterator[Entry]:
        """The word that entries up to there went away unread, if some did."""
        place = self._ordinals.get(slot, 0)
        if slot in self._open(slot) or upto < self._cursors.get(slot, _START) or ordinal <= place:
            return
        self._cursors[slot], self._ordinals[slot] = upto, ordinal
        yield Entry(slot, *upto, b"", ordinal, ordinal - place)

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry that `read` returned."""
        with self._transport._changed:
            return {slot: f"{epoch}-{seq}" for slot, (epoch, seq) in self._cursors.items()}

    def ordinals(self) -> dict[str, int]:
        """Slot -> ordinal of the entry at the cursor, where it is known."""
        with self._transport._changed:
            return dict(self._ordinals)

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Tell how far this reader has taken entries over."""
        with self._transport._changed:
            self._handled |= parse_ids(cursors)
            self._tell_taken()

    def _tell_taken(self) -> None:
        due = self._handled
        if self._room_bytes is not None:
            due = self._retained.within(due, self._room_bytes)
        self._enter().taken |= due

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """Tell how far this reader will never have to read again."""
        with self._transport._changed:
            self._enter().kept |= parse_ids(cursors)

    def beat(self) -> None:
        """Show that this reader is there."""

    def close(self) -> None:
        """Be gone; the place in the registry is kept."""
        with self._transport._changed:
            if self.name in self._transport._readers:
                self._transport._readers[self.name].present = None

    def leave(self) -> None:
        """Be gone for good."""
        self._transport.readers.leave(self.name)

    def server_changed(self) -> bool:
        """Never: there is no server."""
        return False

    def unread_entries(self) -> dict[str, int]:
        """Slot -> entries not read yet."""
        with self._transport._changed:
            return {
                slot: len(stream.ids) - stream.after(self._cursors.get(slot, _START))
                for slot, stream in self._transport._streams.items()
            }

    def stored_bytes(self) -> int:
        """Bytes in all streams."""
        with self._transport._changed:
            return sum(len(payload) for stream in self._transport._streams.values() for payload in stream.payloads)

    def uncheckpointed_bytes(self, cursors: Mapping[str, str]) -> int:
        """Bytes of entries read that lie after these cursors."""
        with self._transport._changed:
            return self._retained.bytes_after(parse_ids(cursors))

    def trim(self, checkpointed: Mapping[str, str], budget_bytes: int, window_bytes: int = 0) -> int:
        """Remove the oldest entries behind all required checkpoints until the streams are within the budget."""
        with self._transport._changed:
            streams = self._transport._streams
            if window_bytes:
                largest = max((len(payload) for stream in streams.values() for payload in stream.payloads), default=0)
                self._room_bytes = room(budget_bytes, window_bytes, len(streams), largest)
            excess = self.trimming.stored_bytes() - budget_bytes
            if self._room_bytes is not None:
                excess = max(excess, self._retained.total_bytes - self._room_bytes)
            trimmed = self._trim(checkpointed, excess)
            self._tell_taken()
            return trimmed

    def _trim(self, checkpointed: Mapping[str, str], excess_bytes: int) -> int:
        if excess_bytes <= 0:
            return 0
        kept = {LEARNER: parse_ids(checkpointed)}
        kept |= {name: one.kept for name, one in self._transport._readers.items() if one.required and name != LEARNER}
        dropped = self._retained.take_oldest(slowest(list(kept.values())), excess_bytes)
        self._holding = tuple(name for name, cursors in kept.items() if self._retained.uncovered(cursors))
        trimmed = 0
        for slot, (entry, ordinal) in dropped.items():
            stream = self._transport._streams[slot]
            last = stream.after(entry)
            del stream.ids[:last], stream.payloads[:last]
            self._transport._trimmed[slot] = entry, ordinal
            trimmed += last
        self._transport._changed.notify_all()
        return trimmed

    def read_back(self, upto: Mapping[str, str]) -> Iterator[Entry]:
        """The retained entries at or before these cursors, in the order of their ids."""
        with self._transport._changed:
            entries = [
                Entry(slot, *entry, payload, stream.ordinal(index))
                for slot, stream in self._transport._streams.items()
                for index, (entry, payload) in enumerate(zip(stream.ids, stream.payloads, strict=True))
                if slot in upto and entry <= parse_id(upto[slot])
            ]
            entries.sort(key=lambda entry: (entry.epoch, entry.seq))
            if self.name == LEARNER:
                for entry in entries:
                    self._retained.note(entry.slot, (entry.epoch, entry.seq), len(entry.payload), entry.ordinal)
        return iter(entries)

    def sweep(self) -> list[str]:
        """Remove streams that are empty and that nobody holds; returns their slots."""
        with self._transport._changed:
            streams = self._transport._streams
            swept = [slot for slot, stream in streams.items() if stream.holder is None and not stream.ids]
            for slot in swept:
                self._transport._trimmed[slot] = streams[slot].top, streams[slot].written
                del streams[slot]
                self._cursors.pop(slot, None)
                for one in self._transport._readers.values():
                    one.taken.pop(slot, None)
                    one.kept.pop(slot, None)
            return swept


class MemoryPublisher:
    """Twin of WeightsPublisher."""

    def __init__(self, transport: MemoryTransport, keep: int) -> None:
        self._transport, self._keep = transport, keep

    def publish(
        self,
        arrays: Mapping[str, Any],
        version: int,
        updates: int,
        metadata: Mapping[str, Any] | None = None,
        pin: str | None = None,
    ) -> None:
        """Make new weights visible, all at once."""
        copies = {name: np.array(array) for name, array in arrays.items()}
        for name, array in copies.items():
            if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
                raise WeightsCorrupt(f"weights version {version} were not published: {name} is not finite")
        transport = self._transport
        with transport._changed:
            head = transport._control.get("head", 0)
            if version == head and _same(transport._weights.get(version), copies, updates, metadata):
                return
            if version <= head:
                raise TransportError(f"weights version {version} is not newer than the head ({head})")
            transport._weights[version] = Weights(version, copies, updates, dict(metadata or {}))
            transport._control["head"] = version
            if pin is not None:
                transport._pins[pin] = version
            for old in sorted(transport._weights, reverse=True)[self._keep :]:
                if old not in transport._pins.values():
                    del transport._weights[old]

    def head(self) -> int:
        """The newest published version, 0 if there is none."""
        return self._transport.weights().head()

    def pin(self, version: int, tag: str) -> None:
        """Keep a version under a name."""
        with self._transport._changed:
            if version not in self._transport._weights:
                raise WeightsGone(f"weights version {version} cannot be pinned: it is not kept any more")
            self._transport._pins[tag] = version

    def unpin(self, tag: str) -> None:
        """Forget a name."""
        with self._transport._changed:
            self._transport._pins.pop(tag, None)

    def pins(self) -> dict[str, int]:
        """Tag -> pinned version."""
        with self._transport._changed:
            return dict(self._transport._pins)


class MemoryWeights:
    """Twin of WeightsReader; a core.WeightsSource."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    def head(self) -> int:
        """The newest published version, 0 if there is none."""
        with self._transport._changed:
            return self._transport._control.get("head", 0)

    def fetch_newer(self, than: int) -> Weights | None:
        """The head if its version is larger than `than`; else None."""
        with self._transport._changed:
            head = self.head()
            return self.fetch(head) if head > than else None

    def fetch(self, version: int) -> Weights:
        """That version, or WeightsGone."""
        with self._transport._changed:
            kept = self._transport._weights.get(version)
        if kept is None:
            raise WeightsGone(f"weights version {version} is not kept")
        copies = {name: array.copy() for name, array in kept.arrays.items()}
        return Weights(version, copies, kept.updates, kept.metadata)


def _same(kept: Weights | None, arrays: Mapping[str, Any], updates: int, metadata: Mapping[str, Any] | None) -> bool:
    """Whether exactly these weights are kept."""
    if kept is None or (kept.updates, kept.metadata) != (updates, dict(metadata or {})):
        return False
    return kept.arrays.keys() == arrays.keys() and all(
        array.dtype == kept.arrays[name].dtype and np.array_equal(array, kept.arrays[name])
        for name, array in arrays.items()
    )
