"""Commands that need a run at work, given one that is over: that it ended, when, how, and what to do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import redis

from clawq.cli.main import run
from clawq.config import RunConfig
from clawq.programs.endings import how_it_ended
from clawq.programs.run import Run
from clawq.testing.experience import SPEC
from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.server import EmbeddedRedis

COMMANDS = [
    ("status", "{}"),
    ("tune", "{}", "staleness.hard=3"),
    ("tune", "{}"),
    ("learner", "stop", "{}"),
    ("reader", "ls", "{}"),
    ("reader", "drop", "{}", "keeper"),
    ("log", "quarantine", "{}", "--list"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/old` below the current folder: a run that finished; and no Redis."""
    for variable in ("CLAWQ_BROKER_URL", "CLAWQ_DATA_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    raw: dict[str, Any] = {"name": "old", "environment": {"name": "point"}, "budget": {"seconds": 60}}
    made = Run("old", new_tag(), Path("runs/old"), RunConfig.model_validate(raw), SPEC)
    made.folder.mkdir(parents=True)
    made.save()
    report = made.folder / "report.json"
    report.write_text(json.dumps({"ended": "60 s of wall time", "resumable": False}))
    os.utime(report, (1_764_450_000, 1_764_450_000))
    return made.folder


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("with_redis", [False, True])
def test_a_run_that_has_ended_is_told_with_when_and_how_and_what_to_do(
    folder: Path,
    words: tuple[str, ...],
    with_redis: bool,
    redis_servers: EmbeddedRedis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if with_redis:
        monkeypatch.setenv("CLAWQ_BROKER_URL", redis_servers.broker_url)
        monkeypatch.setenv("CLAWQ_DATA_URL", redis_servers.data_url)
    assert run([word.format("old") for word in words]) == 2
    told = capsys.readouterr().err
    assert "run old has ended on 2025-11-" in told
    assert "60 s of wall time" in told
    assert "clawq up --resume runs/old budget.seconds=120" in told
    assert "clawq log ls runs/old" in told


def test_a_run_that_was_stopped_or_killed_goes_on_and_a_damaged_report_is_told(folder: Path) -> None:
    report = folder / "report.json"
    report.write_text(json.dumps({"ended": "stopped by the user", "resumable": True}))
    told = how_it_ended("old")
    assert told is not None
    assert "was stopped on" in told
    assert "Go on with it: `clawq up --resume runs/old`" in told
    report.write_text(json.dumps({"ended": "1000 env steps", "resumable": False}))
    assert "budget.seconds=..." in str(how_it_ended("old")), "it had no budget in env steps"
    report.unlink()
    assert "was killed" in str(how_it_ended(str(folder)))
    report.write_text("{")
    assert run(["status", "old"]) == 2
    assert how_it_ended("nobody") is None


def test_a_killed_learner_that_still_stands_in_the_registry_is_told_at_once(
    named_servers: EmbeddedRedis, broker_client: redis.Redis, run_keys: RunKeys, capsys: pytest.CaptureFixture[str]
) -> None:
    name, registry = f"dead-{run_keys.tag[:8]}", RunRegistry(broker_client)
    config = {"name": "dead", "environment": {"name": "point"}}
    registry.add(RunRecord(name, run_keys.tag, config, state="running", learner={"folder": "runs/dead"}))
    try:
        for words in (("log", "quarantine", name, "--list"), ("tune", name, "staleness.hard=3")):
            assert run(list(words)) == 2
            told = capsys.readouterr().err
            assert f"run {name} has no living learner: it was killed" in told
            assert "clawq up --resume runs/dead KEY=VALUE" in told
        assert run(["status", name]) == 0
        assert "no living learner" in capsys.readouterr().out
    finally:
        registry.remove(name)


@pytest.mark.parametrize(
    ("word", "lacks"),
    [("empty", "there is no run 'empty'"), ("./empty", "it has no run.json"), ("./no", "no such folder")],
)
def test_what_is_no_run_folder_is_told_as_the_path_that_it_is(
    named_servers: EmbeddedRedis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    lacks: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert run(["log", "ls", word]) == 2
    assert lacks in capsys.readouterr().err
