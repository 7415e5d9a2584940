"""Rounds with real processes: two runs of one seed beside one another, and an actor that is killed in a round."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from books import assert_books_balance
from clawq_process import Command
from cluster import POINT, Cluster

from clawq.transport.codec import peek_meta
from clawq.types import FragmentMeta

QUICK = (
    "evaluation.interval_s=null",
    "evaluation.final_episodes=2",
    "record.animation=false",
    "metrics=[jsonl]",
    "environment.num_envs=4",
    "rate_limit.min_size_to_sample=200",
)


class Pool(Cluster):
    """Learners of runs with two seats, each with a worker of its own."""

    def __init__(self, folder: Path, eventually: Callable[..., None]) -> None:
        super().__init__(folder)
        self._eventually = eventually
        self.workers: list[Command] = []

    def learner(self, run: str, *overrides: str, slots: int = 2) -> Command:
        self.workers.append(self.home.start("worker", "start", "--slots", str(slots), "--runs", run))
        words = (POINT, f"folder={self.home.runs}", *QUICK, *overrides)
        sync = ("sync.actors=2", "sync.quota_steps=24", "sync.fragment_steps=8")
        return self.home.start("learner", "start", *words, *sync, "--run", run)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for it, on a machine however busy; fails with what all said."""
        try:
            self._eventually(condition, what, 150.0)
        except AssertionError as error:
            said = [command.output[-3000:] for command in self.home.started]
            logs = [self.home.logs(folder.name) for folder in self.home.runs.glob("*")]
            raise AssertionError("\n".join([str(error), *said, *logs])) from None

    def actors(self) -> list[psutil.Process]:
        return [p for worker in self.workers for p in worker.tree() if "clawq.programs.actor" in p.cmdline()]

    def sent(self, run: str, seat: str) -> list[FragmentMeta]:
        """Headers of a seat's fragments."""
        return [peek_meta(fields[b"f"]) for _, fields in self.data.xrange(self.keys(run).stream(seat))]


@pytest.fixture
def pool(tmp_path: Path, eventually: Callable[..., None]) -> Iterator[Pool]:
    pool = Pool(tmp_path, eventually)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lag", [0, 1])
def test_two_runs_of_one_seed_end_bit_for_bit_alike_though_they_disturb_each_other(pool: Pool, lag: int) -> None:
    # Given two runs at once, one of them with slower envs, shorter leases and an actor that stands by
    common = (f"sync.deterministic_lag={lag}", "budget={env_steps: 2880}", "seed=7")
    other = ("environment.options.step_s=0.001", "actors.lease_s=0.5")
    learners = [
        pool.learner("r1", *common, "environment.options.step_s=0"),
        pool.learner("r2", *common, *other, slots=3),
    ]
    weights = [pool.home.runs / run / "weights" / "final.safetensors" for run in ("r1", "r2")]
    pool.wait(
        lambda: all(file.exists() for file in weights) or any(one.status for one in learners),
        "the final weights of both",
    )
    for learner, run in zip(learners, ("r1", "r2"), strict=True):
        assert learner.status in (None, 0), learner.output + pool.home.logs(run)
    one, two = (hashlib.sha256(file.read_bytes()).hexdigest() for file in weights)
    assert one == two
    untrained = pool.home.runs / "r1" / "weights" / "untrained.safetensors"
    assert hashlib.sha256(untrained.read_bytes()).hexdigest() != one


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_actor_killed_in_a_round_is_done_without_and_takes_part_again_under_a_new_seed(pool: Pool) -> None:
    # Given whole rounds, slow enough to be met in their midst
    more = ("environment.options.step_s=0.01", "budget={}", "sync.deadline_s=1", "sync.quorum=0.5")
    learner = pool.learner("r1", *more, "learner.checkpoint_interval_s=1")
    pool.wait(lambda: pool.number("r1", "rounds") >= 3, "rounds")
    epochs = {seat: pool.sent("r1", seat)[-1].epoch for seat in ("seat-000", "seat-001")}

    def whole() -> float:
        return pool.number("r1", "rounds") - pool.number("r1", "short_rounds")

    def restarted() -> list[str]:
        return [seat for seat, epoch in epochs.items() if pool.sent("r1", seat)[-1].epoch > epoch]

    # When one of the two actors is killed
    short = pool.number("r1", "short_rounds")
    pool.actors()[0].kill()
    # Then rounds go on without it; it is told, and status says who is missing
    pool.wait(lambda: pool.number("r1", "short_rounds") > short, "a round without it")
    assert "goes on without seat-00" in learner.output + pool.home.logs("r1")
    # And once the claim of the dead one has run out, the seat has a new actor, with a new seed that is on record
    pool.wait(restarted, "a new actor in its seat")
    [seat] = restarted()
    lives = {meta.epoch: meta.seed for meta in pool.sent("r1", seat)}
    assert len({*lives.values()}) == len(lives) == 2
    before = whole()
    pool.wait(lambda: whole() >= before + 3, "whole rounds")
    # And everything is accounted for
    keys = pool.keys("r1")
    assert pool.home.call("learner", "stop", "r1").status == 0
    counts = assert_books_balance(pool.data, keys, pool.home.runs / "r1")
    assert counts["duplicates"] == counts["gap_fragments"] == counts["unaccounted_steps"] == 0
    assert learner.wait(15) == 0, learner.output
