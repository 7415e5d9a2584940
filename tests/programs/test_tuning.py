"""Tuning: a change takes effect whole or not at all, and the schedule's facts do again what was done live."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawq.algorithms.td3_learner import Td3
from clawq.config import RunConfig
from clawq.config_file import parse_config
from clawq.errors import ConfigError
from clawq.programs import tuning
from clawq.programs.parts import Outside, Parts, make_parts
from clawq.programs.run import Run
from clawq.programs.schedule import SCHEDULE_FILE, LiveChange, read_schedule
from clawq.testing.experience import RUN, SPEC
from clawq.transport.memory import MemoryTransport


def config() -> RunConfig:
    raw = {
        "name": "test",
        "environment": {"name": "point", "num_envs": 4},
        "algorithm": {"name": "td3", "options": {"hidden": [8]}},
        "replay": {"capacity": 5000, "batch_size": 16, "sampler": "prioritized"},
        "rate_limit": {"samples_per_insert": 2, "min_size_to_sample": 40, "error_buffer": 600},
    }
    return parse_config(raw, "test")


class Windows:
    """The link, as far as tuning needs it."""

    stream_budget_bytes = 100_000_000

    def __init__(self) -> None:
        self.allowed: list[int] = []

    def allow(self, window_bytes: int) -> None:
        self.allowed.append(window_bytes)


def parts_of(folder: Path) -> Parts:
    link: Any = Windows()
    outside = Outside(MemoryTransport().source(), link, lambda entry, reason, detail: None, lambda: 0)
    return make_parts(Run("r1", RUN, folder, config(), SPEC), "cpu", outside)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = parts_of(tmp_path)
    parts.recorder.begin({"version": 0})
    yield parts
    parts.recorder.close()


def state(parts: Parts) -> dict[str, Any]:
    """Everything that tuning may change."""
    algorithm, sampler = parts.updater.algorithm, parts.sampler
    assert isinstance(algorithm, Td3)
    return {
        "limiter": (parts.limiter.state_dict(), parts.limiter.bounds),
        "rule": (parts.ageing.rule, parts.consumer.staleness),
        "rates": (algorithm.options.lr_actor, algorithm.options.lr_critic),
        "priorities": (sampler._alphas, sampler._betas, sampler._epsilon),  # type: ignore[attr-defined]
        "budget": parts.budget.budget,
    }


def test_every_live_setting_reaches_what_it_is_about(parts: Parts) -> None:
    words = [
        *("rate_limit.samples_per_insert=4", "rate_limit.min_size_to_sample=80", "staleness.hard=7"),
        *("algorithm.options.lr_actor=0.5", "replay.prioritized.beta=0.9", "budget.env_steps=1000"),
        *("redis.window_bytes=200000", "learner.publish_interval_s=9"),
    ]
    tuned, changes = parts, tuning.take(parts, words)
    assert len(changes) == len(words)
    assert tuned.limiter.bounds == (4 * 80 - 600, 4 * 80 + 600)
    assert tuned.ageing.rule.hard == tuned.consumer.staleness.hard == 7
    algorithm: Any = tuned.updater.algorithm
    assert algorithm.options.lr_actor == 0.5
    assert state(tuned)["priorities"][1].start == 0.9
    assert tuned.budget.budget.env_steps == 1000
    link: Any = tuned.link
    assert link.allowed == [200_000]
    assert tuned.config.learner.publish_interval_s == 9


def test_a_change_of_which_a_part_is_impossible_changes_nothing(parts: Parts) -> None:
    before = state(parts)
    # Only the learner knows the size of a fragment: the configuration's rules let this pass.
    words = ["algorithm.options.lr_actor=0.5", "staleness.hard=7", "rate_limit.error_buffer=100"]
    with pytest.raises(ConfigError, match="for ever"):
        tuning.take(parts, words)
    parts.recorder.flush()
    assert state(parts) == before
    assert not any(isinstance(record, LiveChange) for record in read_schedule(parts.recorder.path))


@pytest.mark.parametrize("words", [None, "rate_limit.samples_per_insert=4", [4], {"a": 1}])
def test_what_is_no_list_of_words_is_refused(parts: Parts, words: Any) -> None:
    with pytest.raises(ConfigError, match="list of key=value"):
        tuning.take(parts, words)


def test_the_schedule_does_again_what_was_changed_live_one_after_another(parts: Parts, tmp_path: Path) -> None:
    tuned = parts
    for words in (
        ["rate_limit.samples_per_insert=4", "staleness.hard=7"],
        ["rate_limit.min_size_to_sample=60", "algorithm.options.lr_critic=0.25"],
        ["staleness.hard=7"],
        ["staleness.on_stale=reweight", "replay.prioritized.alpha=0.9"],
    ):
        tuned.limiter.inserted(100)
        tuning.take(tuned, words)
    tuned.recorder.flush()
    again = parts_of(tmp_path / "again")
    records = [record for record in read_schedule(tmp_path / SCHEDULE_FILE) if isinstance(record, LiveChange)]
    # What changed nothing is not recorded.
    assert [record.kind for record in records] == ["tune"] * 3
    for record, inserts in zip(records, (100, 100, 200), strict=True):
        again.limiter.inserted(inserts)
        tuning.apply(again, record.facts)
    assert state(again) == state(tuned)
