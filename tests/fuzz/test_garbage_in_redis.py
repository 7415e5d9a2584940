"""Garbage under every key that anybody reads: whoever reads it goes on, or refuses with an error of ours."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from fuzzing import check_text

from clawq.errors import ClawqError, RecordUnreadable
from clawq.transport.books import Books
from clawq.transport.claims import Claim, holder_of
from clawq.transport.control import (
    Board,
    ControlRecord,
    Events,
    Heartbeat,
    Heartbeats,
    PaceRecord,
    RunRecord,
    RunRegistry,
)
from clawq.transport.dead_letters import DeadLetters
from clawq.transport.keys import LEARNER, RUNS_KEY, RunKeys
from clawq.transport.live_streams import LiveStreams
from clawq.transport.pins import Pins
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.stream import StreamWriter
from clawq.transport.trimming import trimmed_upto
from clawq.transport.weights import WeightsPublisher, WeightsReader

GARBAGE = (b"", b"-7", b"[" * 100_000, b"9" * 5000, b'{"epoch": 1e999, "chunks": [], "since_ms": {}}')
SLOT = "slot-1"


@dataclass
class Place:
    client: Any
    broker: Any
    keys: RunKeys

    def uses(self) -> Iterator[Callable[[], Any]]:
        """All that processes do with what stands in Redis."""
        client, keys = self.client, self.keys
        yield ControlRecord(client, keys).read
        yield lambda: ControlRecord(client, keys).write(stop=False, window_bytes=5, config_epoch=1)
        yield WeightsReader(client, keys).head
        yield lambda: WeightsReader(client, keys).fetch_newer(0)
        yield self.publish
        yield self.act
        yield self.follow
        reads: tuple[Callable[[], Any], ...] = (
            Board(client, keys).read,
            PaceRecord(client, keys, 1).read,
            Heartbeats(client, keys).read,
            Events(client, keys).read,
            Readers(client, keys).list,
            Readers(client, keys).tell,
            Pins(client, keys).all,
            Books(client, keys).read,
            DeadLetters(client, keys).read,
            DeadLetters(client, keys).counts,
            RunRegistry(self.broker).list,
        )
        yield from reads
        yield lambda: Heartbeats(client, keys).beat(Heartbeat("w", 1, 0, "h", 7))
        yield lambda: Readers(client, keys).kept_by_required("nobody")
        yield lambda: Books(client, keys).look({})
        yield lambda: trimmed_upto(client, keys)
        yield lambda: holder_of(client, keys.claim(LEARNER))
        yield lambda: [LiveStreams(client, keys).edges(slot) for slot in LiveStreams(client, keys).slots()]

    def publish(self) -> None:
        claim = Claim.take(self.client, self.keys.claim("publisher"), "test", 9.0)
        try:
            WeightsPublisher(self.client, self.keys, claim).publish({}, 10, 1)
        finally:
            claim.release()

    def act(self) -> None:
        writer = StreamWriter.open(self.client, self.keys, SLOT, "h/w")
        try:
            writer.send(1, b"payload")
        finally:
            writer.close()

    def follow(self) -> None:
        reader = StreamReader(self.client, self.keys)
        try:
            reader.read(0.0)
            reader.acknowledge({SLOT: "1-1"})
            reader.checkpointed({SLOT: "1-1"})
            reader.trim({SLOT: "1-1"}, 1)
            reader.sweep()
        finally:
            reader.close()

    def hashes(self) -> dict[str, tuple[str, ...]]:
        keys = self.keys
        slots = (keys.slots, keys.trimmed, keys.swept, keys.cursors(), keys.kept(LEARNER), keys.ledger())
        return {
            keys.control: ("head", "stop", "window_bytes", "config_epoch", "required"),
            keys.pins: ("best",),
            keys.pace: ("session", "window_bytes"),
            keys.metrics: ("flow/at_s",),
            keys.heartbeats: ("w",),
            keys.readers: ("copy", "\udcff"),
            keys.dead_letter_counts: ("corrupt",),
            keys.weights(9): ("meta", "c0"),
            **{name: (SLOT, "@sums", "no name / at all") for name in slots},
        }

    def streams(self) -> tuple[str, ...]:
        keys = self.keys
        return (keys.stream(SLOT), keys.events, keys.dead_letters, keys.dead_entries)

    def strings(self) -> tuple[str, ...]:
        return (self.keys.born, self.keys.claim(LEARNER), self.keys.claim(f"slot:{SLOT}"))


@pytest.fixture
def place(data_client: redis.Redis, broker_client: redis.Redis, run_keys: RunKeys) -> Place:
    here = Place(data_client, broker_client, run_keys)
    data_client.hset(run_keys.slots, SLOT, '{"worker": "h/w", "epoch": 1, "incarnation": 0}')
    data_client.hset(run_keys.control, mapping={"head": 9, "stop": 0, "window_bytes": 5, "config_epoch": 1})
    return here


def _try_all(place: Place) -> None:
    for use in place.uses():
        try:
            use()
        except ClawqError as error:
            check_text(error, 2000)


def test_garbage_in_a_field_stops_nobody_with_another_error_than_ours(place: Place) -> None:
    _spoil_fields(place, b"\xff\xfe\x00")


@pytest.mark.slow
@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda text: repr(text[:12]))
def test_any_garbage_in_a_field_stops_nobody_with_another_error_than_ours(place: Place, garbage: bytes) -> None:
    _spoil_fields(place, garbage)


def _spoil_fields(place: Place, garbage: bytes) -> None:
    place.broker.hset(RUNS_KEY, "garbage", garbage)
    for key, fields in place.hashes().items():
        for name in fields:
            raw = name.encode(errors="surrogateescape")
            before = place.client.hget(key, raw)
            place.client.hset(key, raw, garbage)
            _try_all(place)
            place.client.hset(key, raw, before) if before is not None else place.client.hdel(key, raw)
    for key in place.streams():
        place.client.xadd(key, {b"\xff": garbage, b"kind": garbage, b"facts": garbage, b"id": garbage, b"f": garbage})
        _try_all(place)
    for key in place.strings():
        place.client.set(key, garbage)
        _try_all(place)
        place.client.delete(key)
    place.broker.hdel(RUNS_KEY, "garbage")


def test_a_key_of_another_type_stops_nobody_with_another_error_than_ours(place: Place) -> None:
    for key in (*place.hashes(), *place.streams(), place.keys.versions):
        before = place.client.dump(key)
        place.client.set(key, b"of another type")
        _try_all(place)
        place.client.delete(key)
        if before is not None:
            place.client.restore(key, 0, before)
    for key in place.strings():
        place.client.rpush(key, b"of another type")
        _try_all(place)
        place.client.delete(key)


def test_one_slot_that_is_no_stream_does_not_hide_the_others(place: Place) -> None:
    place.act()
    place.client.hset(place.keys.slots, "slot-2", '{"epoch": 1}')
    place.client.set(place.keys.stream("slot-2"), b"of another type")
    reader = StreamReader(place.client, place.keys)
    assert [entry.payload for entry in reader.read(1.0)] == [b"payload"]
    reader.close()


def test_a_spoiled_head_is_named_to_readers_and_mended_by_the_next_publishing(place: Place) -> None:
    place.publish()
    place.client.hset(place.keys.control, "head", b"\xff")
    for read in (WeightsReader(place.client, place.keys).head, ControlRecord(place.client, place.keys).read):
        with pytest.raises(RecordUnreadable, match="control record"):
            read()
    claim = Claim.take(place.client, place.keys.claim("publisher"), "test", 9.0)
    WeightsPublisher(place.client, place.keys, claim).publish({}, 11, 1)
    assert WeightsReader(place.client, place.keys).head() == 11


def test_what_was_taken_over_is_told_again_when_somebody_overwrote_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawq.transport.acknowledgements.TELL_ALL_S", 0.0)
    reader = StreamReader(place.client, place.keys)
    reader.acknowledge({SLOT: "5-1"})
    place.client.hset(place.keys.cursors(), SLOT, b"\xff")
    reader.acknowledge({})
    assert place.client.hget(place.keys.cursors(), SLOT) == b"5-1"
    reader.close()


def test_a_run_of_the_registry_that_cannot_be_used_is_not_listed(broker_client: redis.Redis) -> None:
    registry = RunRegistry(broker_client)
    good = RunRecord("hand-good", "a" * 32, created_ms=5)
    registry.add(good)
    types: dict[str, Any] = {"created_ms": "soon", "config": [], "learner": 7}
    values: dict[str, Any] = {"tag": "x", "run_id": "a b", "created_ms": -1}
    odd = [{name: value} for given in (types, values) for name, value in given.items()]
    for number, change in enumerate(odd):
        broker_client.hset(RUNS_KEY, f"odd-{number}", json.dumps({**good.to_json(), **change}))
    assert [run for run in registry.list() if run.tag == good.tag] == [good]
    broker_client.hdel(RUNS_KEY, "hand-good", *(f"odd-{number}" for number in range(len(odd))))
