"""Resuming under another configuration, and without all of the log: what wins, what is refused, what is told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lineage import PRIORITISED, Lineage, become, build, differences, twin

from clawq.config import RunConfig
from clawq.core import Entry
from clawq.errors import CheckpointInvalid, UserError
from clawq.programs import learning
from clawq.programs.checkpoint import Checkpoints
from clawq.programs.parts import make_examiner
from clawq.programs.resume import changes, find_state
from clawq.programs.schedule import SCHEDULE_FILE, SessionBegun, read_schedule
from clawq.programs.train import Trainer
from clawq.replay.prioritized import PrioritizedSampler
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.server import EmbeddedRedis

FRAGMENTS = 40


class Desk:
    """A run with a log of FRAGMENTS, whose learners live in this process, one after another."""

    def __init__(self, folder: Path, servers: EmbeddedRedis, replay: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.urls = servers.broker_url, servers.data_url
        self.lineage = Lineage(folder, self.urls, replay, FRAGMENTS)
        self.run = self.lineage.run
        self.said: list[str] = []

    def change(self, **sections: dict[str, Any]) -> None:
        """Replace keys of sections of the configuration."""
        config = self.run.config.model_dump(mode="json")
        merged = {**config, **{name: {**config[name], **keys} for name, keys in sections.items()}}
        self.run = replace(self.run, config=RunConfig.model_validate(merged))

    @contextmanager
    def learner(self) -> Iterator[Trainer]:
        """A learner, resumed if there is a checkpoint; it is at work within, and killed at the end."""
        trainer, writers = build(self.run, self.urls, self.said.append)
        try:
            trainer.parts.consumer.start()
            trainer.publish()
            yield trainer
        finally:
            trainer.parts.consumer.close()
            trainer.close()
            writers.close()

    def train(self, trainer: Trainer, entries: int = FRAGMENTS) -> None:
        """Until so many entries are settled, and nothing more can be learned from them."""
        parts = trainer.parts

        class Done(threading.Event):
            def is_set(self) -> bool:
                if parts.consumer.counts.entries < entries:
                    return False
                return entries < FRAGMENTS or not parts.limiter.can_sample(parts.config.replay.batch_size)

        trainer.train(Done())


@pytest.fixture
def desk(tmp_path: Path, redis_servers: EmbeddedRedis) -> Iterator[Desk]:
    desk = Desk(tmp_path, redis_servers, {})
    yield desk
    desk.lineage.close()


def test_what_may_change_wins_all_at_once(desk: Desk) -> None:
    with desk.learner() as first:
        desk.train(first, entries=25)
        first.checkpoint(wait=True)
        weights, size = first.parts.updater.algorithm.weights(), first.parts.ring.size
        rows = first.parts.ring.sampleable_rows()
        shown = first.parts.ring.obs_at(torch.from_numpy(rows))
        updates = first.parts.updater.updates
    options = desk.run.config.algorithm.options
    desk.change(
        algorithm={"options": {**options, "lr_critic": 5e-4, "lr_actor": 2e-4, "lr_final_fraction": 1.0, "tau": 0.05}},
        replay={**PRIORITISED, "capacity": 400, "batch_size": 48, "gamma": 0.9, "reward_scale": 2.0},
        rate_limit={"samples_per_insert": 2.0, "min_size_to_sample": 50, "error_buffer": 400.0},
        learner={"publish_interval_s": 0.5, "keep_checkpoints": 5, "max_non_finite": 7},
        budget={"env_steps": None, "seconds": 1000.0},
        evaluation={"interval_s": 30.0, "episodes": 3},
    )
    with desk.learner() as second:
        parts = second.parts
        assert "25 fragments" not in desk.said[-1]
        # It is the same learner
        assert parts.updater.updates == updates
        assert list(differences(parts.updater.algorithm.weights(), weights)) == []
        # with a smaller ring, which holds the newest of what it held
        assert parts.ring.capacity == 400
        assert 100 < parts.ring.size < size
        assert parts.ring.check_valid() == (True, "")
        kept = parts.ring.sampleable_rows()
        again = parts.ring.obs_at(torch.from_numpy(kept))
        for key, column in shown.items():
            assert torch.equal(again[key], column[np.isin(rows, kept)])
        # that is sampled in another way, under another limit, which begins balanced
        assert isinstance(parts.sampler, PrioritizedSampler)
        assert parts.sampler.check_valid() == (True, "")
        assert parts.limiter.check_valid() == (True, "")
        low, high = parts.limiter.bounds
        assert parts.limiter.error == (low + high) / 2
        assert high - low == 800.0
        assert second.parts.budget.budget.seconds == 1000.0
        desk.train(second)
        assert parts.updater.updates > updates
        adams = parts.updater.algorithm.state_dict()["optimisers"]
        assert adams["critic"]["param_groups"][0]["lr"] == 5e-4
        assert adams["actor"]["param_groups"][0]["lr"] == 2e-4
        assert parts.ring.check_valid() == (True, "")
        assert parts.sampler.check_valid() == (True, "")
    sessions = [one.facts for one in read_schedule(desk.run.folder / SCHEDULE_FILE) if isinstance(one, SessionBegun)]
    assert [one["config"]["replay"]["capacity"] for one in sessions] == [700, 400]
    assert sessions[0]["config_digest"] != sessions[1]["config_digest"]


def test_a_ring_may_grow_and_a_limit_may_go(desk: Desk) -> None:
    with desk.learner() as first:
        desk.train(first, entries=25)
        first.checkpoint(wait=True)
        rows = first.parts.ring.sampleable_rows()
    desk.change(replay={"capacity": 3000}, rate_limit={"samples_per_insert": None, "min_size_to_sample": 10_000})
    with desk.learner() as second:
        np.testing.assert_array_equal(second.parts.ring.sampleable_rows(), rows)
        # More is asked for than the ring holds: it is filled up first.
        assert second.parts.limiter.filling


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"hidden": [32]}, ["algorithm.options.hidden: was [16], is [32]"]),
        (
            {"hidden": [16, 16], "normalize_obs": False, "tau": 0.5},
            [
                "algorithm.options.hidden: was [16], is [16, 16]",
                "algorithm.options.normalize_obs: was None, is False",
                "algorithm.options.tau: was None, is 0.5",
            ],
        ),
        ({"normalize_obs": False}, ["algorithm.options.normalize_obs: was None, is False"]),
    ],
)
def test_what_may_not_change_is_refused_with_key_and_both_values(
    desk: Desk, options: dict[str, Any], lines: list[str]
) -> None:
    with desk.learner() as first:
        desk.train(first, entries=12)
        first.checkpoint(wait=True)
    before = (desk.run.folder / SCHEDULE_FILE).read_bytes()
    desk.change(algorithm={"options": {**desk.run.config.algorithm.options, **options}})
    with pytest.raises(UserError) as refused, desk.learner():
        pass
    told = str(refused.value).splitlines()
    assert [line.removeprefix("  - ") for line in told if line.startswith("  - ")] == lines
    assert told[-1] == "Set it back, or start a new run with it."
    # Nothing was changed by trying.
    assert (desk.run.folder / SCHEDULE_FILE).read_bytes() == before


def test_a_state_of_another_clawq_or_run_is_refused(desk: Desk) -> None:
    checkpoints = Checkpoints(desk.run.checkpoints)
    state = {"tag": desk.run.tag, "run": desk.run.id, "env": desk.run.spec.fingerprint, "format": 1}
    for spoil, words in (
        ({}, r"format 1; this clawq reads format 2"),
        ({"tag": "0" * 32, "run": "other"}, r"is of run other, not of lineage"),
        ({"env": "other"}, r"another environment spec"),
    ):
        checkpoints.save({**state, **spoil}, 1)
        with pytest.raises(CheckpointInvalid, match=words):
            find_state(checkpoints, desk.run, desk.said.append)


@pytest.mark.parametrize("replay", [{}, PRIORITISED], ids=["uniform", "prioritised"])
def test_what_the_log_has_no_more_is_told_and_the_twin_goes_on_without_it_too(
    tmp_path: Path, redis_servers: EmbeddedRedis, replay: dict[str, Any]
) -> None:
    desk = Desk(tmp_path, redis_servers, replay)
    with desk.learner() as first:
        desk.train(first, entries=20)
        first.checkpoint(wait=True)
        size, placed = first.parts.ring.size, first.parts.ring.layout().placed
    # Given streams that were cut while nobody looked: the oldest of one slot, and some in the midst of another.
    lost = [one for one in placed if one.slot == "w-0"][:3] + [one for one in placed if one.slot == "w-1"][2:4]
    for one in lost:
        assert desk.lineage.data.xdel(desk.lineage.keys.stream(one.slot), f"{one.epoch}-{one.seq}") == 1
    with desk.learner() as second:
        parts = second.parts
        steps = size - parts.ring.size
        assert f"of {len(lost)} fragments are in the log no more, and are missing" in desk.said[-1]
        assert steps > 0
        assert parts.ring.check_valid() == (True, "")
        desk.train(second)
        learned = become(parts)
    twin_parts, fetch = twin(desk.run, tmp_path / "log")
    records = read_schedule(desk.run.folder / SCHEDULE_FILE)
    learning.apply(records, fetch, twin_parts, make_examiner(desk.run))
    applied = become(twin_parts)
    assert twin_parts.ring.size == parts.ring.size
    for name in ("algorithm", "limiter", "updates", "env_steps"):
        assert list(differences(learned[name], applied[name])) == [], name
    assert torch.equal(learned["sampler"]["generator"], applied["sampler"]["generator"])
    np.testing.assert_array_equal(parts.ring.valid_slots, twin_parts.ring.valid_slots)
    desk.lineage.close()


def test_what_the_streams_have_no_more_comes_from_the_archive(desk: Desk, tmp_path: Path) -> None:
    with desk.learner() as first:
        desk.train(first, entries=20)
        first.checkpoint(wait=True)
        before = become(first.parts)
        placed = first.parts.ring.layout().placed
    writer = ArchiveWriter(desk.run.archive, desk.run.tag, ArchiveLimits())
    for one in placed:
        payload = (tmp_path / "log" / f"{one.slot}_{one.epoch}_{one.seq}").read_bytes()
        assert writer.append(Entry(one.slot, one.epoch, one.seq, payload))
    writer.close()
    # Given a Redis that holds nothing of it any more
    for slot in {one.slot for one in placed}:
        last = max((one.epoch, one.seq) for one in placed if one.slot == slot)
        desk.lineage.data.xtrim(desk.lineage.keys.stream(slot), minid=f"{last[0]}-{last[1] + 1}", approximate=False)
    with desk.learner() as second:
        assert "missing" not in desk.said[-1]
        assert list(differences(become(second.parts), before)) == []


def test_with_nothing_of_the_log_left_learning_begins_again_when_the_ring_is_filled(desk: Desk) -> None:
    with desk.learner() as first:
        desk.train(first, entries=20)
        first.checkpoint(wait=True)
        size, updates = first.parts.ring.size, first.parts.updater.updates
        slots = {one.slot for one in first.parts.ring.layout().placed}
    for slot in slots:
        desk.lineage.data.xtrim(desk.lineage.keys.stream(slot), maxlen=0, approximate=False)
    with desk.learner() as second:
        parts = second.parts
        assert f"; {size} env steps of" in desk.said[-1]
        assert parts.ring.size == 0
        assert parts.ring.check_valid() == (True, "")
        # No burst of updates on nothing, and none to catch up.
        assert parts.limiter.filling
        assert parts.limiter.check_valid() == (True, "")
        assert parts.updater.updates == updates


def test_changes_name_every_key_that_differs() -> None:
    before = {"a": 1, "b": {"c": [1], "d": None}, "same": 0}
    now = {"a": 1.5, "b": {"c": [2], "e": "x"}, "same": 0}
    assert changes(before, now) == [
        "a: was 1, is 1.5",
        "b.c: was [1], is [2]",
        "b.e: was None, is x",
    ]
