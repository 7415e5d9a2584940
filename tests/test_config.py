"""Configuration files: what is read, what is refused and in which words. The plugins are small ones made here."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clawq.config import Prioritized, Replay, RunConfig, Staleness
from clawq.config_file import load_config, parse_config, to_yaml
from clawq.config_rules import broken_rules
from clawq.config_yaml import apply_overrides
from clawq.errors import ConfigError

PLUGINS = """
from enum import Enum
from typing import Annotated
from pydantic import BaseModel, ConfigDict, Field, model_validator

class Hand(Enum):
    left = "left"
    right = "right"

class EnvironmentOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    id: str
    frame_skip: Annotated[int, Field(ge=1)] = 5
    hand: Hand = Hand.right
    sizes: tuple[int, ...] = (64, 64)

class AlgorithmOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: Annotated[float, Field(gt=0)] = 3e-4
    lr_end: float = 1e-4

    @model_validator(mode="after")
    def check(self):
        if self.lr_end > self.lr:
            raise ValueError("lr_end must not be above lr; the rate only falls")
        return self

class environment:
    Options = EnvironmentOptions

class algorithm:
    Options = AlgorithmOptions

class no_plugin:
    pass
"""

GOOD = """\
name: demo
environment:
  name: toy-env
  options: {id: Reach}
algorithm:
  name: toy-algorithm
"""


#: Rounds of 2 actors · 16 envs · 64 steps.
SYNC = ("sync.actors=2", "sync.quota_steps=64", "rate_limit.samples_per_insert=8")


@pytest.fixture(autouse=True)
def toy_plugins(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "toy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[clawq.environments]\ntoy-env = toy_config_plugins:environment\nbad-env = toy_config_plugins:no_plugin\n"
        "broken-env = toy_absent:plugin\n"
        "[clawq.algorithms]\ntoy-algorithm = toy_config_plugins:algorithm\n"
    )
    (folder / "toy_config_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file


def mistakes(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert caught.value.source == str(file)
    return list(caught.value.mistakes)


def test_defaults_are_filled_in_even_those_of_the_plugins(good: Path) -> None:
    config = load_config(good)
    assert config.replay.batch_size == 256
    assert config.environment.options == {"id": "Reach", "frame_skip": 5, "hand": "right", "sizes": [64, 64]}
    assert config.algorithm.options == {"lr": 3e-4, "lr_end": 1e-4}


def test_the_shown_configuration_reads_back_equal(good: Path, tmp_path: Path) -> None:
    config = load_config(good, ["seed=7", "rate_limit.samples_per_insert=8", "algorithm.options.lr=1e-3"])
    shown = tmp_path / "shown.yaml"
    shown.write_text(to_yaml(config))
    assert load_config(shown) == config
    assert parse_config(config.model_dump(mode="json"), "run.json") == config


@pytest.mark.parametrize("number", [1e308, 10**400, 2.0**63, -(2**63) - 1, float("nan")])
def test_numbers_that_nothing_can_count_to_are_mistakes_wherever_they_come_from(good: Path, number: float) -> None:
    raw = load_config(good).model_dump(mode="json")
    raw["redis"]["data_memory_mb"] = number
    with pytest.raises(ConfigError, match=r"redis\.data_memory_mb: "):
        parse_config(raw, "a run record")
    with pytest.raises(ConfigError, match=r"redis\.data_memory_mb: "):
        load_config(good, [f"redis.data_memory_mb={number}"])


@given(name=st.sampled_from(["1e3", "on", "null", "0x10", "1_000", "2020-01-01", "a b", "~"]))
def test_words_that_look_like_something_else_survive_the_way_through_yaml(name: str) -> None:
    from clawq.config_yaml import _parse_yaml, dump_yaml

    assert _parse_yaml(dump_yaml({"id": name, "list": [name]})) == {"id": name, "list": [name]}


def test_yaml_1_2_numbers_are_numbers_and_on_is_a_word(good: Path) -> None:
    config = load_config(good, ["algorithm.options.lr=1e-3", "replay.capacity=2e5", "environment.options.id=on"])
    assert config.algorithm.options["lr"] == 0.001
    assert (config.replay.capacity, type(config.replay.capacity)) == (200_000, int)
    assert config.environment.options["id"] == "on"
    assert load_config(good, ["environment.options.frame_skip=2.0"]).environment.options["frame_skip"] == 2


def test_overrides_apply_in_order_and_make_sections(good: Path) -> None:
    config = load_config(good, ["replay.n_step=3", "budget.seconds=10", "replay.n_step=5", "metrics=[jsonl]"])
    assert (config.replay.n_step, config.budget.seconds, config.metrics) == (5, 10, ("jsonl",))
    assert load_config(good, ["replay=", "replay.n_step=2"]).replay.n_step == 2


def test_all_mistakes_are_told_at_once_with_path_value_and_rule(good: Path) -> None:
    told = mistakes(
        good,
        "replay.n_step=0",
        "actors.on_full=explode",
        "environment.options.frame_skip=0",
        "algorithm.options.lr=-1",
        "exploration.noise_min=0.9",
        "metrics=[jsonl, cvs]",
        "learner.device=tpu",
    )
    found = "\n".join(told)
    assert len(told) == 7
    for expected in (
        r"replay\.n_step: must be greater than or equal to 1, got 0",
        r"actors\.on_full: must be 'block', 'drop_oldest' or 'drop_newest', got 'explode'",
        r"environment\.options\.frame_skip: must be greater than or equal to 1, got 0",
        r"algorithm\.options\.lr: must be greater than 0, got -1",
        r"exploration\.noise_min: 0\.9 is above noise_max 0\.4",
        r"metrics: no metric writer is named 'cvs'.*valid: jsonl, tensorboard",
        r"learner\.device: .*got 'tpu'",
    ):
        assert re.search(expected, found), expected
    assert all(line.endswith("(from the command line)") for line in told)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("replay.batchsize=1", "replay.batchsize: unknown key; did you mean batch_size?"),
        ("batch_size=1", "batch_size: unknown key; did you mean replay.batch_size?"),
        ("enviroment={}", "enviroment: unknown key; did you mean environment?"),
        ("environment.options.frameskip=2", "environment.options.frameskip: unknown key; did you mean frame_skip?"),
        ("zzz=1", "zzz: unknown key (valid: name, seed, folder"),
        (
            "watchdog.memory_mb=500",
            "watchdog.memory_mb: was removed in clawq 0.1.0: actors.recycle.memory_mb is",
        ),
        ("actors.max_policy_lag=8", "actors.max_policy_lag: was removed in clawq 0.1.0: staleness.hard is the lag"),
    ],
)
def test_an_unknown_key_is_answered_with_its_path_and_the_nearest(good: Path, override: str, expected: str) -> None:
    [told] = mistakes(good, override)
    assert told.startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('replay.batch_size="8"', "must be a valid integer, got '8'"),
        ("environment.num_envs=true", "must be a valid integer, got True"),
        ("environment.num_envs=2.5", "must be a valid integer, got 2.5"),
        ("replay.gamma=.inf", "must be a finite number"),
        ("environment.options.id=2020-01-01", "put it in quotes"),
        ("environment.options={1: 2}", "keys must be words"),
        ("environment.options.hand=middle", "must be 'left' or 'right'"),
        ("environment.options=null", "got None"),
        ("algorithm.options.lr=1e-5", "lr_end must not be above lr; the rate only falls"),
        ("environment=null", "environment: "),
        ("name=Not a name", "name: "),
        ("seed=-1", "seed: must be greater than or equal to 0, got -1"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(good: Path, override: str, expected: str) -> None:
    assert expected in "\n".join(mistakes(good, override))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("environment.name=toy-emv", "Did you mean 'toy-env'?"),
        ("environment.name=broken-env", "could not be loaded: ModuleNotFoundError"),
        ("environment.name=bad-env", "has no Options model"),
        ("algorithm.name=toy-env", "no installed plugin is named 'toy-env'"),
    ],
)
def test_a_wrong_plugin_name_is_a_mistake_of_the_configuration(good: Path, override: str, expected: str) -> None:
    [told] = mistakes(good, override)
    assert expected in told


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["exploration.noise_max=0.01"], "exploration.noise_min: 0.05 is above noise_max 0.01"),
        (["replay.capacity=200", "rate_limit.min_size_to_sample=100"], "a batch is drawn from the rows of the ring"),
        (["replay.capacity=300", "environment.num_envs=100", "rate_limit.min_size_to_sample=9"], "half of the ring"),
        (["replay.capacity=1000"], "no update would ever be made"),
        (["rate_limit.error_buffer=10"], "means nothing while samples_per_insert is null"),
        (["rate_limit.samples_per_insert=8", "rate_limit.error_buffer=255"], "deadlock"),
        (["staleness.target=4", "staleness.hard=3"], "paced to a lag at which the learner drops"),
        (["staleness.target=1001"], "staleness.target: 1001 is above 1000 weights versions"),
        (["staleness.hard=1000001"], "staleness.hard: 1000001 is above 1000000 weights versions"),
        (["staleness.hard=9999999999999999"], "null allows any lag"),
        (["staleness.on_stale=reweight"], "means nothing while staleness.hard is null"),
        (["budget.target_return=1", "evaluation.interval_s=null"], "budget.target_return: needs evaluations"),
        (["budget.target_success=1", "evaluation.interval_s=null"], "budget.target_success: needs evaluations"),
        ([*SYNC, "rate_limit.samples_per_insert=null"], "decides how many updates follow each round"),
        ([*SYNC, "rate_limit.error_buffer=500"], "rate_limit.error_buffer: means nothing with sync"),
        ([*SYNC, "sync.fragment_steps=65"], "sync.fragment_steps: 65 is above quota_steps 64"),
        ([*SYNC, "sync.quorum=0.5"], "sync.quorum: 0.5 means nothing while deadline_s is null"),
        ([*SYNC, "sync.deadline_s=5"], "sync.deadline_s: means nothing while quorum is 1"),
        ([*SYNC, "replay.capacity=4000"], "a round could overwrite itself"),
        ([*SYNC, "staleness.hard=0"], "staleness.hard: 0 is below sync.deterministic_lag 1"),
        ([*SYNC, "staleness.target=2"], "staleness.target: means nothing with sync"),
        ([*SYNC, "actors.max_actors=1"], "sync.actors: 2 is above actors.max_actors 1"),
        ([*SYNC, "actors.on_full=drop_oldest"], "actors.on_full: drop_oldest cannot work with sync"),
        (["redis.broker_url=http://x"], "must begin with one of redis://"),
        (["redis.stream_bytes=900000000"], "is above 55% of redis.data_memory_mb"),
        (["redis.stream_bytes=1000000", "redis.window_bytes=1000001"], "would let a single actor fill the server"),
    ],
)
def test_settings_that_cannot_work_together_are_refused_with_the_reason(
    good: Path, overrides: list[str], expected: str
) -> None:
    [told] = mistakes(good, *overrides)
    assert expected in told


@pytest.mark.parametrize(
    "overrides",
    [
        ["rate_limit.samples_per_insert=8", "rate_limit.error_buffer=256"],
        [*SYNC, "sync.deadline_s=5", "sync.quorum=0.5", "sync.deterministic_lag=0", "replay.capacity=4096"],
        ["replay.capacity=2000"],
        ["staleness.target=3", "staleness.hard=3"],
        ["staleness.target=1000", "staleness.hard=1000000"],
        ["redis.data_url=redis://h", "redis.stream_bytes=900000000"],
        ["redis.data_url=redis://h", "redis.window_bytes=900000000"],
        ["evaluation.interval_s=null"],
        ["redis.data_memory_mb=64"],
    ],
)
def test_settings_at_the_edge_that_do_work_are_taken(good: Path, overrides: list[str]) -> None:
    assert isinstance(load_config(good, overrides), RunConfig)


def test_a_url_with_a_password_is_not_repeated_in_the_mistake(good: Path) -> None:
    assert "secret" not in "\n".join(mistakes(good, "redis.data_url=http://u:secret@h"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "must be a mapping of keys to values at the top, got a list"),
        (b"just words", "must be a mapping of keys to values at the top, got a word"),
        (b"name: \xff\xfe", "is not UTF-8 text (byte 6"),
        (b"name: a\nname: b\n", "line 2, column 1: found duplicate key"),
        (b"name: [1, 2\n", "is not valid YAML: line 2, column 1"),
        (b"name: !!python/object/apply:os.system [echo]\n", "could not determine a constructor"),
        (b"a: &a\n  b: *a\n", "an anchor contains itself"),
        (b"[" * 1500, "is nested deeper than 32 levels"),
        (b"name: a\x00b\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_in_plain_words(tmp_path: Path, text: bytes, expected: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_bytes(text)
    assert expected in mistakes(file)[0]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_text(GOOD, encoding="utf-8-sig")
    assert load_config(file).name == "demo"


def test_a_missing_file_is_answered_with_the_files_that_are_there(good: Path, tmp_path: Path) -> None:
    assert str(good) in mistakes(tmp_path / "goood.yaml")[0]
    assert "cannot be read: Is a directory" in mistakes(tmp_path)[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("replay.batch_size", "must look like key.path=value"),
        ("=3", "must look like key.path=value"),
        ("replay..n_step=3", "must look like key.path=value"),
        ("name.first=3", "name is a word, it has no keys"),
        ("name=[1", "name: is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_applied_is_told(good: Path, override: str, expected: str) -> None:
    assert expected in "\n".join(mistakes(good, override))


def test_the_required_keys_are_told(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    file.write_text("seed: 1\n")
    assert mistakes(file) == ["name: is required", "environment: is required"]


keys = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(st.integers() | st.none(), lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8)


@given(tree=st.dictionaries(keys, trees, max_size=4), path=st.lists(keys, min_size=1, max_size=4), value=st.integers())
def test_an_override_sets_its_key_or_says_why_not(tree: dict[str, object], path: list[str], value: int) -> None:
    told = list(apply_overrides(tree, [f"{'.'.join(path)}={value}"]))
    at: object = tree
    for key in path:
        at = at.get(key) if isinstance(at, dict) else None
    assert (at == value) == (not told)


@pytest.mark.parametrize(
    ("replay", "limit", "told"),
    [
        (
            {"sampler": "fifo"},
            {"samples_per_insert": 4, "min_size_to_sample": 8},
            "4 cannot be kept",
        ),
        ({"sampler": "fifo"}, {"samples_per_insert": 1}, "min_size_to_sample: 2000 is above replay.batch_size"),
        (
            {"sampler": "fifo", "batch_size": 600, "capacity": 1000},
            {"samples_per_insert": 1, "min_size_to_sample": 100},
            "batch_size: 600 is more than half of",
        ),
        ({"sampler": "sequence", "sequence": {"length": 4, "burn_in": 4}}, {}, "burn_in: 4 is not below length 4"),
        ({"sampler": "sequence", "n_step": 3}, {}, "n_step: 3 means nothing with sampler: sequence"),
        ({"sampler": "fifo", "hindsight": {}}, {}, "hindsight: cannot be used with sampler: fifo"),
        ({"sampler": "sequence", "hindsight": {}}, {}, "hindsight: cannot be used with sampler: sequence"),
        ({"sampler": "sequence", "demonstrations": {"path": "x"}}, {}, "demonstrations: cannot be used with sampler"),
        ({"batch_size": 1, "demonstrations": {"path": "x"}}, {}, "batch_size: 1 leaves no room for demonstrations"),
    ],
)
def test_ways_of_sampling_that_cannot_work_are_refused(
    replay: dict[str, Any], limit: dict[str, Any], told: str
) -> None:
    config = RunConfig.model_validate(
        {"name": "t", "environment": {"name": "point"}, "replay": replay, "rate_limit": limit}
    )
    sections = {name: one for name in RunConfig.model_fields if (one := getattr(config, name)) is not None}
    [mistake] = broken_rules(sections)
    assert told in mistake


def test_sequences_are_not_reweighted_since_their_steps_have_one_weight_in_common() -> None:
    staleness = Staleness(hard=3, on_stale="reweight")
    [mistake] = broken_rules({"replay": Replay(sampler="sequence"), "staleness": staleness})
    assert "staleness.on_stale: reweight cannot be used with sampler: sequence" in mistake
    assert not broken_rules({"replay": Replay(), "staleness": staleness})


@pytest.mark.parametrize("epsilon", [1e-300, 1e300])
def test_priorities_that_are_no_float32_are_refused(epsilon: float) -> None:
    with pytest.raises(ValidationError, match="epsilon"):
        Prioritized(epsilon=epsilon)
