import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from clawq.algorithms.td3 import plugin as td3
from clawq.config import RunConfig
from clawq.specs import EnvSpec
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.codec import decode
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsPublisher
from clawq.types import Fragment

Eventually = Callable[..., None]
SPEC = point_spec(PointOptions())
#: A small network, so that nothing but the actor takes time.
ALGORITHM = {"name": "td3", "options": {"hidden": [8, 8]}}


def test_a_log_level_that_there_is_not_is_told_in_one_line() -> None:
    env = {**os.environ, "CLAWQ_LOG_LEVEL": "banana"}
    words = [sys.executable, "-m", "clawq.programs.actor"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "CLAWQ_LOG_LEVEL='banana' is no log level; it may be DEBUG, INFO, WARNING, ERROR, CRITICAL"
    ]


class Run:
    """A run as its learner keeps it in Redis, and a reader of its fragments."""

    def __init__(
        self, client: redis.Redis, keys: RunKeys, options: dict[str, Any] | None = None, **sections: Any
    ) -> None:
        self.keys, self.client = keys, client
        self.config = RunConfig.model_validate(
            {
                "name": "test",
                "seed": 7,
                "environment": {"name": "point", "num_envs": 4, "options": {"step_s": 0.002, **(options or {})}},
                "algorithm": ALGORITHM,
                "actors": {"fragment_s": 0.05},
                **sections,
            }
        )
        self.control = ControlRecord(client, keys)
        self.claim = Claim.take(client, keys.claim("learner"), "test", 60.0)
        self.publisher = WeightsPublisher(client, keys, self.claim)
        self.reader = StreamReader(client, keys)
        self.seen: list[Fragment] = []

    def begin(self) -> None:
        self.control.write(stop=False, window_bytes=8_000_000, config_epoch=0)
        self.publish(1, updates=0)

    def publish(self, version: int, updates: int, seed: int = 0) -> dict[str, Any]:
        """Publish random weights; returns them."""
        algorithm = td3.make_algorithm(SPEC, td3.Options.model_validate(ALGORITHM["options"]), "cpu", seed)
        arrays = {name: tensor.numpy() for name, tensor in algorithm.weights().items()}
        self.publisher.publish(arrays, version, updates)
        return arrays

    def described(self, spec: EnvSpec = SPEC) -> dict[str, Any]:
        config = self.config.model_dump(mode="json")
        return {"id": "test", "tag": self.keys.tag, "config": config, "spec": spec.to_json()}

    def fragments(self) -> list[Fragment]:
        entries = self.reader.read(0.05)
        # An entry without a payload tells only of what was missed.
        self.seen += [decode(entry.payload) for entry in entries if entry.payload]
        self.reader.acknowledge(self.reader.cursors())
        return self.seen


class ActorUnderTest:
    """An actor process, and the worker's end of its line."""

    def __init__(self, data_url: str, log: Path) -> None:
        self.data_url, self.log = data_url, log
        ours, theirs = socket.socketpair()
        env = {**os.environ, "CLAWQ_CONTROL_FD": str(theirs.fileno()), "CLAWQ_THREADS": "1"}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "clawq.programs.actor"], pass_fds=(theirs.fileno(),), env=env, stderr=stderr
            )
        theirs.close()
        ours.settimeout(30.0)
        self.sock, self.lines = ours, ours.makefile("r")
        self.phases: list[str] = []
        self.leases = 0

    def tell(self, **message: Any) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def lease(self, run: dict[str, Any], seconds: float, slot: str = "host-w-0") -> None:
        self.leases += 1
        self.tell(op="lease", run=run, slot=slot, worker="host/w", data_url=self.data_url, seconds=seconds)

    def next(self, *events: str, phase: str | None = None) -> dict[str, Any]:
        """The next message of one of those kinds."""
        for line in self.lines:
            message: dict[str, Any] = json.loads(line)
            if message["event"] == "progress":
                self.phases.append(message["phase"])
            self.leases -= message["event"] in ("done", "failed")
            if message["event"] in events and phase in (None, message.get("phase")):
                return message
            assert message["event"] in ("ready", "progress"), message
        raise AssertionError(f"the actor ended:\n{self.log.read_text()}")

    def close(self) -> None:
        self.lines.close()
        self.sock.close()
        try:
            self.process.wait(10.0)
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def run(data_client: redis.Redis, run_keys: RunKeys) -> Run:
    return Run(data_client, run_keys)


@pytest.fixture
def start_actor(tmp_path: Path) -> Iterator[Callable[[str], ActorUnderTest]]:
    """Start an actor for a data Redis; it ends with the test."""
    started: list[ActorUnderTest] = []

    def start(data_url: str) -> ActorUnderTest:
        started.append(ActorUnderTest(data_url, tmp_path / f"actor-{len(started)}.log"))
        return started[-1]

    yield start
    for actor in started:
        actor.close()


@pytest.fixture(scope="module")
def idle_actors() -> Iterator[list[ActorUnderTest]]:
    """At most one, for `idle_actor`."""
    kept: list[ActorUnderTest] = []
    yield kept
    for actor in kept:
        actor.close()


@pytest.fixture
def idle_actor(
    idle_actors: list[ActorUnderTest], redis_servers: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ActorUnderTest]:
    """One that may have had leases of other runs before, as on any worker; to start one takes long."""
    if not idle_actors:
        idle_actors.append(ActorUnderTest(redis_servers.data_url, tmp_path_factory.mktemp("idle") / "actor.log"))
    yield idle_actors[0]
    if idle_actors[0].leases:
        idle_actors.pop().close()


@pytest.fixture
def actor(redis_servers: EmbeddedRedis, start_actor: Callable[[str], ActorUnderTest]) -> ActorUnderTest:
    return start_actor(redis_servers.data_url)


def test_leases_bring_fragments_and_the_second_one_goes_on_where_the_first_ended(
    run: Run, actor: ActorUnderTest, eventually: Eventually
) -> None:
    run.begin()
    actor.next("ready")
    actor.lease(run.described(), 1.5)
    first = actor.next("done")["report"]
    actor.lease(run.described(), 0.2)
    second = actor.next("done")["report"]
    total = first["env_steps"] + second["env_steps"]
    eventually(lambda: sum(f.meta.steps * f.meta.envs for f in run.fragments()) >= total, "all fragments")
    assert first["reason"] == second["reason"] == "lease_over"
    assert first["fragments"] > 1
    metas = [fragment.meta for fragment in run.seen]
    assert [meta.seq for meta in metas] == list(range(1, len(metas) + 1))
    assert len({meta.epoch for meta in metas}) == 1
    assert metas[-1].produced == total
    assert {(m.run, m.worker, m.slot, m.env) for m in metas} == {(run.keys.tag, "host/w", "host-w-0", SPEC.fingerprint)}
    assert actor.phases[:3] == ["start", "start", "reset"] or actor.phases[:2] == ["start", "reset"]
    assert "step" in actor.phases


def test_ready_comes_before_the_heavy_imports(run: Run, actor: ActorUnderTest) -> None:
    started_s = time.monotonic()
    actor.next("ready")
    assert time.monotonic() - started_s < 5.0


def test_C19_once_published_a_constant_action_is_what_the_next_fragments_hold_under_its_version(
    data_client: redis.Redis, run_keys: RunKeys, idle_actor: ActorUnderTest, eventually: Eventually
) -> None:
    # Given fragments that are long enough for weights to come in the middle of one
    noise = {"noise_min": 0.0, "noise_max": 0.0}
    run = Run(data_client, run_keys, exploration=noise, actors={"fragment_s": 0.4})
    run.begin()
    idle_actor.lease(run.described(), 60.0)
    eventually(lambda: run.fragments(), "fragments under version 1", 20)
    # And weights 2 and 3, under which every observation leads to one action, another for each
    bias = {2: np.arctanh(np.array([0.25, -0.5], np.float32)), 3: np.arctanh(np.array([-0.75, 0.125], np.float32))}
    for version, last_bias in bias.items():
        algorithm = td3.make_algorithm(SPEC, td3.Options.model_validate(ALGORITHM["options"]), "cpu", 0)
        arrays = {name: np.zeros_like(tensor.numpy()) for name, tensor in algorithm.weights().items()}
        arrays["actor.2.bias"][:] = last_bias
        arrays["normaliser.var"][:] = 1.0
        run.publisher.publish(arrays, version, updates=100 * version)
        eventually(lambda: run.fragments()[-1].meta.weights_version == version, f"version {version}", 30)  # noqa: B023
    idle_actor.tell(op="end")
    assert idle_actor.next("done")["report"]["reason"] == "ended"
    # Then each fragment holds the action of the version that it names in every row, and nowhere another version's
    fragments = run.fragments()
    versions = [fragment.meta.weights_version for fragment in fragments]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2, 3}
    for fragment in fragments:
        for version, last_bias in bias.items():
            rows = np.isclose(fragment.action, np.tanh(last_bias), atol=1e-6).all(axis=-1)
            named = fragment.meta.weights_version == version
            assert rows.all() if named else not rows.any(), (fragment.meta, version)


def test_C20_an_actor_acts_exactly_as_the_published_bytes_of_the_version_that_it_names(
    data_client: redis.Redis,
    run_keys: RunKeys,
    redis_servers: EmbeddedRedis,
    start_actor: Callable[[str], ActorUnderTest],
    eventually: Eventually,
) -> None:
    run = Run(data_client, run_keys, exploration={"noise_min": 0.0, "noise_max": 0.0})
    run.begin()
    actors = {slot: start_actor(redis_servers.data_url) for slot in ("host-w-0", "host-w-1")}
    for slot, actor in actors.items():
        actor.lease(run.described(), 30.0, slot)
    published = {}
    for version in (2, 3, 4):
        published[version] = run.publish(version, updates=version, seed=version)
        eventually(
            lambda: (
                {(slot, version) for slot in actors}  # noqa: B023
                <= {(f.meta.slot, f.meta.weights_version) for f in run.fragments()}
            ),
            f"both actors under version {version}",
            30,
        )
    for actor in actors.values():
        actor.tell(op="end")
        actor.next("done")
    # Then whatever an actor did under a version is what that version's own arrays do, bit for bit
    for version, arrays in published.items():
        policy = td3.make_policy(SPEC, td3.Options.model_validate(ALGORITHM["options"]))
        policy.load(arrays)
        of_version = [f for f in run.fragments() if f.meta.weights_version == version]
        assert {fragment.meta.slot for fragment in of_version} == set(actors)
        for fragment in of_version:
            for t in range(fragment.meta.steps):
                expected = policy.act({key: rows[t] for key, rows in fragment.obs.items()})
                np.testing.assert_array_equal(fragment.action[t], expected)


def test_an_actor_waits_for_the_control_record_and_ends_with_the_run(
    run: Run, idle_actor: ActorUnderTest, eventually: Eventually
) -> None:
    idle_actor.lease(run.described(), 30.0)
    idle_actor.next("progress", phase="wait")
    assert run.fragments() == []
    run.begin()
    eventually(lambda: run.fragments(), "fragments", 20)
    run.control.request_stop()
    assert idle_actor.next("done")["report"]["reason"] == "run_stopped"
    # The slot is free again at once.
    StreamWriter.open(run.client, run.keys, "host-w-0", "next", 1.0).close()


def test_a_lease_of_another_run_builds_anew(
    run: Run, idle_actor: ActorUnderTest, data_client: redis.Redis, eventually: Eventually
) -> None:
    other = Run(data_client, RunKeys(new_tag()))
    run.begin()
    other.begin()
    idle_actor.lease(run.described(), 2.0)
    idle_actor.next("done")
    idle_actor.lease(other.described(), 2.0)
    idle_actor.next("done")
    eventually(lambda: run.fragments() and other.fragments(), "fragments of both")
    assert {f.meta.run for f in run.seen} == {run.keys.tag}
    assert {f.meta.run for f in other.seen} == {other.keys.tag}
    StreamWriter.open(run.client, run.keys, "host-w-0", "next", 1.0).close()


def test_sigterm_finishes_sends_and_gives_the_slot_back(
    run: Run, actor: ActorUnderTest, eventually: Eventually
) -> None:
    run.begin()
    actor.lease(run.described(), 30.0)
    eventually(lambda: run.fragments(), "fragments", 20)
    actor.process.send_signal(signal.SIGTERM)
    report = actor.next("done")["report"]
    assert report["reason"] == "ended"
    assert actor.process.wait(5.0) == 0
    eventually(lambda: sum(f.meta.steps * f.meta.envs for f in run.fragments()) == report["env_steps"], "all of it")
    StreamWriter.open(run.client, run.keys, "host-w-0", "next", 1.0).close()


def test_eof_ends_the_process_even_inside_a_hanging_simulator(
    data_client: redis.Redis, run_keys: RunKeys, actor: ActorUnderTest
) -> None:
    run = Run(data_client, run_keys, {"fault": {"kind": "hang", "phase": "step", "at": 3}})
    run.begin()
    actor.lease(run.described(), 30.0)
    actor.next("progress", phase="step")
    actor.sock.shutdown(socket.SHUT_RDWR)
    actor.process.wait(5.0)


def test_a_simulator_that_raises_is_reported_with_its_error(
    data_client: redis.Redis, run_keys: RunKeys, actor: ActorUnderTest
) -> None:
    run = Run(data_client, run_keys, {"fault": {"kind": "raise", "phase": "step", "at": 3}})
    run.begin()
    actor.lease(run.described(), 30.0)
    failed = actor.next("failed")
    assert failed["kind"] == "RuntimeError"
    assert "fault on purpose" in failed["error"]
    assert actor.process.wait(10.0) == 70
    assert "Traceback" in actor.log.read_text()


def test_an_environment_other_than_the_learners_is_refused(run: Run, actor: ActorUnderTest) -> None:
    run.begin()
    actor.lease(run.described(point_spec(PointOptions(max_episode_steps=99))), 5.0)
    failed = actor.next("failed")
    assert failed["kind"] == "SpecMismatch"
    assert "max_episode_steps: expected 99, got 20" in failed["error"]
    assert "Traceback" not in actor.log.read_text()


def test_a_slot_that_another_actor_takes_ends_the_lease_quietly(
    run: Run, idle_actor: ActorUnderTest, eventually: Eventually
) -> None:
    run.begin()
    idle_actor.lease(run.described(), 30.0)
    eventually(lambda: run.fragments(), "fragments", 20)
    run.client.delete(run.keys.claim("slot:host-w-0"))
    thief = StreamWriter.open(run.client, run.keys, "host-w-0", "thief", 60.0)
    assert idle_actor.next("done")["report"]["reason"] == "claim_lost"
    thief.close()


def test_C54_a_rerun_has_the_same_first_rows_and_a_restart_has_others(
    actor: ActorUnderTest,
    start_actor: Callable[[str], ActorUnderTest],
    data_client: redis.Redis,
    eventually: Eventually,
) -> None:
    def first_fragment(actor: ActorUnderTest, run: Run) -> Fragment:
        seen = len(run.fragments())
        actor.lease(run.described(), 2.0)
        actor.next("done")
        eventually(lambda: len(run.fragments()) > seen, "fragments")
        return run.seen[seen]

    # Given a run and its re-run, both at their first incarnation, and then a restarted actor
    one_run, rerun = Run(data_client, RunKeys(new_tag())), Run(data_client, RunKeys(new_tag()))
    one_run.begin()
    rerun.begin()
    one, again = first_fragment(actor, one_run), first_fragment(actor, rerun)
    actor.process.send_signal(signal.SIGTERM)
    actor.process.wait(20.0)
    restarted = first_fragment(start_actor(actor.data_url), rerun)
    # Then the first two have the same rows
    assert one.meta.seed == again.meta.seed != restarted.meta.seed
    steps = min(one.meta.steps, again.meta.steps)
    for key in one.obs:
        assert (one.obs[key][:steps] == again.obs[key][:steps]).all()
    assert (one.action[:steps] == again.action[:steps]).all()
    # And the restarted one has others, and no two envs of an actor are alike
    assert not (again.obs["desired_goal"][0] == restarted.obs["desired_goal"][0]).all()
    assert len({tuple(goal) for goal in one.obs["desired_goal"][0]}) == 4


def test_an_actor_outlives_a_data_redis_that_comes_back_empty(
    own_servers: EmbeddedRedis,
    restart_data: Callable[[EmbeddedRedis], None],
    start_actor: Callable[[str], ActorUnderTest],
    eventually: Eventually,
) -> None:
    client, keys = connect(own_servers.data_url), RunKeys(new_tag())
    run = Run(client, keys)
    run.begin()
    actor = start_actor(own_servers.data_url)
    actor.lease(run.described(), 60.0)
    eventually(lambda: run.fragments(), "fragments", 20)
    epoch = run.seen[-1].meta.epoch
    restart_data(own_servers)
    # The learner makes everything again.
    again = Run(client, keys)
    again.begin()
    again.publish(2, updates=0)
    # Until it notices that its claim is gone it goes on under the old epoch, and then begins a new one with number 1.
    eventually(lambda: again.fragments() and again.seen[-1].meta.epoch > epoch, "a new epoch", 25)
    assert next(f.meta.seq for f in again.seen if f.meta.epoch > epoch) == 1
    eventually(lambda: again.fragments()[-1].meta.weights_version == 2, "fragments under the new weights", 25)
    actor.tell(op="end")
    made = actor.next("done")["report"]["env_steps"]
    # And its last header speaks of all that it ever made, so that what was lost with the old server shows as missing.
    eventually(lambda: again.fragments()[-1].meta.produced == made, "the last fragment")
    assert again.seen[-1].meta.life == epoch


def test_started_by_hand_it_says_who_starts_actors() -> None:
    env = {name: value for name, value in os.environ.items() if name != "CLAWQ_CONTROL_FD"}
    done = subprocess.run(
        [sys.executable, "-m", "clawq.programs.actor"], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "clawq worker start" in done.stderr
