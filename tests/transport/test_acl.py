"""Who may do what: the table, as Redis itself judges it."""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import redis
from guarded import Guarded

from clawq.control.celery_settings import give_back, make_app
from clawq.errors import StoreUnfit, UserError
from clawq.procfs import Identity
from clawq.registry import Record, Registry
from clawq.transport import keys as keys_module
from clawq.transport.acl import acl_files, check_workers, make_passwords, read_passwords
from clawq.transport.books import Books, Position
from clawq.transport.claims import Claim
from clawq.transport.client import translated
from clawq.transport.commands import Commands, pack_arguments
from clawq.transport.control import (
    Board,
    ControlRecord,
    Events,
    Heartbeat,
    Heartbeats,
    Orders,
    PaceRecord,
    RunRecord,
    RunRegistry,
    end_run,
)
from clawq.transport.dead_letters import DeadLetters
from clawq.transport.keys import DEAD_COMMANDS_KEY, RUNS_KEY, RunKeys, attempts_key, new_tag
from clawq.transport.readers import StreamReader
from clawq.transport.restarts import bear
from clawq.transport.rights import broker_keys, broker_rights, data_keys, data_rights
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsPublisher, WeightsReader
from clawq.watchdog.access import own_url
from clawq.watchdog.fence import Fence
from clawq.watchdog.policy import Policy
from clawq.watchdog.sight import Sight

ROOT = Path(__file__).parents[2]
K = RunKeys("ab" * 16)
MINE, OTHERS = K.stream("arm-1-w7-0"), K.stream("arm-2-w7-0")
C = "clawq:c:"
#: (user, server, may, command): what each user may and may not do.
TABLE: list[tuple[str, str, bool, tuple[str, ...]]] = [
    *[
        ("arm-1", "data", True, words)
        for words in (
            ("XADD", MINE, "1-1", "f", "x"),
            ("HMGET", K.control, "head"),
            ("HMGET", K.weights(3), "meta"),
            ("HGET", K.cursors(), "arm-1-w7-0"),
            ("SET", K.claim("slot:arm-1-w7-0"), "x"),
            ("HSET", K.slots, "arm-1-w7-0", "{}"),
            ("HSET", K.heartbeats, "arm-1-w7", "{}"),
            ("XADD", K.events, "*", "kind", "lease"),
            ("XREVRANGE", K.events, "+", "-"),
            ("HINCRBY", K.reaped, "hung", "1"),
            ("TIME",),
        )
    ],
    *[
        ("arm-1", "data", False, words)
        for words in (
            ("HSET", K.weights(3), "meta", "x"),
            ("RENAME", K.staging("t"), K.weights(3)),
            ("HSET", K.staging("t"), "meta", "x"),
            ("HSET", K.control, "stop", "1"),
            ("DEL", K.control),
            ("UNLINK", K.events),
            ("DEL", K.events),
            ("XTRIM", MINE, "MAXLEN", "0"),
            ("XADD", OTHERS, "1-1", "f", "x"),
            ("XADD", K.stream("arm-10-w7-0"), "1-1", "f", "x"),
            ("XADD", K.stream("seat-0"), "1-1", "f", "x"),
            ("XREAD", "STREAMS", OTHERS, "0"),
            ("XRANGE", OTHERS, "-", "+"),
            ("XADD", K.orders, "*", "kind", "stop_wanted"),
            ("SET", K.claim("learner"), "x"),
            ("DEL", K.claim("learner")),
            ("SET", K.claim("slot:arm-2-w7-0"), "x"),
            ("HDEL", K.slots, "arm-2-w7-0"),
            ("HSET", K.pins, "best", "1"),
            ("HSET", K.cursors(), "arm-1-w7-0", "9-9"),
            ("HSET", K.readers, "evil", "{}"),
            ("HSET", K.pace, "window_bytes", "1"),
            ("HSET", K.metrics, "loss", "0"),
            ("SCAN", "0"),
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("CONFIG", "SET", "dir", "/tmp"),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
            ("CLIENT", "KILL", "TYPE", "normal"),
            ("CLIENT", "LIST"),
            ("DEBUG", "SLEEP", "1"),
            ("SHUTDOWN",),
            ("REPLICAOF", "h", "1"),
            ("MODULE", "LOAD", "/tmp/x.so"),
            ("EVAL", "return 1", "0"),
            ("SCRIPT", "LOAD", "return 1"),
            ("MONITOR",),
            ("SAVE",),
            ("PUBLISH", "c", "m"),
        )
    ],
    *[
        ("arm-1", "broker", False, words)
        for words in (
            ("HSET", RUNS_KEY, "evil", "{}"),
            ("HDEL", RUNS_KEY, "run"),
            ("SET", "anything", "x"),
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("CONFIG", "SET", "dir", "/tmp"),
            ("EVAL", "return 1", "0"),
            ("ACL", "SETUSER", "arm-1", "+@all"),
        )
    ],
    ("arm-1", "broker", True, ("BRPOP", f"{C}clawq.run-1", f"{C}clawq.run-1\x06\x163", "1")),
    ("arm-1", "broker", True, ("HGET", RUNS_KEY, "run")),
    ("arm-1", "broker", True, ("INCRBY", attempts_key("c"), "1")),
    ("arm-1", "broker", True, ("EXPIRE", attempts_key("c"), "60")),
    ("arm-1", "broker", True, ("UNLINK", attempts_key("c"))),
    ("arm-1", "broker", True, ("XADD", DEAD_COMMANDS_KEY, "*", "reason", "garbage")),
    ("arm-1", "broker", False, ("UNLINK", DEAD_COMMANDS_KEY)),
    ("arm-1", "broker", False, ("INCRBY", "anything", "1")),
    ("viewer", "broker", True, ("XREVRANGE", DEAD_COMMANDS_KEY, "+", "-")),
    ("viewer", "broker", False, ("UNLINK", attempts_key("c"))),
    ("learner", "broker", True, ("LPUSH", f"{C}clawq.run-1", "x")),
    ("learner", "broker", False, ("BRPOP", f"{C}clawq.run-1", "1")),
    ("learner", "broker", True, ("HSET", RUNS_KEY, "run", "{}")),
    ("learner", "broker", True, ("XDEL", DEAD_COMMANDS_KEY, "1-1")),
    ("learner", "broker", True, ("UNLINK", attempts_key("c"))),
    ("learner", "broker", False, ("GET", attempts_key("c"))),
    ("arm-1", "broker", False, ("XDEL", DEAD_COMMANDS_KEY, "1-1")),
    ("viewer", "broker", False, ("XDEL", DEAD_COMMANDS_KEY, "1-1")),
    ("learner", "data", True, ("HSET", K.control, "stop", "1")),
    ("learner", "data", True, ("XADD", K.orders, "*", "kind", "stop_wanted")),
    ("learner", "data", False, ("SET", "of-somebody-else", "x")),
    ("learner", "data", False, ("FLUSHALL",)),
    ("learner", "data", False, ("CONFIG", "SET", "dir", "/tmp")),
    ("learner", "data", False, ("KEYS", "*")),
    ("watchdog", "data", True, ("HDEL", K.heartbeats, "w")),
    ("watchdog", "data", True, ("XADD", K.events, "*", "kind", "x")),
    ("watchdog", "data", True, ("SET", K.claim("slot:arm-1-w7-0"), "x", "PX", "1000")),
    ("watchdog", "data", True, ("HINCRBY", K.reaped, "hung", "1")),
    ("watchdog", "data", False, ("HSET", K.metrics, "loss", "0")),
    ("watchdog", "data", False, ("DEL", K.metrics)),
    ("watchdog", "data", False, ("HSET", K.control, "stop", "1")),
    ("watchdog", "data", False, ("XADD", MINE, "1-1", "f", "x")),
    ("viewer", "data", True, ("HGETALL", K.metrics)),
    ("viewer", "data", True, ("XREVRANGE", K.events, "+", "-")),
    ("viewer", "broker", True, ("HVALS", RUNS_KEY)),
    ("viewer", "broker", False, ("LPUSH", f"{C}clawq.run-1", "x")),
    *[
        ("viewer", "data", False, words)
        for words in (
            ("XADD", K.events, "*", "kind", "x"),
            ("XADD", K.orders, "*", "kind", "stop_wanted"),
            ("HDEL", K.heartbeats, "w"),
            ("HSET", K.control, "stop", "1"),
            ("DEL", K.control),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
        )
    ],
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path_factory.mktemp("acl"), "arm-1", "arm-2")
    yield guarded
    guarded.close()


def surprises(guarded: Guarded) -> list[str]:
    """Lines of the table that the servers judge otherwise."""
    wrong = []
    for user, server, may, words in TABLE:
        answer = guarded.admin[server].execute_command("ACL", "DRYRUN", user, *words)
        if (answer in (b"OK", "OK", True)) is not may:
            wrong.append(f"{user} on {server}: {' '.join(words)}")
    return wrong


def test_each_user_may_do_what_it_must_and_nothing_else(guarded: Guarded) -> None:
    assert surprises(guarded) == []


def test_on_a_server_that_is_both_a_worker_gets_celerys_scripts_and_nothing_else(tmp_path: Path) -> None:
    with closing(Guarded(tmp_path, "arm-1", "arm-2", both=True)) as guarded:
        assert surprises(guarded) == ["arm-1 on data: SCRIPT LOAD return 1"]
        # A script has the rights of whoever runs it.
        loaded = guarded.admin["data"].script_load("return redis.call('HSET', KEYS[1], 'stop', '1')")
        with closing(guarded.client("arm-1")) as worker, pytest.raises(redis.ResponseError, match="ermission"):
            worker.evalsha(loaded, 1, K.control)


def test_nobody_comes_in_without_a_name(guarded: Guarded) -> None:
    for url in (guarded.servers.broker_url, guarded.servers.data_url):
        client = redis.Redis.from_url(f"redis://{url.rpartition('@')[2]}", retry=None)
        with pytest.raises(redis.AuthenticationError):
            client.ping()
        client.close()


def test_a_workers_rights_are_enough_for_its_slots_and_for_nothing_of_others(guarded: Guarded) -> None:
    keys, worker, learner = RunKeys(new_tag()), guarded.client("arm-1"), guarded.client("learner")
    claim = Claim.take(learner, keys.claim("learner"), "test", 60)
    ControlRecord(learner, keys, claim).write(stop=False, window_bytes=1_000_000, config_epoch=1)
    guarded.admin["data"].acl_log_reset()
    writer = StreamWriter.open(worker, keys, "arm-1-w1-0", "test")
    assert writer.send(1, b"fragment") is not None
    Events(worker, keys).append("lease")
    # The order that it puts among the events is none.
    Events(worker, keys).append("stop_wanted")
    assert [event.kind for event in Events(learner, keys).read()] == ["lease"]
    assert Orders(learner, keys).read() == []
    writer.close()
    assert guarded.refusals() == []
    theirs = Claim(worker, keys.claim("learner"), "thief", 60)
    for attempt in (
        lambda: StreamWriter.open(worker, keys, "arm-2-w1-0", "test"),
        lambda: ControlRecord(worker, keys).request_stop(),
        lambda: WeightsPublisher(worker, keys, theirs).publish({}, 2, 0),
        lambda: Orders(worker, keys).append("stop_wanted"),
        lambda: Claim.take(worker, keys.claim("learner"), "thief", 60),
    ):
        with pytest.raises(StoreUnfit, match=r"refuses us.*rights \(ACL\)"):
            attempt()
    for words in (("FLUSHALL",), ("CONFIG", "SET", "maxmemory", "1"), ("SHUTDOWN", "NOSAVE"), ("DEL", keys.control)):
        with pytest.raises(StoreUnfit), translated(worker):
            worker.execute_command(*words)
    assert learner.hget(keys.control, "stop") == b"0"
    for client in (worker, learner):
        client.close()


def test_a_workers_rights_are_enough_for_the_watchdog_that_ends_its_actor(guarded: Guarded) -> None:
    keys, worker, learner = RunKeys(new_tag()), guarded.client("arm-1"), guarded.client("learner")
    Events(learner, keys).append("lease")
    writer = StreamWriter.open(worker, keys, "arm-1-w1-0", "test")
    guarded.admin["data"].acl_log_reset()
    env, identity = guarded.env("arm-1"), Identity.of(os.getpid())
    assert identity is not None
    urls = (env["CLAWQ_BROKER_URL"], env["CLAWQ_DATA_URL"])
    fence = Fence(Record("ab" * 16, identity, "actor", run=keys.tag, urls=urls), "slot:arm-1-w1-0")
    assert "was seized" in fence.seize()
    assert len(fence.last_events()) == 1
    fence.tell({}, {"reason": "hung"})
    fence.release()
    assert guarded.refusals() == []
    assert Board(learner, keys).read() == {"workers_reaped_total/hung": 1}
    assert [event.kind for event in Events(learner, keys).last(1)] == ["reaped"]
    writer.close()
    for client in (worker, learner):
        client.close()


def test_a_watchdog_with_a_user_of_its_own_acts_as_that(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Processes of other tests are registered in the folder that all share.
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    keys, learner = RunKeys(new_tag()), guarded.client("learner")
    Claim.take(learner, keys.claim("learner"), "a learner", 60.0)
    env, identity = guarded.env("arm-1"), Identity.of(os.getpid())
    assert identity is not None
    urls = (env["CLAWQ_BROKER_URL"], env["CLAWQ_DATA_URL"])
    record = Record("ab" * 16, identity, "worker", run=keys.tag, urls=urls, facts={"name": "arm-1-w1"})
    # A worker may not take the learner's claim away, whoever asks in its name
    assert "could not be seized" in Fence(record, "learner").seize()
    for name, value in guarded.env("watchdog").items():
        monkeypatch.setenv(name, value)
    guarded.admin["data"].acl_log_reset()
    guarded.admin["broker"].acl_log_reset()
    fence = Fence(record, "learner")
    assert "was seized" in fence.seize()
    fence.last_events()
    fence.tell({}, {"reason": "hung"})
    fence.release()
    snapshot = Sight(Registry(), Policy()).look()
    assert snapshot.redis == {}
    assert guarded.refusals() == []
    # Of another server it uses what the record names
    assert own_url(urls[1]) == guarded.env("watchdog")["CLAWQ_DATA_URL"]
    elsewhere = "redis://arm-1:x@127.0.0.1:1/0"
    assert own_url(elsewhere) == elsewhere
    learner.close()


def test_a_workers_rights_are_enough_to_count_and_to_bury_commands(guarded: Guarded) -> None:
    guarded.admin["broker"].acl_log_reset()
    broker = guarded.client("arm-1", "broker")
    commands = Commands(broker)
    assert commands.waiting([f"{C}clawq", f"{C}clawq.run-1"]) == 0
    assert [commands.begin("a"), commands.begin("a")] == [1, 2]
    commands.ended("a")
    assert commands.begin("a") == 1
    commands.bury("garbage", "clawq", b"{", "w1")
    assert guarded.refusals() == []
    viewer, learner = guarded.client("viewer", "broker"), guarded.client("learner", "broker")
    [dead] = Commands(viewer).dead()
    assert dead.reason == "garbage"
    # Whoever may send commands may give back, or drop, what was set aside
    commands.bury("attempts", "clawq.run-1", pack_arguments([], {"seconds": 1}), "w1", "lab.task", "a")
    with closing(make_app(guarded.env("learner")["CLAWQ_BROKER_URL"])) as sender:
        give_back(sender, Commands(learner), Commands(learner).dead(1)[0])
    assert learner.llen(f"{C}clawq.run-1") == 1
    assert Commands(learner).drop(dead.id)
    assert guarded.refusals() == []
    for client in (broker, viewer, learner):
        client.close()


def test_a_learners_rights_are_enough_for_all_that_it_does_to_a_run(guarded: Guarded) -> None:
    keys, worker = RunKeys(new_tag()), guarded.client("arm-1")
    learner, broker = guarded.client("learner"), guarded.client("learner", "broker")
    guarded.admin["data"].acl_log_reset()
    guarded.admin["broker"].acl_log_reset()
    registry, record = RunRegistry(broker), RunRecord("run-1", keys.tag)
    registry.add(record)
    assert RunRegistry(guarded.client("arm-1", "broker")).list() == [record]
    claim = Claim.take(learner, keys.claim("learner"), "test", 60)
    bear(learner, keys)
    ControlRecord(learner, keys, claim).write(stop=False, window_bytes=1_000_000, config_epoch=1)
    publisher = WeightsPublisher(learner, keys, claim, keep=1)
    for version in (1, 2, 3):
        publisher.publish({"w": np.zeros(1)}, version, version, pin="best" if version == 2 else None)
    publisher.unpin("best")
    assert WeightsReader(worker, keys).fetch_newer(0) is not None
    Heartbeats(worker, keys).beat(Heartbeat("arm-1-w1", 1, 0, "h", 1))
    assert set(Heartbeats(guarded.client("viewer"), keys).read()) == {"arm-1-w1"}
    assert Heartbeats(learner, keys, ttl_s=-1.0).prune() == {}
    writer = StreamWriter.open(worker, keys, "arm-1-w1-0", "test")
    writer.send(1, b"x" * 5000)
    reader = StreamReader(learner, keys)
    [entry] = reader.read(5.0)
    DeadLetters(learner, keys).append(entry, "corrupt")
    Books(learner, keys).publish({entry.slot: Position(1, "1-1")}, {"committed": 1})
    reader.acknowledge(reader.cursors())
    reader.checkpointed(reader.cursors())
    assert reader.trim(reader.cursors(), 0) == 1
    writer.close()
    assert reader.sweep() == ["arm-1-w1-0"]
    other = StreamReader(learner, keys, "second", required=True)
    other.read(0.1)
    other.leave()
    Board(learner, keys).write({"loss": 1.0})
    PaceRecord(learner, keys, 7).write(1000)
    for word in ("stop_wanted", "tune_wanted"):
        Orders(learner, keys).append(word)
    assert Orders(learner, keys).newest_id() != "0-0"
    assert registry.withdraw(record)
    end_run(learner, keys, claim)
    claim.release()
    assert guarded.refusals() == []
    for client in (worker, learner, broker):
        client.close()


def test_every_key_in_the_table_of_keys_is_one_that_users_have_rights_for() -> None:
    data, broker = (keys_module.__doc__ or "").split("Broker server")
    assert set(re.findall(r"^\| `([^`]+)`", data, re.MULTILINE)) == set(data_keys())
    assert set(re.findall(r"^\| `([^`]+)`", broker, re.MULTILINE)) == set(broker_keys())
    granted = {pattern for grant in broker_rights("arm-1") for pattern in (*grant.reads, *grant.writes)}
    assert {pattern for patterns in broker_keys().values() for pattern in patterns} <= granted


def test_every_key_has_a_user_who_writes_it_and_the_learner_has_all() -> None:
    table = data_keys()
    keys = RunKeys("cd" * 16)
    spelled = {
        name: value if isinstance(value, str) else ""
        for name in dir(keys)
        if not name.startswith("_") and isinstance(value := getattr(keys, name), str) and name not in ("tag", "prefix")
    }
    made = [keys.stream("h-w-0"), keys.cursors(), keys.kept("x"), keys.ledger(), keys.claim("slot:h-w-0")]
    every = [*spelled.values(), *made, keys.weights(7), keys.staging("ab")]
    for key in every:
        assert any(fnmatchcase(key, pattern) for pattern in table.values()), f"no ACL covers {key}"
    learner = data_rights("learner")[0]
    assert set(learner.reads) == set(learner.writes) == set(table.values())


def test_files_are_private_keep_their_passwords_and_hold_none_for_the_servers(tmp_path: Path) -> None:
    folder = tmp_path / "users"
    first = make_passwords(folder, ["arm-1"])
    second = make_passwords(folder, ["arm-2"])
    assert first.items() <= second.items()
    assert set(second) == {"learner", "watchdog", "viewer", "admin", "arm-1", "arm-2"}
    assert len(set(second.values())) == 6
    assert read_passwords(folder) == second
    assert stat.S_IMODE((folder / "passwords").stat().st_mode) == 0o600
    assert not any(
        password in text for text in acl_files(second, False, (7, 0)).values() for password in second.values()
    )
    (folder / "passwords").chmod(0o644)
    with pytest.raises(UserError, match="others can read it; `chmod 600"):
        read_passwords(folder)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["learner"], "cannot be called 'learner'"),
        (["default"], "cannot be called"),
        (["a b"], "cannot be called"),
        (["a*"], "cannot be called"),
        (["x" * 33], "cannot be called"),
        (["arm", "arm-1"], "cannot both be"),
    ],
)
def test_names_that_would_share_slots_are_refused(names: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        check_workers(names)


def test_the_example_in_ops_is_what_clawq_makes() -> None:
    passwords = {name: f"password-of-{name}" for name in ("learner", "watchdog", "viewer", "admin", "arm-1", "arm-2")}
    for role, text in acl_files(passwords, False, (7, 0)).items():
        assert (ROOT / "ops" / "redis" / f"{role}.acl").read_text() == text
