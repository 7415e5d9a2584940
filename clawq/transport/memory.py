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
from clawq.transport.control import CONTROL_FIELDS
from clawq.transport.retained import EntryId, Retained

_START = (0, 0)


@dataclass(slots=True)
class _Stream:
    """One slot's stream: ids in order, and what the writers need to know."""

    ids: list[EntryId] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    top: EntryId = _START
    taken: EntryId = _START
    holder: object | None = None

    def after(self, cursor: EntryId) -> int:
        return bisect_right(self.ids, cursor)


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
        self._weights: dict[int, Weights] = {}
        self._pins: dict[str, int] = {}

    @property
    def control(self) -> "MemoryControl":
        """The control record."""
        return MemoryControl(self)

    def sink(self, slot: str, after_epoch: int = 0) -> "MemorySink":
        """Take a slot and begin an epoch; ClaimHeld if somebody has it."""
        with self._changed:
            stream = self._streams.setdefault(slot, _Stream())
            if stream.holder is not None:
                raise ClaimHeld(f"slot:{slot}", "another actor of this process")
            epoch = max(self._clock_ms(), after_epoch + 1, stream.top[0] + 1)
            sink = MemorySink(self, stream, epoch)
            stream.holder = sink
            return sink

    def source(self, cursors: Mapping[str, str] | None = None) -> "MemorySource":
        """A reader of all streams."""
        return MemorySource(self, cursors or {})

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
        unknown = set(fields) - set(CONTROL_FIELDS)
        if unknown:
            raise TypeError(f"the control record has no field {', '.join(sorted(unknown))}; it has {CONTROL_FIELDS}")
        with self._transport._changed:
            self._transport._control |= {name: int(value) for name, value in fields.items()}

    def read(self) -> Control | None:
        """The record, None if there is none."""
        with self._transport._changed:
            fields = self._transport._control
            if "window_bytes" not in fields or "config_epoch" not in fields:
                return None
            stop = bool(fields.get("stop", 0))
            return Control(fields.get("head", 0), stop, fields["window_bytes"], fields["config_epoch"])

    def request_stop(self) -> None:
        """Tell all actors that the run is over."""
        self.write(stop=True)


class MemorySink:
    """Twin of StreamWriter; a core.FragmentSink."""

    def __init__(self, transport: MemoryTransport, stream: _Stream, epoch: int) -> None:
        self._transport, self._stream, self._epoch = transport, stream, epoch

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
                self._transport._changed.notify_all()
            elif entry not in self._stream.ids and not _START < entry <= self._stream.taken:
                self.close()
                raise StreamRejected(f"{self._epoch}-{seq} is below what the stream has seen, and it is not there")
        return self.poll()

    def poll(self) -> Control | None:
        """The control record alone."""
        return self._transport.control.read()

    def unread_bytes(self) -> int:
        """Bytes of this epoch that the learner has not taken over."""
        with self._transport._changed:
            stream = self._stream
            first = max(stream.after(stream.taken), stream.after((self._epoch, 0)))
            return sum(map(len, stream.payloads[first:]))

    def close(self) -> None:
        """Give the slot back. Idempotent."""
        with self._transport._changed:
            if self._stream.holder is self:
                self._stream.holder = None


class MemorySource:
    """Twin of StreamReader; a core.FragmentSource."""

    def __init__(self, transport: MemoryTransport, cursors: Mapping[str, str]) -> None:
        self._transport = transport
        self._cursors = {slot: _parse(entry_id) for slot, entry_id in cursors.items()}
        self._retained = Retained()

    def read(self, timeout_s: float) -> list[Entry]:
        """Entries after the cursors, oldest first per slot; an empty list on timeout."""
        with self._transport._changed:
            return self._transport._changed.wait_for(lambda: list(self._collect()), timeout_s)

    def _collect(self) -> Iterator[Entry]:
        for slot, stream in self._transport._streams.items():
            first = stream.after(self._cursors.get(slot, _START))
            for (epoch, seq), payload in zip(stream.ids[first:], stream.payloads[first:], strict=True):
                self._cursors[slot] = (epoch, seq)
                self._retained.note(slot, (epoch, seq), len(payload))
                yield Entry(slot, epoch, seq, payload)

    def cursors(self) -> dict[str, str]:
        """Slot -> id of the last entry that `read` returned."""
        with self._transport._changed:
            return {slot: f"{epoch}-{seq}" for slot, (epoch, seq) in self._cursors.items()}

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Tell how far this reader has taken entries over."""
        with self._transport._changed:
            for slot, entry_id in cursors.items():
                if slot in self._transport._streams:
                    self._transport._streams[slot].taken = _parse(entry_id)

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
            return self._retained.bytes_after({slot: _parse(entry_id) for slot, entry_id in cursors.items()})

    def trim(self, checkpointed: Mapping[str, str], budget_bytes: int) -> int:
        """Remove the oldest entries behind `checkpointed` until the streams are within the budget."""
        with self._transport._changed:
            excess = self.stored_bytes() - budget_bytes
            covered = {slot: _parse(entry_id) for slot, entry_id in checkpointed.items()}
            dropped = self._retained.take_oldest(covered, excess) if excess > 0 else {}
            trimmed = 0
            for slot, entry in dropped.items():
                stream = self._transport._streams[slot]
                last = stream.after(entry)
                del stream.ids[:last], stream.payloads[:last]
                trimmed += last
            return trimmed

    def read_back(self, upto: Mapping[str, str]) -> Iterator[Entry]:
        """The retained entries at or before these cursors, in the order of their ids."""
        with self._transport._changed:
            entries = [
                Entry(slot, *entry, payload)
                for slot, stream in self._transport._streams.items()
                for entry, payload in zip(stream.ids, stream.payloads, strict=True)
                if slot in upto and entry <= _parse(upto[slot])
            ]
            entries.sort(key=lambda entry: (entry.epoch, entry.seq))
            for entry in entries:
                self._retained.note(entry.slot, (entry.epoch, entry.seq), len(entry.payload))
        return iter(entries)

    def sweep(self) -> list[str]:
        """Remove streams that are empty and that nobody holds; returns their slots."""
        with self._transport._changed:
            streams = self._transport._streams
            swept = [slot for slot, stream in streams.items() if stream.holder is None and not stream.ids]
            for slot in swept:
                del streams[slot]
                self._cursors.pop(slot, None)
            return swept


class MemoryPublisher:
    """Twin of WeightsPublisher."""

    def __init__(self, transport: MemoryTransport, keep: int) -> None:
        self._transport, self._keep = transport, keep

    def publish(
        self, arrays: Mapping[str, Any], version: int, updates: int, metadata: Mapping[str, Any] | None = None
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


def _parse(entry_id: str) -> EntryId:
    epoch, _, seq = entry_id.partition("-")
    return int(epoch), int(seq)
