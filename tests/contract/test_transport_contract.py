"""What every transport does, told once and run over the in-memory twin and over a real Redis."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import redis

from clawq.core import Control, Entry, FragmentSink, FragmentSource, WeightsSource
from clawq.errors import ClaimHeld, FragmentTooLarge, StreamRejected, TransportError, WeightsCorrupt, WeightsGone
from clawq.transport.claims import Claim
from clawq.transport.codec import MAX_FRAGMENT_BYTES
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.memory import MemoryTransport
from clawq.transport.readers import StreamReader
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsPublisher, WeightsReader


@dataclass
class RedisTransport:
    """The Redis adapter with the handles of its twin."""

    client: redis.Redis
    keys: RunKeys

    @property
    def control(self) -> ControlRecord:
        return ControlRecord(self.client, self.keys)

    def sink(self, slot: str, after_epoch: int = 0) -> StreamWriter:
        return StreamWriter.open(self.client, self.keys, slot, "test", after_epoch=after_epoch)

    def source(self, cursors: Mapping[str, str] | None = None) -> StreamReader:
        return StreamReader(self.client, self.keys, cursors=cursors)

    def publisher(self, keep: int = 3) -> WeightsPublisher:
        claim = Claim.take(self.client, self.keys.claim("learner"), "test", 60)
        return WeightsPublisher(self.client, self.keys, claim, keep)

    def weights(self) -> WeightsReader:
        return WeightsReader(self.client, self.keys)


@pytest.fixture(params=["memory", "redis"])
def transport(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryTransport()
    else:
        yield RedisTransport(request.getfixturevalue("data_client"), request.getfixturevalue("run_keys"))


def read_all(source: FragmentSource, count: int) -> list[Entry]:
    entries: list[Entry] = []
    while len(entries) < count:
        more = source.read(2.0)
        assert more, f"only {len(entries)} of {count} entries came"
        entries += more
    return entries


def test_ends_fit_the_protocols_of_core(transport: Any) -> None:
    sink: FragmentSink = transport.sink("a")
    weights: WeightsSource = transport.weights()
    assert isinstance(sink, FragmentSink)
    assert weights.fetch_newer(0) is None
    assert transport.source().read(0.01) == []


def test_entries_arrive_whole_and_in_order_of_each_slot(transport: Any) -> None:
    sinks = {slot: transport.sink(slot) for slot in ("a", "b")}
    sent = {slot: [f"{slot}{n}".encode() * n for n in range(1, 31)] for slot in sinks}
    for n in range(30):
        for slot, sink in sinks.items():
            sink.send(n + 1, sent[slot][n])
    entries = read_all(transport.source(), 60)
    for slot, sink in sinks.items():
        mine = [entry for entry in entries if entry.slot == slot]
        assert [entry.payload for entry in mine] == sent[slot]
        assert [(entry.epoch, entry.seq) for entry in mine] == [(sink.epoch, n) for n in range(1, 31)]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_sent_and_may_change_afterwards(transport: Any, kind: Callable[[Any], Any]) -> None:
    buffer = bytearray(np.arange(1000, dtype=np.float32).tobytes())
    expected = bytes(buffer)
    transport.sink("a").send(1, kind(buffer))
    buffer[:] = bytes(len(buffer))
    assert read_all(transport.source(), 1)[0].payload == expected


def test_a_blocked_read_wakes_up_when_an_entry_comes(transport: Any) -> None:
    sink, source = transport.sink("a"), transport.source()
    source.read(0.0)
    timer = threading.Timer(0.1, sink.send, (1, b"x"))
    timer.start()
    assert [entry.payload for entry in source.read(5.0)] == [b"x"]
    timer.join()


def test_a_slot_that_appears_later_is_read_too(transport: Any) -> None:
    source = transport.source()
    assert source.read(0.0) == []
    transport.sink("late").send(1, b"x")
    assert read_all(source, 1)[0].slot == "late"


def test_sending_the_same_seq_again_is_success_and_makes_no_second_entry(transport: Any) -> None:
    sink = transport.sink("a")
    sink.send(1, b"x")
    sink.send(1, b"x")
    sink.send(2, b"yy")
    sink.send(1, b"x")
    assert sink.unread_bytes() == 3
    assert [entry.seq for entry in read_all(transport.source(), 2)] == [1, 2]
    assert transport.source().unread_entries().get("a", 2) == 2


def test_an_id_below_the_top_that_is_not_there_is_rejected_and_a_new_epoch_works(transport: Any) -> None:
    sink = transport.sink("a")
    sink.send(5, b"x")
    with pytest.raises(StreamRejected):
        sink.send(4, b"never sent")
    again = transport.sink("a", after_epoch=sink.epoch)
    assert again.epoch > sink.epoch
    again.send(1, b"y")
    entries = read_all(transport.source(), 2)
    assert [(entry.epoch, entry.seq) for entry in entries] == [(sink.epoch, 5), (again.epoch, 1)]


def test_a_retry_of_what_was_taken_over_and_trimmed_is_success(transport: Any) -> None:
    sink, source = transport.sink("a"), transport.source()
    sink.send(1, b"x")
    read_all(source, 1)
    source.acknowledge(source.cursors())
    assert source.trim(source.cursors(), 0) == 1
    sink.send(1, b"x")
    assert source.read(0.01) == []


def test_a_slot_has_one_writer_at_a_time_and_epochs_only_grow(transport: Any) -> None:
    first = transport.sink("a", after_epoch=10**14)
    with pytest.raises(ClaimHeld, match="slot:a"):
        transport.sink("a")
    first.send(1, b"x")
    first.close()
    first.close()
    second = transport.sink("a")
    assert second.epoch > first.epoch > 10**14
    second.send(1, b"y")
    # Whatever the old one still tries cannot get in front of or between the new one's entries.
    with pytest.raises(TransportError):
        first.send(2, b"late")


def test_oversize_is_refused_before_it_is_sent(transport: Any) -> None:
    sink = transport.sink("a")
    with pytest.raises(FragmentTooLarge):
        sink.send(1, bytes(MAX_FRAGMENT_BYTES + 1))
    sink.send(1, bytes(MAX_FRAGMENT_BYTES))
    assert len(read_all(transport.source(), 1)[0].payload) == MAX_FRAGMENT_BYTES


def test_unread_bytes_follow_the_learners_acknowledged_cursor(transport: Any) -> None:
    sink, source = transport.sink("a"), transport.source()
    for seq in range(1, 5):
        sink.send(seq, bytes(seq * 100))
    assert sink.unread_bytes() == 1000
    entries = read_all(source, 4)
    sink.poll()
    assert sink.unread_bytes() == 1000, "reading is not taking over"
    source.acknowledge({"a": f"{entries[1].epoch}-{entries[1].seq}"})
    sink.poll()
    assert sink.unread_bytes() == 700
    source.acknowledge(source.cursors())
    sink.send(5, bytes(7))
    assert sink.unread_bytes() == 7


def test_without_a_control_record_actors_get_none(transport: Any) -> None:
    sink = transport.sink("a")
    assert transport.control.read() is None
    assert sink.send(1, b"x") is None
    assert sink.poll() is None
    transport.publisher().publish({"w": np.zeros(1)}, 1, 0, {})
    assert sink.poll() is None, "a head alone is no control record"


def test_the_control_record_comes_back_with_every_send(transport: Any) -> None:
    sink = transport.sink("a")
    transport.control.write(window_bytes=1000, config_epoch=3)
    assert sink.send(1, b"x") == Control(head=0, stop=False, window_bytes=1000, config_epoch=3)
    transport.publisher().publish({"w": np.zeros(1)}, 7, 0, {})
    transport.control.request_stop()
    assert sink.poll() == transport.control.read() == Control(head=7, stop=True, window_bytes=1000, config_epoch=3)
    with pytest.raises(TypeError, match="windw"):
        transport.control.write(windw=1)


def test_a_reader_goes_on_after_its_checkpointed_cursors(transport: Any) -> None:
    sink, first = transport.sink("a"), transport.source()
    for seq in range(1, 11):
        sink.send(seq, b"%d" % seq)
    read_all(first, 10)
    resumed = transport.source({"a": f"{sink.epoch}-7"})
    assert [entry.seq for entry in read_all(resumed, 3)] == [8, 9, 10]


def test_what_is_retained_can_be_read_back_up_to_the_cursors(transport: Any) -> None:
    a, b = transport.sink("a"), transport.sink("b")
    for seq in range(1, 6):
        a.send(seq, b"a%d" % seq)
        b.send(seq, b"b%d" % seq)
    source = transport.source({"a": f"{a.epoch}-3", "b": f"{b.epoch}-5", "gone": "5-5"})
    back = list(source.read_back(source.cursors()))
    assert [entry.seq for entry in back if entry.slot == "a"] == [1, 2, 3]
    assert [entry.seq for entry in back if entry.slot == "b"] == [1, 2, 3, 4, 5]
    assert [entry.payload for entry in read_all(source, 2)] == [b"a4", b"a5"]
    assert source.stored_bytes() == 20
    assert source.trim(source.cursors(), 0) == 10


def test_trimming_takes_the_oldest_only_behind_checkpoints_and_only_as_needed(transport: Any) -> None:
    a, b = transport.sink("a"), transport.sink("b")
    for seq in range(1, 11):
        a.send(seq, bytes(100))
        b.send(seq, bytes(100))
    source = transport.source()
    read_all(source, 20)
    assert source.stored_bytes() == 2000
    checkpointed = {"a": f"{a.epoch}-10", "b": f"{b.epoch}-2"}
    assert source.uncheckpointed_bytes(checkpointed) == 800
    assert source.trim({}, 0) == 0, "nothing is checkpointed"
    assert source.trim(checkpointed, 2000) == 0, "within the budget"
    trimmed = source.trim(checkpointed, 0)
    left = read_all(transport.source(), 20 - trimmed)
    assert {entry.seq for entry in left if entry.slot == "b"} >= set(range(3, 11)), "not checkpointed, so kept"
    assert 0 < trimmed <= 12
    assert source.trim(source.cursors(), 550) == 15 - trimmed
    assert source.stored_bytes() == 500
    assert {entry.seq for entry in read_all(transport.source(), 5)} <= set(range(6, 11)), "the newest are left"


def test_only_drained_idle_unclaimed_streams_are_swept(transport: Any) -> None:
    sink, source = transport.sink("a"), transport.source()
    sink.send(1, b"x")
    read_all(source, 1)
    assert source.sweep() == []
    source.trim(source.cursors(), 0)
    assert source.sweep() == [], "its writer still holds the slot"
    sink.close()
    assert source.sweep() == ["a"]
    assert source.cursors() == {}
    again = transport.sink("a")
    again.send(1, b"y")
    assert read_all(source, 1)[0].payload == b"y"


def test_published_weights_arrive_with_content_shape_dtype_and_facts(transport: Any) -> None:
    arrays = {
        "net.0.weight": np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32),
        "norm.count": np.array(7.0),
        "half": np.arange(5, dtype=np.float16),
        "strided": np.arange(10, dtype=np.float32)[::2],
        "steps": np.array([1, 2], np.int64),
    }
    transport.publisher().publish(arrays, 3, 42, {"env_steps": 1000, "tags": ["x"]})
    weights = transport.weights().fetch_newer(2)
    assert (weights.version, weights.updates, weights.metadata) == (3, 42, {"env_steps": 1000, "tags": ["x"]})
    assert set(weights.arrays) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights.arrays[name], array)
        assert weights.arrays[name].dtype == array.dtype
        assert weights.arrays[name].flags.writeable
    assert transport.weights().fetch_newer(3) is None


def test_C19_after_a_publish_the_next_fetch_has_the_new_content_and_not_only_the_new_number(transport: Any) -> None:
    publisher, reader = transport.publisher(), transport.weights()
    version = 0
    for published in (1, 2, 5):
        publisher.publish({"w": np.full(3, published, np.float32)}, published, published, {})
        weights = reader.fetch_newer(version)
        version = weights.version
        assert version == published
        np.testing.assert_array_equal(weights.arrays["w"], np.full(3, published))


def test_versions_only_grow_and_the_newest_and_pinned_are_kept(transport: Any) -> None:
    publisher, reader = transport.publisher(keep=3), transport.weights()
    for version in range(1, 8):
        publisher.publish({"w": np.array([version])}, version, version, {})
        if version == 2:
            publisher.pin(2, "best")
    assert reader.head() == publisher.head() == 7
    assert [v for v in range(1, 8) if _kept(reader, v)] == [2, 5, 6, 7]
    for stale in (7, 6, 0):
        with pytest.raises(TransportError, match="not newer"):
            publisher.publish({"w": np.zeros(1)}, stale, 0, {})
    with pytest.raises(WeightsGone):
        publisher.pin(3, "late")
    publisher.pin(5, "best")
    assert publisher.pins() == {"best": 5}
    publisher.unpin("best")
    publisher.publish({"w": np.zeros(1)}, 8, 8, {})
    assert [v for v in range(1, 9) if _kept(reader, v)] == [6, 7, 8]


def test_publishing_the_same_once_more_is_success_and_anything_else_under_its_number_is_not(transport: Any) -> None:
    """After an unclear failure the learner publishes the same again."""
    publisher = transport.publisher()
    for _ in range(3):
        publisher.publish({"w": np.arange(5.0)}, 4, 40, {"env_steps": 9})
    for arrays, updates in (({"w": np.arange(5.0) + 1}, 40), ({"w": np.arange(5.0)}, 41), ({"v": np.arange(5.0)}, 40)):
        with pytest.raises(TransportError, match="not newer"):
            publisher.publish(arrays, 4, updates, {"env_steps": 9})
    np.testing.assert_array_equal(transport.weights().fetch(4).arrays["w"], np.arange(5.0))


def _kept(reader: WeightsSource, version: int) -> bool:
    try:
        return reader.fetch(version).version == version
    except WeightsGone:
        return False


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_never_published(transport: Any, bad: float) -> None:
    publisher = transport.publisher()
    with pytest.raises(WeightsCorrupt, match=r"actor\.2\.bias"):
        publisher.publish({"ok": np.zeros(3), "actor.2.bias": np.array([0.0, bad, bad])}, 1, 0, {})
    assert publisher.head() == 0
