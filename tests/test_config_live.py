"""What may be changed while a run goes on: the same rules as for a file, and a reason for what may not."""

import pytest

from clawq.config import RunConfig
from clawq.config_file import parse_config
from clawq.config_live import changed, is_live, live_values
from clawq.errors import ConfigError


def config(**sections: object) -> RunConfig:
    raw = {
        "name": "test",
        "environment": {"name": "point"},
        "rate_limit": {"samples_per_insert": 4},
        "replay": {"sampler": "prioritized"},
        **sections,
    }
    return parse_config(raw, "test")


def mistakes(*words: str, **sections: object) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        changed(config(**sections), words)
    return list(refused.value.mistakes)


def test_what_changes_is_told_with_old_and_new_value_and_what_does_not_is_left_out() -> None:
    words = ["rate_limit.samples_per_insert=8", "staleness.hard=20", "budget.seconds=60", "actors.max_actors=1000"]
    wanted, changes = changed(config(), words)
    assert changes == {
        "rate_limit.samples_per_insert": (4.0, 8.0),
        "staleness.hard": (None, 20),
        "budget.seconds": (None, 60.0),
    }
    assert (wanted.rate_limit.samples_per_insert, wanted.staleness.hard) == (8, 20)
    assert wanted.replay == config().replay


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("rate_limit.samples_per_inserts=8", "unknown key; did you mean samples_per_insert?"),
        ("ratelimit.samples_per_insert=8", "unknown key; did you mean rate_limit?"),
        ("watchdog.memory_mb=500", "was removed in clawq 0.1.0: actors.recycle.memory_mb is the limit"),
        ("samples_per_insert=8", "did you mean rate_limit.samples_per_insert?"),
        ("environment.num_envs=8", "is fixed for the life of a run"),
        ("environment.options.x=8", "is fixed for the life of a run"),
        ("replay.capacity=1000000", "--resume FOLDER replay.capacity=VALUE"),
        ("algorithm.options.tau=0.1", "cannot be changed while the run goes on"),
        ("redis.data_url=redis://h", "cannot be changed while the run goes on"),
        ("budget={}", "cannot be changed while the run goes on"),
        ("rate_limit.samples_per_insert=0", "must be greater than 0"),
        ("rate_limit.samples_per_insert=null", "a limit cannot come or go"),
        ("rate_limit.error_buffer=1", "deadlock"),
        ("rate_limit.min_size_to_sample=100000000", "no update would ever be made"),
        ("redis.window_bytes=900000000", "above the stream budget"),
        ("algorithm.options.lr_actor=7", "must be less than or equal to 1"),
        ("nonsense", "must look like key.path=value"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_the_reason(word: str, reason: str) -> None:
    [told] = mistakes(word)
    assert reason in told


def test_all_mistakes_are_told_at_once() -> None:
    assert len(mistakes("environment.num_envs=8", "rate_limit.nonsense=1", "replay.capacity=9")) == 3
    assert len(mistakes("rate_limit.min_size_to_sample=0", "staleness.decay=2")) == 2


def test_priorities_of_a_uniform_sampler_mean_nothing() -> None:
    [told] = mistakes("replay.prioritized.beta=0.5", replay={"sampler": "uniform"})
    assert "means nothing while replay.sampler is uniform" in told


def test_everything_that_is_listed_as_live_can_be_set_to_what_it_is() -> None:
    values = live_values(config())
    assert all(is_live(key) for key in values)
    assert {"rate_limit.samples_per_insert", "staleness.target", "algorithm.options.lr_actor"} <= values.keys()
    words = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    assert changed(config(), words) == (config(), {})
