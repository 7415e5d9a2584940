import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.core import Entry
from clawq.errors import StoreUnavailable
from clawq.testing.experience import TrueSlot
from clawq.transport.client import connect
from clawq.transport.codec import MAX_FRAGMENT_BYTES, encode
from clawq.transport.control import delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers, presence
from clawq.transport.rotation import next_subset
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import ORDINAL_FIELD, StreamWriter


@given(st.integers(1, 300), st.integers(1, MAX_FRAGMENT_BYTES), st.integers(0, 10**6))
@settings(deadline=None)
def test_a_reply_stays_under_16_megabytes_and_the_rotation_covers_every_stream(
    count_slots: int, largest: int, turn: int
) -> None:
    slots = [f"s{n}" for n in range(count_slots)]
    seen: set[str] = set()
    for _ in range(count_slots):
        subset, count = next_subset(slots, turn, largest)
        assert 1 <= len(subset) <= count_slots
        assert len(set(subset)) == len(subset)
        assert len(subset) * count * largest <= 16_000_000
        turn += len(subset)
        seen |= set(subset)
    assert seen == set(slots)


def test_forty_streams_of_large_entries_are_read_whole_and_fairly(data_client: Any, run_keys: RunKeys) -> None:
    sent = {}
    for number in range(40):
        writer = StreamWriter.open(data_client, run_keys, f"s{number}", "w")
        for seq in range(1, 4):
            writer.send(seq, bytes([number, seq]) * 500_000)
            sent[f"s{number}", writer.epoch, seq] = bytes([number, seq])
    reader = StreamReader(data_client, run_keys)
    assert reader.unread_entries() == {}
    got: dict[tuple[str, int, int], bytes] = {}
    while len(got) < 120:
        entries = reader.read(2.0)
        assert entries
        assert sum(len(entry.payload) for entry in entries) <= 16_000_000
        for entry in entries:
            assert (entry.slot, entry.epoch, entry.seq) not in got
            got[entry.slot, entry.epoch, entry.seq] = entry.payload[:2]
    assert got == sent
    assert set(reader.unread_entries().values()) == {0}
    assert reader.stored_bytes() == 120_000_000


def test_unread_entries_and_stored_bytes_follow_writers_and_trimming(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    now = [0.0]
    reader = StreamReader(data_client, run_keys, clock=lambda: now[0])
    for seq in range(1, 6):
        writer.send(seq, bytes(1000))
    got: list[Entry] = []
    while len(got) < 5:
        got += reader.read(0.0)
    for seq in range(6, 9):
        writer.send(seq, bytes(1000))
    now[0] += 1.0
    data_client.xtrim(run_keys.stream("a"), maxlen=3, approximate=False)
    reader.trim({"a": f"{writer.epoch}-5"}, 0)
    reader._discover_if_due()
    assert reader.unread_entries() == {"a": 3}


def test_what_failed_to_be_trimmed_is_trimmed_with_the_next_call(own_servers: EmbeddedRedis, run_keys: RunKeys) -> None:
    client = connect(own_servers.data_url)
    broken = connect(own_servers.data_url)
    writer = StreamWriter.open(client, run_keys, "a", "w")
    for seq in range(1, 4):
        writer.send(seq, bytes(100))
    reader = StreamReader(broken, run_keys)
    while len(reader.cursors()) < 1 or reader.cursors()["a"] != f"{writer.epoch}-3":
        reader.read(1.0)
    path = broken.connection_pool.connection_kwargs["path"]
    for connection in (broken.connection_pool.connection_kwargs,):
        connection["path"] = path + "-gone"
    broken.connection_pool.disconnect()
    broken.connection_pool.reset()
    with pytest.raises(StoreUnavailable):
        reader.trim(reader.cursors(), 0)
    broken.connection_pool.connection_kwargs["path"] = path
    broken.connection_pool.reset()
    assert reader.trim(reader.cursors(), 0) == 3
    assert reader.trim(reader.cursors(), 0) == 0
    client.close()
    broken.close()


def test_reading_back_merges_slots_by_the_time_of_their_fragments(data_client: Any, run_keys: RunKeys) -> None:
    """Ids begin with the start of their slot's epoch: by ids, all of slot `a` would come before all of slot `b`."""
    rng, ids = np.random.default_rng(0), itertools.count()
    made = {slot: TrueSlot(slot, 1, rng, ids) for slot in ("a", "b")}
    writers = {slot: StreamWriter.open(data_client, run_keys, slot, "w") for slot in made}
    for seq in range(1, 11):
        for offset, (slot, actor) in enumerate(made.items()):
            fragment, _ = actor.fragment(2)
            meta = replace(fragment.meta, created_ms=1000 * seq + offset)
            writers[slot].send(seq, encode(replace(fragment, meta=meta)))
    cursors = {"a": f"{writers['a'].epoch}-10", "b": f"{writers['b'].epoch}-9"}
    back = list(StreamReader(data_client, run_keys, cursors=cursors).read_back(cursors))
    expected = [(slot, seq) for seq in range(1, 11) for slot in "ab" if (slot, seq) != ("b", 10)]
    assert [(entry.slot, entry.seq) for entry in back] == expected


def test_a_late_registration_of_an_older_incarnation_does_not_make_the_reader_begin_anew(
    data_client: Any, run_keys: RunKeys
) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    writer.send(1, b"x")
    reader = StreamReader(data_client, run_keys)
    assert reader.read(2.0)
    data_client.hset(run_keys.slots, "a", '{"worker": "old", "epoch": 1}')
    assert reader.read(0.7) == [], "a second discovery happened, and nothing is read twice"


def test_a_reader_of_another_name_keeps_its_own_cursors_and_does_not_pace_actors(
    data_client: Any, run_keys: RunKeys
) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    writer.send(1, b"x")
    recorder = StreamReader(data_client, run_keys, reader="recorder")
    assert recorder.read(2.0)
    recorder.acknowledge(recorder.cursors())
    recorder.acknowledge({})
    writer.poll()
    assert writer.unread_bytes() == 1
    assert data_client.hget(run_keys.cursors("recorder"), "a").decode() == f"{writer.epoch}-1"


def test_a_stream_is_not_swept_while_it_holds_entries_even_unclaimed(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    reader = StreamReader(data_client, run_keys)
    writer.send(1, b"x")
    writer.close()
    assert reader.read(2.0)
    assert reader.sweep() == []
    reader.acknowledge(reader.cursors())
    reader.trim(reader.cursors(), 0)
    assert reader.sweep() == ["a"]
    assert not data_client.exists(run_keys.stream("a"), run_keys.slots, run_keys.cursors())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_redis_that_lost_the_end_of_a_stream_is_noticed_and_new_entries_are_read(
    own_servers: EmbeddedRedis,
    restart_data: Callable[[EmbeddedRedis], None],
    run_keys: RunKeys,
    resumed: bool,
) -> None:
    client: Any = connect(own_servers.data_url)
    kept = StreamWriter.open(client, run_keys, "a", "w")
    for seq in range(1, 4):
        kept.send(seq, b"kept")
    client.save()
    reader = StreamReader(client, run_keys)
    lost = kept.epoch + 1_000_000
    for seq in range(1, 6):
        client.xadd(run_keys.stream("a"), {"f": b"lost"}, id=f"{lost}-{seq}")
    while reader.cursors().get("a") != f"{lost}-5":
        reader.read(1.0)
    cursors = reader.cursors()
    # When the server comes back as it was at its last save, with a clock that is behind: a new epoch is below the old
    restart_data(own_servers)
    client.xadd(run_keys.stream("a"), {"f": b"new"}, id=f"{kept.epoch + 500}-1")
    if resumed:
        reader = StreamReader(client, run_keys, cursors=cursors)
    got: list[Entry] = []
    deadline = time.monotonic() + 20
    while [entry.payload for entry in got] != [b"kept"] * 3 + [b"new"]:
        assert time.monotonic() < deadline, got
        try:
            got += reader.read(0.5)
        except StoreUnavailable:
            continue
    assert reader.take_shortened() == {"a": (f"{lost}-5", f"{kept.epoch + 500}-1")}
    assert reader.take_shortened() == {}
    client.close()


def test_garbage_of_others_does_not_end_a_reader(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "s", "w")
    writer.send(1, b"one")
    reader = StreamReader(data_client, run_keys)
    for number, text in enumerate(('{"epoch":1e999}', "[" * 100_000, "[]", '{"epoch":null}')):
        data_client.hset(run_keys.slots, f"bad-{number}", text)
    data_client.hset(run_keys.readers, mapping={"bad": '{"required":1,"since_ms":1e999}', "deep": "[" * 100_000})
    data_client.xadd(run_keys.stream("s"), {"p": b"two", ORDINAL_FIELD: b"9" * 5000}, id=f"{writer.epoch}-2")
    entries = [entry for _ in range(3) for entry in reader.read(0.2)]
    assert [(entry.seq, entry.ordinal, entry.missed) for entry in entries] == [(1, 1, 0), (2, 0, 0)]
    # The slot's next writer begins to count all the same.
    writer.close()
    assert StreamWriter.open(data_client, run_keys, "s", "w").epoch > writer.epoch
    assert [record.name for record in Readers(data_client, run_keys).list()] == ["learner"]


def test_a_slot_that_comes_back_while_it_is_swept_is_not_read_twice(
    data_client: Any, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StreamWriter.open(data_client, run_keys, "s", "w")
    writer.send(1, b"one")
    reader = StreamReader(data_client, run_keys)
    assert [entry.seq for entry in reader.read(1.0)] == [1]
    reader.checkpointed(reader.cursors())
    assert reader.trim(reader.cursors(), 0) == 1
    writer.close()
    sweep = reader.trimming.sweep

    def sweep_slowly(slot: str) -> bool:
        swept = sweep(slot)
        again = StreamWriter.open(data_client, run_keys, "s", "w")
        again.send(1, b"two")
        # The reading thread is waiting for that stream.
        assert [bytes(entry.payload) for entry in reader.read(1.0)] == [b"two"]
        return swept

    monkeypatch.setattr(reader.trimming, "sweep", sweep_slowly)
    assert reader.sweep() == ["s"]
    assert [entry for _ in range(8) for entry in reader.read(0.1)] == []


def test_a_reader_that_left_does_not_come_back_while_other_threads_still_show_it(
    data_client: Any, run_keys: RunKeys
) -> None:
    StreamWriter.open(data_client, run_keys, "a", "w").send(1, b"x")
    reader = StreamReader(data_client, run_keys, reader="other", required=True)
    assert len(reader.read(1.0)) == 1
    assert data_client.exists(presence(run_keys, "other"))
    ended = threading.Event()
    threads = [threading.Thread(target=lambda: beat_until(reader, ended)) for _ in range(2)]
    for thread in threads:
        thread.start()
    reader.leave()
    time.sleep(0.2)
    ended.set()
    for thread in threads:
        thread.join()
    assert not data_client.exists(presence(run_keys, "other"))
    assert "other" not in {record.name for record in Readers(data_client, run_keys).list()}


def beat_until(reader: StreamReader, ended: threading.Event) -> None:
    while not ended.is_set():
        reader.beat()


def test_what_a_checkpoint_names_no_more_is_taken_back(data_client: Any, run_keys: RunKeys) -> None:
    reader = StreamReader(data_client, run_keys, reader="other", required=True)
    reader.read(0.0)
    reader.checkpointed({"gone": "1-1", "stays": "1-1"})
    reader.checkpointed({"stays": "1-2"})
    assert data_client.hgetall(run_keys.kept("other")) == {b"stays": b"1-2"}


@pytest.mark.parametrize("name", ["learner", "optional"])
def test_what_a_writer_sent_before_it_noticed_an_empty_server_is_of_the_stream_that_is_there(
    data_client: Any, run_keys: RunKeys, name: str
) -> None:
    old = StreamWriter.open(data_client, run_keys, "a", "w")
    old.send(1, b"x")
    delete_run(data_client, run_keys)
    old.send(2, b"x")
    new = StreamWriter.open(data_client, run_keys, "a", "w")
    new.send(1, b"x")
    entries = StreamReader(data_client, run_keys, name).read(1.0)
    assert [(one.epoch, one.seq) for one in entries if not one.missed] == [(old.epoch, 2), (new.epoch, 1)]
    assert {one.stream.born for one in entries} == {new.epoch}
