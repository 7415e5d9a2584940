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
from clawq.transport.registry import Readers
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

    def source(
        self,
        cursors: Mapping[str, str] | None = None,
        reader: str = "learner",
        required: bool = False,
        ordinals: Mapping[str, int] | None = None,
    ) -> StreamReader:
        return StreamReader(self.client, self.keys, reader, cursors, required=required, ordinals=ordinals)

    @property
    def readers(self) -> Readers:
        return Readers(self.client, self.keys)

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


def test_trimming_waits_for_the_checkpoints_of_all_required_readers_and_never_for_optional_ones(transport: Any) -> None:
    sink, learner = transport.sink("a"), transport.source()
    keeper, watcher = transport.source(reader="keeper", required=True), transport.source(reader="watcher")
    for seq in range(1, 11):
        sink.send(seq, bytes(100))
    for source in (learner, keeper, watcher):
        read_all(source, 10)
    cursor = {n: {"a": f"{sink.epoch}-{n}"} for n in range(1, 11)}
    assert learner.trim(cursor[10], 0) == 0, "the keeper has kept nothing"
    assert learner.trimming.holding == ("keeper",)
    keeper.checkpointed(cursor[4])
    assert learner.trim(cursor[10], 0) == 4
    keeper.checkpointed(cursor[9])
    assert learner.trim(cursor[6], 0) == 2
    assert learner.trimming.holding == ("learner",)
    records = {record.name: record for record in transport.readers.list()}
    assert list(records) == ["learner", "keeper", "watcher"]
    assert [record.required for record in records.values()] == [True, True, False]
    assert records["keeper"].kept == cursor[9]
    assert records["keeper"].holder
    keeper.close()
    assert not transport.readers.list()[1].holder, "it is not there, but its claim on the log stands"
    assert learner.trim(cursor[10], 0) == 3
    assert transport.readers.leave("keeper")
    assert learner.trim(cursor[10], 0) == 1
    assert [record.name for record in transport.readers.list()] == ["learner", "watcher"]
    with pytest.raises(TransportError, match="own learner"):
        transport.readers.leave("learner")


def test_an_optional_reader_is_told_exactly_what_was_trimmed_before_it_came(transport: Any) -> None:
    a, learner = transport.sink("a"), transport.source()
    late = transport.source(reader="late")
    a.send(1, b"x")
    assert read_all(late, 1)[0].ordinal == 1
    b = transport.sink("b")
    b.send(1, b"x")
    read_all(learner, 2)
    for seq in (2, 3, 6, 7):  # 4 and 5 were dropped by the outbox: they never were in the stream
        a.send(seq, b"x")
    a.close()
    again = transport.sink("a")
    again.send(1, b"x")
    again.send(2, b"x")
    read_all(learner, 6)
    learner.trim({"a": f"{again.epoch}-1", "b": f"{b.epoch}-1"}, 1)
    got = read_all(late, 3)
    assert {(entry.slot, entry.missed) for entry in got} == {("a", 5), ("b", 1), ("a", 0)}
    assert [(entry.epoch, entry.seq) for entry in got if not entry.missed] == [(again.epoch, 2)]
    assert late.ordinals() == {"a": 7, "b": 1}
    resumed = transport.source({"a": f"{a.epoch}-1"}, reader="late", ordinals={"a": 1})
    late.close()
    again.send(3, b"x")
    told = [(entry.slot, entry.missed) for entry in read_all(resumed, 4)]
    assert sorted(told) == [("a", 0), ("a", 0), ("a", 5), ("b", 1)], "the same after a restart, from its checkpoint"


def test_a_reader_that_begins_late_has_missed_nothing(transport: Any) -> None:
    sink, learner = transport.sink("a"), transport.source()
    for seq in range(1, 6):
        sink.send(seq, b"x")
    read_all(learner, 5)
    assert learner.trim(learner.cursors(), 2) == 3
    begun = read_all(transport.source(reader="new"), 2)
    assert [(entry.seq, entry.missed, entry.ordinal) for entry in begun] == [(4, 0, 4), (5, 0, 5)]


def test_what_a_slot_ever_had_is_counted_on_when_its_stream_was_swept(transport: Any) -> None:
    sink, learner, late = transport.sink("a"), transport.source(), transport.source(reader="late")
    late.read(0.0)
    for seq in range(1, 4):
        sink.send(seq, b"x")
    sink.close()
    read_all(learner, 3)
    learner.trim(learner.cursors(), 0)
    assert learner.sweep() == ["a"]
    again = transport.sink("a")
    again.send(1, b"x")
    assert [(entry.ordinal, entry.missed) for entry in read_all(learner, 1)] == [(4, 0)]
    assert [(entry.ordinal, entry.missed) for entry in read_all(late, 2)] == [(3, 3), (4, 0)]


def test_two_readers_cannot_have_one_name_at_a_time(transport: Any) -> None:
    first, second = transport.source(reader="twin"), transport.source(reader="twin")
    first.read(0.0)
    with pytest.raises(ClaimHeld, match="reader:twin"):
        second.read(0.0)
    first.close()
    assert second.read(0.0) == []


def test_actors_wait_for_the_slowest_required_reader(transport: Any) -> None:
    transport.control.write(window_bytes=1000, config_epoch=1)
    sink, learner = transport.sink("a"), transport.source()
    keeper, watcher = transport.source(reader="keeper", required=True), transport.source(reader="watcher")
    for source in (keeper, watcher):
        source.read(0.0)
    assert sink.poll().required == ("keeper", "learner")
    for seq in range(1, 4):
        sink.send(seq, bytes(100))
    read_all(learner, 3)
    learner.acknowledge(learner.cursors())
    sink.poll()
    assert sink.unread_bytes() == 300, "the keeper has taken nothing over"
    read_all(keeper, 3)
    keeper.acknowledge({"a": f"{sink.epoch}-2"})
    sink.poll()
    assert sink.unread_bytes() == 100
    transport.readers.leave("keeper")
    sink.poll()
    sink.poll()
    assert sink.unread_bytes() == 0, "a dropped reader is not waited for"


def test_the_budget_holds_while_trimming_waits_because_taking_over_is_told_only_where_there_is_room(
    transport: Any,
) -> None:
    """Nobody checkpoints; an actor that fills its window and waits for its turn never gets past the budget."""
    sink, learner = transport.sink("a"), transport.source()
    budget, window, sent = 10_000, 1_000, 0
    for _ in range(100):
        learner.trim({}, budget, window)
        while sink.unread_bytes() < window:
            sent += 1
            sink.send(sent, bytes(100))
            assert learner.stored_bytes() <= budget
        learner.read(0.01)
        learner.acknowledge(learner.cursors())
        sink.poll()
        if sink.unread_bytes() >= window:
            break
    assert 7_000 <= 100 * sent <= budget
    assert learner.trim({}, budget, window) == 0
    assert learner.trimming.holding == ("learner",)
    assert learner.trim(learner.cursors(), budget, window) > 0
    sink.poll()
    assert sink.unread_bytes() < window, "a checkpoint makes room"


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


def test_a_version_can_be_pinned_as_it_is_published(transport: Any) -> None:
    publisher, reader = transport.publisher(keep=3), transport.weights()
    for version in range(1, 8):
        publisher.publish({"w": np.array([version])}, version, version, {}, "wanted" if version in (1, 3) else None)
    assert publisher.pins() == {"wanted": 3}
    assert [v for v in range(1, 8) if _kept(reader, v)] == [3, 5, 6, 7]


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
