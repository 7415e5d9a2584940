"""A second learner on another run's streams: real processes, real Redis."""

import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from books import assert_books_balance
from clawq_process import Command
from cluster import POINT, Cluster

from clawq.programs.checkpoint import Checkpoints
from clawq.replay.ledger import Ledger
from clawq.transport.keys import RunKeys
from clawq.transport.registry import Readers
from clawq.transport.stream import parse_id, parse_trimmed

Eventually = Callable[..., None]
QUICK = ("evaluation.interval_s=null", "evaluation.final_episodes=2", "record.animation=false", "budget={}")


class Pair(Cluster):
    """A run with actors, and what follows it."""

    def learner(self, run: str, *words: str) -> Command:
        return self.home.start("learner", "start", POINT, f"folder={self.home.runs}", *QUICK, *words, "--run", run)

    def trimmed(self, keys: RunKeys) -> tuple[int, int]:
        """Id of the last entry that was trimmed from the one slot's stream."""
        return max((parse_trimmed(told)[0] for told in self.data.hvals(keys.trimmed)), default=(0, 0))

    def kept(self, keys: RunKeys, reader: str) -> tuple[int, int]:
        """Id of the last entry that a reader has in its checkpoint."""
        return max(parse_id(told.decode()) for told in self.data.hvals(keys.kept(reader)))

    def balance(self, run: str, reader: str) -> None:
        """`clawq log ledger` finds nothing wrong."""
        told = self.home.call("log", "ledger", run, "--reader", reader)
        assert told.status == 0, told.output


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_learner_with_another_algorithm_learns_dies_and_goes_on_while_the_first_notices_nothing(
    pair: Pair, eventually: Eventually
) -> None:
    worker = pair.home.start("worker", "start", "--slots", "1", "--name", "w")
    first = pair.learner("a", "redis.stream_bytes=1000000", "learner.checkpoint_interval_s=2")
    eventually(lambda: pair.number("a", "updates") > 20, "the first learns", 150)
    other = ("algorithm.name=sac", "algorithm.options.hidden=[16]", "replay.batch_size=32")
    second = pair.learner("b", *other, "learner.checkpoint_interval_s=1", "--follow", "a")
    eventually(lambda: pair.number("b", "updates") > 20, "the second learns", 150)
    source = pair.keys("a")
    assert not pair.data.exists(pair.keys("b").slots), "no actor works for the second"
    told = pair.home.call("reader", "ls", "a")
    assert "learner  required" in told.output
    assert "b  optional" in told.output
    assert "learner b on" in told.output
    # Killed, and away for so long that the streams cannot hold all of it
    checkpoints = pair.home.runs / "b" / "checkpoints"
    eventually(lambda: len(list(checkpoints.glob("*.ckpt"))) >= 2, "two checkpoints", 90)
    for process in reversed(second.tree()):
        process.kill()
    second.wait(5)
    eventually(lambda: pair.trimmed(source) > pair.kept(source, "b"), "the first goes on, and the log does", 120)
    mine = pair.keys("b").claim("learner")
    eventually(lambda: not pair.data.exists(mine), "the killed learner's claim runs out", 60)
    second = pair.home.start("learner", "start", "--resume", str(pair.home.runs / "b"))
    steps = pair.number("b", "env_steps")
    eventually(lambda: pair.number("b", "env_steps") > steps + 1000, "the second goes on", 150)
    pair.balance("a", "learner")
    pair.balance("a", "b")
    # When the first is stopped the second reads to the end, and stops too
    assert pair.home.call("learner", "stop", "a").status == 0
    assert first.wait(60) == 0
    assert second.wait(120) == 0, second.output + pair.home.logs("b")
    assert "has stopped" in pair.home.report("b")["ended"]
    assert pair.home.report("b")["resumable"]
    counts = assert_books_balance(pair.data, source, pair.home.runs / "a")
    assert (counts["gaps"], counts["unaccounted_steps"]) == ({}, 0)
    # Every fragment that was acknowledged is in the second's ring, or told as trimmed before it came
    checkpoint = Checkpoints(checkpoints).load_latest()
    assert checkpoint is not None
    assert "log_alpha" in checkpoint.state["algorithm"]["networks"], "it is SAC that learned"
    for name in ("critic_loss", "actor_loss", "alpha"):
        learned = [line[f"train/{name}"] for line in pair.home.metrics("b") if f"train/{name}" in line]
        assert learned
        assert all(math.isfinite(value) for value in learned)
    assert pair.number("b", "non_finite_updates") == 0
    ledger = Ledger(checkpoint.state["consumer"])
    assert ledger.check_valid() == (True, "")
    acknowledged = sum(
        pair.data.xinfo_stream(source.stream(slot.decode()))["entries-added"] for slot in pair.data.hkeys(source.slots)
    )
    known = ledger.counts
    assert acknowledged == known.committed + sum(known.gaps.values()) + sum(known.rejected.values()) + known.duplicates
    assert known.gaps["trimmed"] > 0
    assert known.produced_steps == known.committed_steps + known.missed_steps
    # It left nothing in the first's keys but its place
    left = {key.decode().removeprefix(source.prefix) for key in pair.data.keys(source.prefix + "*b")}
    assert left <= {"cursors:b", "kept:b", "ledger:b"}
    assert [record.name for record in Readers(pair.data, source).list()] == ["learner", "b"]
    assert worker.status is None
    for run in ("a", "b"):
        assert "Traceback" not in pair.home.logs(run)


def finishing(pair: Pair, eventually: Eventually) -> tuple[Command, RunKeys]:
    """A run that has spent its budget, and a required follower of it that was killed before it had checkpointed all."""
    pair.home.start("worker", "start", "--slots", "1", "--name", "w")
    first = pair.learner("a", "learner.checkpoint_interval_s=2")
    eventually(lambda: pair.number("a", "updates") > 20, "the first learns", 240)
    second = pair.learner("b", "learner.checkpoint_interval_s=1", "replay.batch_size=32", "--follow", "a", "--required")
    source = pair.keys("a")
    eventually(lambda: pair.data.exists(source.kept("b")), "the second has a checkpoint", 240)
    for process in reversed(second.tree()):
        process.kill()
    second.wait(5)
    mine = pair.keys("b").claim("learner")
    eventually(lambda: not pair.data.exists(mine), "the killed learner's claim runs out", 60)
    assert pair.home.call("tune", "a", "budget.env_steps=1000").status == 0
    eventually(lambda: "waits for required reader b" in first.output, "the first says whom it waits for", 240)
    return first, source


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_run_waits_until_its_required_follower_has_everything(pair: Pair, eventually: Eventually) -> None:
    first, source = finishing(pair, eventually)
    assert "(which is not there)" in first.output
    assert "clawq reader drop a b" in first.output
    assert pair.home.status("a")["metrics"]["stage"] == "waiting for reader b"
    first.process.send_signal(signal.SIGINT)
    eventually(lambda: "once more" in first.output, "it was told to stop")
    second = pair.home.start("learner", "start", "--resume", str(pair.home.runs / "b"))
    assert first.wait(300) == 0, first.output
    assert second.wait(300) == 0, second.output + pair.home.logs("b")
    assert "not_read" not in pair.home.report("a")
    assert "has finished" in pair.home.report("b")["ended"]
    # Every fragment that was there since the second began is in its ring
    told = pair.home.call("log", "ledger", str(pair.home.runs / "a"), "--json")
    assert told.status == 0, told.output
    [ledger] = json.loads(told.output)["readers"]
    assert ledger["source"].startswith("when the learner ended, ")
    assert (ledger["reader"], ledger["in_stream"], ledger["sums"]["gaps"].get("trimmed", 0)) == ("b", 0, 0)
    assert not pair.data.exists(source.slots)
    assert "Traceback" not in pair.home.logs("a") + pair.home.logs("b")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_ctrl_c_gives_the_follower_up_and_says_what_it_loses(pair: Pair, eventually: Eventually) -> None:
    first, source = finishing(pair, eventually)
    for _ in range(2):
        first.process.send_signal(signal.SIGINT)
        eventually(lambda: "once more" in first.output, "it was told to stop")
    assert first.wait(120) == 0, first.output
    lost = pair.home.report("a")["not_read"]["b"]
    assert lost > 0
    assert f"gave up waiting for reader b: {lost} fragments that it has not checkpointed are lost" in first.output
    assert not pair.data.exists(source.slots)


@pytest.mark.timeout(300)
def test_what_cannot_be_followed_is_refused_with_the_reason(pair: Pair, eventually: Eventually) -> None:
    nobody = pair.learner("b", "--follow", "nobody")
    assert nobody.wait(120) == 2
    assert "there is no run 'nobody' on this Redis to follow" in nobody.output
    first = pair.learner("a")
    eventually(lambda: pair.registry.get("a") is not None, "the first is there", 120)
    other = pair.learner("c", "environment.options.max_episode_steps=7", "--follow", "a")
    assert other.wait(120) == 2
    assert "its environment differs: max_episode_steps: 20 there, 7 here" in other.output, other.output
    assert "Traceback" not in nobody.output + other.output
    assert first.status is None
