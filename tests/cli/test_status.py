"""`clawq status` over real servers: what a learner and workers wrote is what is shown."""

import json
import time
from collections.abc import Iterator

import pytest
import redis

from clawq.cli.main import run
from clawq.transport.control import Board, Heartbeat, Heartbeats, RunRecord, RunRegistry
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis


@pytest.fixture
def demo(
    redis_servers: EmbeddedRedis,
    broker_client: redis.Redis,
    data_client: redis.Redis,
    run_keys: RunKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """A registered run with numbers on its board and one worker."""
    monkeypatch.setenv("CLAWQ_BROKER_URL", redis_servers.broker_url)
    monkeypatch.setenv("CLAWQ_DATA_URL", redis_servers.data_url)
    run_id = f"demo-{run_keys.tag[:8]}"
    registry = RunRegistry(broker_client)
    created_ms = int(time.time() * 1000)
    registry.add(RunRecord(run_id, run_keys.tag, state="running", created_ms=created_ms, learner={"host": "h1"}))
    Board(data_client, run_keys).write({"env_steps": 12_345.0, "eval/success": 0.5, "stage": "training"})
    Heartbeats(data_client, run_keys).beat(Heartbeat("worker-a", slots=4, busy=3, host="h2", pid=77))
    yield run_id
    registry.remove(run_id)


def test_runs_are_listed_with_their_numbers(demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert f"{demo}  running\n  training | env steps 12.3k | evaluation success 50% | drops none\n" in shown


def test_one_run_is_shown_with_its_workers_and_learner(demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", demo]) == 0
    shown = capsys.readouterr().out
    assert "worker-a: 3 of 4 slots busy (host h2, pid 77)" in shown
    assert "host h1" in shown


def test_json_is_for_programs(demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", demo, "--json"]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["run_id"], facts["metrics"]["env_steps"]) == (demo, 12_345.0)
    assert facts["workers"]["worker-a"]["busy"] == 3


def test_an_unknown_run_is_answered_with_the_nearest(demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", demo[:-1]]) == 2
    assert f"did you mean {demo}?" in capsys.readouterr().err


def test_watching_ends_when_the_run_is_over(
    demo: str, broker_client: redis.Redis, run_keys: RunKeys, capsys: pytest.CaptureFixture[str]
) -> None:
    RunRegistry(broker_client).add(RunRecord(demo, run_keys.tag, state="done"))
    assert run(["status", demo, "--watch"]) == 0
    assert "training | env steps 12.3k" in capsys.readouterr().out


def test_without_a_redis_it_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CLAWQ_BROKER_URL", raising=False)
    monkeypatch.delenv("CLAWQ_DATA_URL", raising=False)
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path))
    assert run(["status"]) == 2
    assert "CLAWQ_BROKER_URL" in capsys.readouterr().err


def test_a_redis_that_is_away_is_status_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAWQ_BROKER_URL", f"unix://{tmp_path}/absent")
    monkeypatch.setenv("CLAWQ_DATA_URL", f"unix://{tmp_path}/absent")
    assert run(["status"]) == 3
    assert "cannot be reached" in capsys.readouterr().err


def test_watching_a_run_that_is_taken_off_the_list_ends(
    demo: str, broker_client: redis.Redis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = RunRegistry(broker_client)
    # The pause between two looks is when the learner ends.
    monkeypatch.setattr("clawq.cli.status.time.sleep", lambda _: registry.remove(demo))
    assert run(["status", "--watch", demo]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["training | env steps 12.3k | evaluation success 50% | drops none", "the run is over"]
