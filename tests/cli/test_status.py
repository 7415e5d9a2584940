"""`clawq status` over real servers: what a learner and workers wrote is what is shown."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from clawq.cli.main import run
from clawq.cli.screen import Snapshot
from clawq.cli.status import View
from clawq.errors import StoreUnavailable
from clawq.transport.control import Board, Heartbeat, Heartbeats, RunRecord, RunRegistry
from clawq.transport.keys import RunKeys


@pytest.fixture
def demo(registered: str, data_client: redis.Redis, run_keys: RunKeys) -> str:
    """A registered run with numbers on its board and one worker."""
    Board(data_client, run_keys).write({"env_steps": 12_345.0, "eval/success": 0.5, "stage": "training"})
    Heartbeats(data_client, run_keys).beat(Heartbeat("worker-a", slots=4, busy=3, host="h2", pid=77))
    return registered


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


class Stall:
    """Every look at a run from the second to the last-but-one goes unanswered; `then` is called at each of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int, then: Callable[[], object]) -> None:
        self.look, self.looks, self.then, self.count = View.snapshot, looks, then, 0
        monkeypatch.setattr(View, "snapshot", lambda view, run: self.snapshot(view, run))
        monkeypatch.setattr("clawq.cli.status.time.sleep", lambda _: None)

    def snapshot(self, view: View, run: RunRecord) -> Snapshot:
        self.count += 1
        if 1 < self.count < self.looks:
            self.then()
            raise StoreUnavailable("Redis did not answer in time")
        return self.look(view, run)


def test_watching_goes_on_through_a_stall_and_tells_it(
    demo: str, broker_client: redis.Redis, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Stall(monkeypatch, looks=4, then=lambda: RunRegistry(broker_client).remove(demo))
    assert run(["status", "--watch", demo]) == 0
    numbers = "env steps 12.3k | evaluation success 50% | drops none"
    assert capsys.readouterr().out.splitlines() == [
        f"training | {numbers}",
        f"unknown | {numbers} | note Redis did not answer in time",
        f"training | {numbers}",
        "the run is over",
    ]


def test_watching_a_redis_that_stays_away_is_status_3(
    demo: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Stall(monkeypatch, looks=99, then=lambda: monkeypatch.setattr("clawq.cli.status._PATIENCE_S", -1.0))
    assert run(["status", "--watch", demo]) == 3
    assert "did not answer in time" in capsys.readouterr().err


def test_watching_ends_with_the_redis_of_this_machine(
    demo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget() -> None:
        monkeypatch.delenv("CLAWQ_BROKER_URL")
        monkeypatch.delenv("CLAWQ_DATA_URL")
        monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path))

    Stall(monkeypatch, looks=99, then=forget)
    assert run(["status", "--watch", demo]) == 0
    assert "the Redis of this machine has ended" in capsys.readouterr().out


def test_a_learner_that_is_not_on_this_data_redis_is_not_waited_for(
    demo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # It was killed, or only the broker was named, which then stands for both
    assert run(["learner", "stop", demo]) == 2
    told = capsys.readouterr().err
    assert "no living learner" in told
    assert "CLAWQ_DATA_URL" in told
