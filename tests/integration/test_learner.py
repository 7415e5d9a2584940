"""The learner daemon with a worker pool beside it: one learner each, resume, Redis away, bad entries, two runs."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from clawq_process import Command
from cluster import POINT, Cluster

from clawq.cli.tune import ask
from clawq.config import RunConfig
from clawq.errors import ClawqError
from clawq.programs.audit import audit
from clawq.programs.checkpoint import Checkpoints
from clawq.programs.gauges import UNSENT_FRAGMENTS
from clawq.transport.codec import peek_meta
from clawq.transport.server import EmbeddedRedis
from clawq.types import FragmentMeta

Eventually = Callable[..., None]


class Town(Cluster):
    """A cluster with learners and workers."""

    def learner(self, run: str, *overrides: str) -> Command:
        quick = ("evaluation.interval_s=null", "evaluation.final_episodes=2", "record.animation=false")
        words = (POINT, f"folder={self.home.runs}", *quick, *overrides)
        return self.home.start("learner", "start", *words, "--run", run)

    def resumed(self, run: str, *overrides: str) -> Command:
        config = str(self.home.runs / run / "config.yaml")
        return self.home.start("learner", "start", config, *overrides, "--resume", str(self.home.runs / run))

    def worker(self, name: str, slots: int = 1) -> Command:
        return self.home.start("worker", "start", "--slots", str(slots), "--name", name)

    def newest(self, stream: str) -> FragmentMeta:
        """Header of the newest fragment in a stream."""
        entries: Any = self.data.xrevrange(stream, count=1)
        return peek_meta(entries[0][1][b"f"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    town.close()


@pytest.mark.timeout(120)
def test_workers_may_start_before_and_after_the_learner_and_leave_at_any_time(
    cluster: Town, eventually: Eventually
) -> None:
    first = cluster.worker("first")
    learner = cluster.learner("r1", "budget={}")
    eventually(lambda: cluster.number("r1", "updates") > 20, "updates with the first worker", 60)
    second = cluster.worker("second")
    eventually(lambda: cluster.number("r1", "workers") == 2, "the second worker is seen", 30)
    # When one actor is killed, its slot works again within 25 s
    [actor] = [p for p in first.tree() if "clawq.programs.actor" in p.cmdline()]
    [slot] = [name.decode() for name in cluster.data.hkeys(cluster.record("r1").keys.slots) if b"first" in name]
    stream = cluster.record("r1").keys.stream(slot)
    epoch = cluster.newest(stream).epoch
    actor.kill()
    eventually(lambda: cluster.newest(stream).epoch > epoch, "the slot of the killed actor sends", 25)
    # When the first leaves, the run goes on with the second
    assert first.stop(signal.SIGTERM)[0] == 0
    updates = cluster.number("r1", "updates")
    eventually(lambda: cluster.number("r1", "updates") > updates + 50, "updates with the second worker", 60)
    # When the second is killed as a whole, what it may have had unsent is counted beside that of the killed actor
    bound = RunConfig.model_validate(cluster.record("r1").config).actors.outbox_fragments + UNSENT_FRAGMENTS
    assert cluster.number("r1", "lost_unacked") == bound
    second.kill_tree()
    eventually(lambda: cluster.number("r1", "lost_unacked") == 2 * bound, "the bound of what it took with it", 20)
    assert f"at most {2 * bound} unsent fragments" in cluster.home.call("log", "ledger", "r1").output
    # And `clawq learner stop` ends the learner in order, and every fragment is accounted for, those of the killed too
    keys = cluster.keys("r1")
    counts = cluster.stop("r1")
    left = audit(cluster.data, keys, cluster.home.runs / "r1")
    assert left is not None
    assert left.sums["lost_unacked"] == 2 * bound
    assert counts["duplicates"] == counts["gap_fragments"] == counts["unaccounted_steps"] == 0
    assert counts["rejected"] == {}
    assert learner.wait(15) == 0, learner.output
    assert cluster.home.report("r1")["resumable"]
    assert cluster.registry.get("r1") is None


@pytest.mark.timeout(60)
def test_a_second_learner_of_a_run_is_refused_while_the_first_lives(cluster: Town, eventually: Eventually) -> None:
    first = cluster.learner("r1", "budget={}")
    eventually(lambda: cluster.registry.get("r1") is not None, "the run is registered", 30)
    for second in (cluster.resumed("r1"), cluster.learner("r1", "budget={}")):
        assert second.wait(30) == 2
        assert "r1" in second.output
        assert "Traceback" not in second.output
    assert first.status is None


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_C28_a_learner_killed_with_9_goes_on_from_its_checkpoint(cluster: Town, eventually: Eventually) -> None:
    cluster.worker("w")
    first = cluster.learner("r1", "budget={}", "learner.checkpoint_interval_s=1")
    checkpoints = cluster.home.runs / "r1" / "checkpoints"
    eventually(lambda: len(list(checkpoints.glob("*.ckpt"))) >= 2, "two checkpoints", 60)
    first.process.kill()
    first.wait(5)
    keys = cluster.record("r1").keys
    steps = cluster.number("r1", "env_steps")
    # And given that it had published more than its last checkpoint knows
    version = int(cluster.data.hget(keys.control, "head") or 0) + 100
    cluster.data.hset(keys.control, "head", version)
    # When it is resumed
    second = cluster.resumed("r1")
    eventually(lambda: cluster.number("r1", "env_steps") > steps + 2000, "more env steps", 60)
    # And its actor, which has older weights, follows it
    [slot] = cluster.data.hkeys(keys.slots)
    eventually(lambda: cluster.newest(keys.stream(slot.decode())).weights_version > version, "the new weights", 30)
    counts = cluster.stop("r1")
    assert second.wait(15) == 0, second.output + cluster.home.logs("r1")
    # Then the ring came back from the streams, and nothing was lost or taken twice
    assert "env steps are in the ring again" in second.output
    numbers = cluster.home.report("r1")["numbers"]
    assert numbers["weights_version"] > version
    assert counts["produced_steps"] == counts["committed_steps"]
    assert counts["gap_fragments"] == counts["duplicates"] == 0
    # And the ratio holds: no burst of updates, no forgetting (a busy machine may lag behind by the limiter's buffer)
    assert 6 < numbers["samples_per_insert"] < 17


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_learner_killed_with_9_while_it_starts_is_followed_at_once(cluster: Town, eventually: Eventually) -> None:
    first = cluster.learner("r1", "budget={}")
    eventually(lambda: cluster.registry.get("r1") is not None, "the run is claimed", 30)
    first.process.kill()
    first.wait(5)
    assert "learner: device" not in first.output, "it was still loading"
    second = cluster.resumed("r1")
    eventually(lambda: cluster.home.metrics("r1") or second.status is not None, "it is at work", 40)
    assert second.status is None, second.output


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_C28_a_ring_larger_than_the_streams_comes_back_whole_from_its_snapshot(
    cluster: Town, eventually: Eventually
) -> None:
    cluster.worker("w")
    # Given a ring of several MB over streams of one, which are trimmed behind every checkpoint
    small = ("replay.capacity=100000", "redis.stream_bytes=1000000", "redis.window_bytes=100000")
    first = cluster.learner("r1", "budget={}", "learner.checkpoint_interval_s=1", *small)
    eventually(lambda: cluster.number("r1", "env_steps") > 0, "env steps", 60)
    eventually(lambda: trimmed(cluster, "r1"), "the streams are trimmed", 90)
    first.process.kill()
    first.wait(5)
    keys = cluster.record("r1").keys
    eventually(lambda: not cluster.data.exists(keys.claim("learner")), "the claim runs out", 15)
    newest = Checkpoints(cluster.home.runs / "r1" / "checkpoints").load_latest()
    assert newest is not None
    held, steps = newest.state["ring"]["layout"]["size"], cluster.number("r1", "env_steps")
    # When it is resumed, then all of the ring is there again, though the streams hold only a part of it
    second = cluster.resumed("r1")
    eventually(lambda: cluster.number("r1", "env_steps") > steps + 500, "more env steps", 60)
    cluster.stop("r1")
    assert second.wait(15) == 0, second.output + cluster.home.logs("r1")
    assert f"{held} env steps are in the ring again" in second.output
    assert "missing" not in second.output


def trimmed(cluster: Town, run: str) -> bool:
    """Whether a slot's stream begins behind its first entry."""
    keys = cluster.record(run).keys
    firsts = [cluster.data.xrange(keys.stream(slot.decode()), count=1) for slot in cluster.data.hkeys(keys.slots)]
    return any(int(entries[0][0].decode().split("-")[1]) > 10 for entries in firsts if entries)


@pytest.mark.timeout(120)
def test_redis_gone_mid_run_and_back_empty_the_run_goes_on(
    cluster: Town, eventually: Eventually, restart_data: Callable[[EmbeddedRedis], None]
) -> None:
    cluster.worker("w")
    learner = cluster.learner("r1", "budget={}")
    eventually(lambda: cluster.number("r1", "updates") > 20, "updates", 60)
    restart_data(cluster.servers)
    updates, steps = cluster.number("r1", "updates"), cluster.number("r1", "env_steps")
    eventually(lambda: cluster.number("r1", "env_steps") > steps + 500, "env steps after the restart", 45)
    eventually(lambda: cluster.number("r1", "updates") > updates + 50, "updates after the restart", 30)
    assert learner.status is None


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_redis_stalled_for_20_s_all_goes_on(cluster: Town, eventually: Eventually) -> None:
    cluster.worker("w")
    learner = cluster.learner("r1", "budget={}")
    eventually(lambda: cluster.number("r1", "updates") > 20, "updates", 60)
    # When both servers hang for 20 s (the time is what is tested, so it is really waited for)
    for server in cluster.servers.processes:
        server.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        learner.process.wait(20)
    for server in cluster.servers.processes:
        server.send_signal(signal.SIGCONT)
    updates = cluster.number("r1", "updates")
    eventually(lambda: cluster.number("r1", "updates") > updates + 100, "updates after the stall", 45)
    counts = cluster.stop("r1")
    assert counts["gap_fragments"] == counts["unaccounted_steps"] == 0


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_bad_entries_are_counted_by_reason_and_training_goes_on(cluster: Town, eventually: Eventually) -> None:
    cluster.worker("w")
    learner = cluster.learner("r1", "budget={}")
    eventually(lambda: cluster.number("r1", "updates") > 20, "updates", 60)
    keys = cluster.record("r1").keys
    slot = cluster.data.hkeys(keys.slots)[0].decode()
    good: bytes = cluster.data.xrevrange(keys.stream(slot), count=1)[0][1][b"f"]
    other_version = bytearray(good)
    other_version[4] ^= 0x40
    # When garbage, a truncated, a foreign and a bit-flipped entry, and one of another wire version turn up
    bad = {"garbage": b"\x00" * 100, "truncated": good[:-50], "foreign": msgspec.msgpack.encode({"a": 1})}
    bad |= {"flipped": good[:-20] + b"\xff" + good[-19:], "version": bytes(other_version)}
    cluster.data.hset(keys.slots, "intruder", json.dumps({"worker": "nobody", "epoch": 1}))
    for seq, payload in enumerate(bad.values(), 1):
        cluster.data.xadd(keys.stream("intruder"), {"f": payload}, id=f"1-{seq}")
    # Then each is refused and counted, with a dead letter, and the run goes on
    eventually(
        lambda: (
            sum(
                float(value)
                for name, value in (cluster.home.metrics("r1") or [{}])[-1].items()
                if name.startswith("rejected/")
            )
            == len(bad)
        ),
        "all bad entries are refused",
        20,
    )
    newest = cluster.home.metrics("r1")[-1]
    assert newest["rejected/wire_version"] == 1
    assert newest["rejected/corrupt"] == 4
    assert cluster.data.xlen(keys.dead_letters) == len(bad)
    updates = cluster.number("r1", "updates")
    eventually(lambda: cluster.number("r1", "updates") > updates + 20, "updates after bad entries", 30)
    assert learner.status is None
    assert cluster.stop("r1")["rejected"] == {"wire_version": 1, "corrupt": 4}


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_disk_that_refuses_a_checkpoint_is_told_and_training_goes_on(cluster: Town, eventually: Eventually) -> None:
    cluster.worker("w")
    learner = cluster.learner("r1", "budget={}", "learner.checkpoint_interval_s=1")
    checkpoints = cluster.home.runs / "r1" / "checkpoints"
    eventually(lambda: list(checkpoints.glob("*.ckpt")), "a first checkpoint", 60)
    # When nothing can be written there any more
    checkpoints.rename(checkpoints.with_name("moved"))
    checkpoints.write_text("a file where the folder was")
    eventually(lambda: "was not written" in learner.output, "the failure is told", 20)
    updates = cluster.number("r1", "updates")
    eventually(lambda: cluster.number("r1", "updates") > updates + 20, "updates after the failure", 30)
    assert list(checkpoints.with_name("moved").glob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_runs_on_one_pool_do_not_mix(cluster: Town, eventually: Eventually) -> None:
    cluster.worker("pool", slots=2)
    learners = [cluster.learner(run, "budget={env_steps: 3000}") for run in ("r1", "r2")]
    for run, learner in zip(("r1", "r2"), learners, strict=True):
        assert learner.wait(120) == 0, learner.output + cluster.home.logs(run)
        numbers = cluster.home.report(run)["numbers"]
        assert numbers["env_steps"] >= 3000
        assert not [name for name in numbers if name.startswith("rejected/")]
        assert numbers["gap_fragments"] == 0
    # And nothing that does not run out by itself is left of either run on the servers
    eventually(lambda: not cluster.registry.list(), "the runs are off the list", 5)
    assert not [key for key in cluster.data.scan_iter() if cluster.data.ttl(key) < 0]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_settings_are_tuned_while_the_run_goes_on_and_a_resume_keeps_them(
    cluster: Town, eventually: Eventually
) -> None:
    def tune(*words: str) -> Command:
        return cluster.home.call("tune", "r1", *words)

    cluster.worker("w")
    learner = cluster.learner("r1", "budget={}", "rate_limit.samples_per_insert=1", "rate_limit.error_buffer=2000")
    eventually(lambda: cluster.number("r1", "updates") > 5, "updates", 60)
    # Wrong changes are told at once, by the learner too: only it knows how large a fragment is
    refused = tune("environment.num_envs=4", "rate_limit.min_size_to_sample=0", "staleness.hard=x")
    assert refused.status == 2
    assert "fixed for the life of a run" in refused.output
    refused = tune("rate_limit.error_buffer=130")
    assert refused.status == 2, refused.output
    assert "waiting for each other for ever" in refused.output
    # A good one takes effect and is answered
    done = tune("rate_limit.samples_per_insert=4", "actors.max_actors=7", "staleness.hard=50", "budget.seconds=null")
    assert done.status == 0, done.output
    assert "rate_limit.samples_per_insert: 1.0 -> 4.0" in done.output
    assert "staleness.hard: null -> 50" in done.output
    assert "budget.seconds: is that already" in done.output
    steps, updates = cluster.number("r1", "env_steps"), cluster.number("r1", "updates")
    batch = cluster.record("r1").config["replay"]["batch_size"]

    def ratio() -> float:
        more = cluster.number("r1", "env_steps") - steps
        return (cluster.number("r1", "updates") - updates) * batch / more if more > 4000 else 0.0

    eventually(lambda: ratio() > 2.5, "four samples for each env step from now on", 60)
    eventually(lambda: cluster.record("r1").config["actors"]["max_actors"] == 7, "workers see it", 10)
    # And is kept
    cluster.stop("r1")
    assert learner.wait(15) == 0, learner.output
    again = cluster.home.start("learner", "start", "--resume", str(cluster.home.runs / "r1"))
    eventually(lambda: cluster.registry.get("r1") is not None, "the resumed run is registered", 30)
    config = cluster.record("r1").config
    assert (config["rate_limit"]["samples_per_insert"], config["staleness"]["hard"]) == (4, 50)
    eventually(lambda: cluster.number("r1", "updates") > updates + 5, "updates of the resumed learner", 60)
    # A learner that does not answer: the change is withdrawn
    view: Any = SimpleNamespace(data=cluster.data)
    again.process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(again.process.pid).status() == psutil.STATUS_STOPPED, "the learner stands", 10)
    with pytest.raises(ClawqError, match=r"did not answer within 0.5 s; the change is withdrawn"):
        ask(view, cluster.record("r1"), ("staleness.hard=9",), 0.5)
    again.process.send_signal(signal.SIGCONT)
    done = tune("staleness.hard=10")
    assert "staleness.hard: 50 -> 10" in done.output, done.output
    cluster.stop("r1")
    assert again.wait(15) == 0, again.output
    # A run that has ended
    assert "run r1 was stopped on" in tune("staleness.hard=5").output
