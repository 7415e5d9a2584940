import json

import numpy as np
import pytest
import redis

from clawq.errors import TransportError
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.control import (
    Board,
    ControlRecord,
    Events,
    Heartbeat,
    Heartbeats,
    PaceRecord,
    RunRecord,
    RunRegistry,
    delete_run,
    end_run,
)
from clawq.transport.keys import RUNS_KEY, RunKeys, new_tag
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsPublisher


def test_runs_are_listed_oldest_first_and_forgotten(own_servers: EmbeddedRedis) -> None:
    client = connect(own_servers.broker_url)
    registry = RunRegistry(client)
    late = RunRecord("b", new_tag(), {"name": "b"}, {"obs": {}}, "running", 2000, {"host": "h", "pid": 3})
    early = RunRecord("z", new_tag(), created_ms=1000)
    registry.add(late)
    registry.add(early)
    assert registry.list() == [early, late]
    assert registry.get("b") == late
    assert registry.get("none") is None
    registry.add(RunRecord("b", late.tag, state="done", created_ms=2000))
    found = registry.get("b")
    assert found is not None
    assert found.state == "done"
    assert found.keys == RunKeys(late.tag)
    registry.remove("b")
    registry.remove("b")
    assert registry.list() == [early]
    client.close()


def test_of_a_run_that_has_ended_nothing_stays_that_does_not_run_out_by_itself(
    data_client: redis.Redis, run_keys: RunKeys
) -> None:
    claim = Claim.take(data_client, run_keys.claim("learner"), "test", 60.0)
    ControlRecord(data_client, run_keys).write(stop=False, window_bytes=1, config_epoch=1)
    WeightsPublisher(data_client, run_keys, claim).publish({"w": np.zeros(3, np.float32)}, 1, 0)
    Board(data_client, run_keys).write({"updates": 1.0})
    Events(data_client, run_keys).append("tuned", by="test")
    writer = StreamWriter.open(data_client, run_keys, "slot-1", "test", 60.0)
    writer.send(1, b"x")
    writer.close()
    StreamReader(data_client, run_keys, "copy", required=True).close()
    assert any(data_client.ttl(key) == -1 for key in data_client.scan_iter(f"{run_keys.prefix}*"))
    end_run(data_client, run_keys, claim)
    left = list(data_client.scan_iter(f"{run_keys.prefix}*"))
    # Its learner's claim, and the word that it is over
    assert set(left) == {run_keys.claim("learner").encode(), run_keys.control.encode()}
    assert all(data_client.ttl(key) > 0 for key in left)


def test_a_run_record_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    record = RunRecord("a", new_tag(), created_ms=5)
    assert RunRecord.from_json({**record.to_json(), "new_field": 1}) == record


def test_one_garbled_run_does_not_hide_the_others(broker_client: redis.Redis) -> None:
    registry = RunRegistry(broker_client)
    record = RunRecord("good", new_tag())
    registry.add(record)
    broker_client.hset(RUNS_KEY, mapping={"bad1": b"\xff", "bad2": "[]", "bad3": "{}"})
    assert record in registry.list()
    assert registry.get("bad1") is registry.get("bad2") is registry.get("bad3") is None
    for run_id in ("good", "bad1", "bad2", "bad3"):
        registry.remove(run_id)


def test_events_come_in_order_from_any_point_and_are_bounded(data_client: redis.Redis, run_keys: RunKeys) -> None:
    events = Events(data_client, run_keys)
    assert events.read() == []
    first = events.append("lease_done", slot="a", env_steps=12, reward=-1.5)
    events.append("evaluated", success=None)
    read = events.read()
    assert [(event.kind, event.facts) for event in read] == [
        ("lease_done", {"slot": "a", "env_steps": 12, "reward": -1.5}),
        ("evaluated", {"success": None}),
    ]
    assert [event.kind for event in events.read(first, timeout_s=0.1)] == ["evaluated"]
    assert events.read(read[-1].id, timeout_s=0.05) == []
    pipe = data_client.pipeline(transaction=False)
    for _ in range(12_000):
        pipe.xadd(run_keys.events, {"kind": "x", "facts": "{}"})
    pipe.execute()
    events.append("last")
    assert data_client.xlen(run_keys.events) < 10_200


def test_garbled_events_are_skipped(data_client: redis.Redis, run_keys: RunKeys) -> None:
    events = Events(data_client, run_keys)
    data_client.xadd(run_keys.events, {"nonsense": "1"})
    data_client.xadd(run_keys.events, {"kind": "x", "facts": '{"a":' * 100_000})
    events.append("good")
    assert [event.kind for event in events.read()] == ["good"]


def test_the_board_keeps_what_is_not_written_again(data_client: redis.Redis, run_keys: RunKeys) -> None:
    board = Board(data_client, run_keys)
    assert board.read() == {}
    board.write({"env_steps": 10, "stage": "filling"})
    board.write({"stage": "training", "loss": 0.25})
    board.write({})
    assert board.read() == {"env_steps": 10, "stage": "training", "loss": 0.25}


def test_silent_workers_are_forgotten_by_the_servers_clock(data_client: redis.Redis, run_keys: RunKeys) -> None:
    beats = Heartbeats(data_client, run_keys, ttl_s=30.0)
    beats.beat(Heartbeat("w1", slots=2, busy=1, host="h", pid=7, time_ms=1))
    beats.beat(Heartbeat("w2", slots=1, busy=0, host="h", pid=8))
    read = beats.read()
    assert {name: (beat.slots, beat.busy) for name, beat in read.items()} == {"w1": (2, 1), "w2": (1, 0)}
    assert read["w1"].time_ms > 1_600_000_000_000, "the sender's clock does not count"
    beats.leave("w2")
    assert set(beats.read()) == {"w1"}
    # A reader with another patience: everything is older than 0 s one call later.
    impatient = Heartbeats(data_client, run_keys, ttl_s=-1.0)
    assert impatient.read() == {}
    assert data_client.hlen(run_keys.heartbeats) == 1, "who only looks changes nothing"
    assert impatient.prune() == {}
    assert data_client.hlen(run_keys.heartbeats) == 0
    beats.beat(Heartbeat("w1", 1, 0, "h", 7))
    assert 0 < int(data_client.pttl(run_keys.heartbeats)) <= 300_000


def test_garbled_heartbeats_are_not_workers(data_client: redis.Redis, run_keys: RunKeys) -> None:
    beats = Heartbeats(data_client, run_keys)
    data_client.hset(run_keys.heartbeats, mapping={"bad": "{", "worse": "{}", "deep": "[" * 100_000})
    beat = {"worker": "w", "slots": 1, "busy": 0, "host": "h", "pid": 7, "time_ms": 2**50}
    others: tuple[dict[str, object], ...] = (
        {"slots": "1"},
        {"time_ms": "now"},
        {"busy": -1},
        {"slots": 10**400},
        {"worker": 1},
    )
    for number, junk in enumerate(others):
        data_client.hset(run_keys.heartbeats, f"junk-{number}", json.dumps({**beat, **junk}))
    beats.beat(Heartbeat("w", 1, 0, "h", 7))
    assert set(beats.read()) == {"w"}


def test_deleting_a_run_leaves_nothing_of_it_and_touches_no_other(data_client: redis.Redis, run_keys: RunKeys) -> None:
    other = RunKeys(new_tag())
    for keys in (run_keys, other):
        Board(data_client, keys).write({"a": 1})
        Events(data_client, keys).append("x")
        for slot in range(600):
            data_client.xadd(keys.stream(f"s{slot}"), {"f": b"x"})
    assert delete_run(data_client, run_keys) == 602
    assert list(data_client.scan_iter(match=run_keys.prefix + "*")) == []
    assert delete_run(data_client, other) == 602


@pytest.mark.parametrize("bad", [{"head": b"x"}, {"window_bytes": b""}])
def test_a_garbled_control_record_is_told_apart(
    data_client: redis.Redis, run_keys: RunKeys, bad: dict[str, bytes]
) -> None:
    record = ControlRecord(data_client, run_keys)
    record.write(window_bytes=1, config_epoch=1)
    data_client.hset(run_keys.control, mapping=bad)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="control record"):
        record.read()


def test_a_pace_that_another_session_decided_counts_for_nothing(data_client: redis.Redis, run_keys: RunKeys) -> None:
    ours, theirs = PaceRecord(data_client, run_keys, 7), PaceRecord(data_client, run_keys, 8)
    assert ours.read() is None
    theirs.write(1000)
    assert (ours.read(), theirs.read()) == (None, 1000)
    ours.write(2000)
    assert (ours.read(), theirs.read()) == (2000, None)
    data_client.hset(run_keys.pace, "window_bytes", "nonsense")
    assert ours.read() is None
