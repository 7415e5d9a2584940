"""`clawq up`, whole: embedded Redis, a Celery worker, actors, a learner, evaluation, pictures; and how it stops."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from clawq_process import Clawq
from PIL import Image
from processes import outliving

from clawq.transport.server import sweep_socket_folders

Eventually = Callable[..., None]


def processes_of(run_folder: Path) -> list[psutil.Process]:
    """Living processes that were told of this run's folder."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(run_folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.timeout(150)
def test_up_trains_shows_itself_and_leaves_nothing_running(clawq: Clawq, eventually: Eventually) -> None:
    # When a run is started
    up = clawq.up("point.yaml", "p1", "budget={seconds: 15}")
    # Then another terminal sees the same run while it trains
    eventually(lambda: clawq.status("p1").get("metrics", {}).get("updates", 0) > 50, "updates in status", 60)
    facts = clawq.status("p1")
    assert facts["metrics"]["env_steps"] > 0
    assert len(facts["workers"]) == 1
    tree = up.tree()
    # And it ends by itself when its budget is spent
    assert up.wait(100) == 0, up.output + clawq.logs("p1")
    report = clawq.report("p1")
    assert report["final_evaluation"]["success"] >= 0.9
    assert report["final_evaluation"]["episodes"] == 20
    # And all that it started is gone
    assert not outliving(tree, 2.0)
    assert not list((clawq.folder / "state").glob("redis*.json"))
    assert not list((clawq.folder / "state" / "redis").iterdir())
    # And its folder holds what was promised
    folder = clawq.runs / "p1"
    for name in ("config.yaml", "metrics.jsonl", "curve.png", "hand.gif", "report.json"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "checkpoints").glob("*.ckpt"))
    assert list((folder / "tb").iterdir())
    with Image.open(folder / "hand.gif") as animation:
        assert getattr(animation, "n_frames", 1) > 5
    # And the screen told what was going on, in plain lines, since this is no terminal
    for words in ("training", "evaluation return", "updates", "policy lag", "drops none", "final evaluation"):
        assert words in up.output
    # And every fragment is accounted for
    numbers = report["numbers"]
    assert numbers["produced_steps"] == numbers["env_steps"]
    assert numbers["gap_fragments"] == numbers["duplicates"] == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_by_a_signal_it_checkpoints_and_is_gone_in_10_s(
    clawq: Clawq, eventually: Eventually, number: int
) -> None:
    up = clawq.up("point.yaml", "p2", "budget={}", "evaluation.interval_s=null")
    eventually(lambda: any(line.get("updates", 0) > 50 for line in clawq.metrics("p2")), "updates", 60)
    status, took_s, left = up.stop(number)
    assert took_s < 10
    assert not left
    assert status == 0, up.output
    report = clawq.report("p2")
    assert report["resumable"]
    # And it can be resumed: counters go on, the weights version never goes back
    before = report["numbers"]
    again = clawq.start(
        "up", str(clawq.runs / "p2" / "config.yaml"), f"budget.env_steps={int(before['env_steps']) + 500}",
        "evaluation.final_episodes=2", "record.animation=false", "--resume", str(clawq.runs / "p2"),
    )  # fmt: skip
    assert again.wait(100) == 0, again.output + clawq.logs("p2")
    after = clawq.report("p2")["numbers"]
    assert after["env_steps"] >= before["env_steps"] + 500
    assert after["updates"] > before["updates"]
    assert after["weights_version"] > before["weights_version"]
    lines = clawq.metrics("p2")
    versions = [line["weights_version"] for line in lines if "weights_version" in line]
    assert versions == sorted(versions)


@pytest.mark.timeout(60)
def test_a_second_signal_ends_everything_at_once(clawq: Clawq, eventually: Eventually) -> None:
    up = clawq.up("point.yaml", "p3", "budget={}")
    eventually(lambda: clawq.metrics("p3"), "the learner is up", 40)
    tree = up.tree()
    # Given a learner that cannot stop in order
    learner = next(p for p in tree if "learner" in p.cmdline() and "start" in p.cmdline())
    learner.suspend()
    up.process.send_signal(signal.SIGINT)
    eventually(lambda: "once more" in up.output, "the first signal was seen", 5)
    # When it is told again
    up.process.send_signal(signal.SIGINT)
    # Then it is gone, with all that it had started
    assert up.wait(3) == 130
    assert not outliving(tree, 3.0)
    # What only a file can be is swept by the next start (here: at once, without waiting for it to be old).
    sweep_socket_folders(min_age_s=0.0)


@pytest.mark.learning
@pytest.mark.timeout(180)
def test_hindsight_learns_where_rewards_are_sparse(clawq: Clawq) -> None:
    up = clawq.up("fetch_reach_sparse.yaml", "her", "budget.target_success=0.95", "record.animation=false")
    assert up.wait(170) == 0, up.output + clawq.logs("her")
    assert clawq.report("her")["final_evaluation"]["success"] >= 0.8


@pytest.mark.timeout(60)
def test_killed_with_9_it_leaves_no_orphan(clawq: Clawq, eventually: Eventually) -> None:
    up = clawq.up("point.yaml", "p4", "budget={}")
    eventually(lambda: clawq.metrics("p4"), "the learner is up", 40)
    tree = up.tree()
    up.process.kill()
    up.wait(5)
    assert not outliving(tree, 5.0)
    sweep_socket_folders(min_age_s=0.0)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_killed_worker_coordinator_and_learner_are_replaced_and_the_run_goes_on(
    clawq: Clawq, eventually: Eventually
) -> None:
    up = clawq.up("point.yaml", "p5", "budget={}", "evaluation.interval_s=null", "learner.checkpoint_interval_s=1")
    eventually(lambda: any(line.get("updates", 0) > 20 for line in clawq.metrics("p5")), "updates", 60)
    # When the worker and the coordinator are killed
    words = {p.pid: " ".join(p.cmdline()) for p in up.tree()}
    for name in ("worker start", "clawq.control.coordinator"):
        psutil.Process(next(pid for pid, line in words.items() if name in line)).kill()
    eventually(lambda: "the worker ended by itself (killed by signal 9)" in up.output, "the user is told", 20)
    eventually(lambda: "the coordinator ended" in up.output, "the user is told of the coordinator too", 20)
    before = clawq.metrics("p5")[-1]["env_steps"]
    # Then env steps come in again, by more than what was on its way
    eventually(lambda: clawq.metrics("p5")[-1].get("env_steps", 0) > before + 2000, "env steps go on", 40)
    # And when the learner is killed, it goes on from its last checkpoint
    eventually(lambda: list((clawq.runs / "p5" / "checkpoints").glob("*.ckpt")), "a checkpoint", 20)
    next(p for p in up.tree() if "learner" in p.cmdline() and "start" in p.cmdline()).kill()
    eventually(lambda: "the learner was killed by signal 9; it goes on from step-" in up.output, "the user is told", 20)
    before = clawq.metrics("p5")[-1]["env_steps"]
    eventually(lambda: clawq.metrics("p5")[-1].get("env_steps", 0) > before + 2000, "env steps go on", 60)
    status, took_s, left = up.stop()
    assert (status, left) == (0, [])
    assert took_s < 10


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_an_environment_that_keeps_failing_is_told_and_counted(clawq: Clawq, eventually: Eventually) -> None:
    fault = "environment.options={step_s: 0.01, fault: {kind: raise, at: 40}}"
    up = clawq.up("point.yaml", "p6", "budget={}", fault)
    eventually(lambda: "fault on purpose at step 40" in up.output, "the fault is told", 40)
    eventually(lambda: clawq.metrics("p6")[-1].get("actor_failures", 0) >= 1, "and counted", 10)
    assert up.stop()[0] == 0


def test_a_junk_folder_is_not_resumed_and_not_touched(clawq: Clawq) -> None:
    junk = clawq.folder / "junk"
    up = clawq.call("up", "--resume", str(junk))
    assert up.status == 2
    assert "not a run folder" in up.output
    assert not junk.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["environment.options.id=HandReachDens-v3"], ["HandReachDens-v3", "HandReachDense-v3"]),
        pytest.param(["environment.options.id=CartPole-v1"], ["Discrete", "action"], marks=pytest.mark.slow),
        pytest.param(["replay.capacity=100000000000"], ["replay.capacity", "fit"], marks=pytest.mark.slow),
        (["redis.broker_url=redis://localhost:1/0"], ["localhost:1", "broker"]),
        pytest.param(["learner.device=cuda:7"], ["cuda:7"], marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_told_in_one_paragraph_without_a_traceback(
    clawq: Clawq, words: list[str], told: list[str]
) -> None:
    up = clawq.up("fetch_reach.yaml", "bad", *words)
    status = up.wait(45)
    assert status in (2, 3), up.output
    for word in told:
        assert word in up.output
    assert "Traceback" not in up.output
    assert not list((clawq.folder / "state").glob("redis*.json"))


@pytest.mark.learning
@pytest.mark.timeout(150)
def test_fetch_reach_is_learned_within_a_minute(clawq: Clawq) -> None:
    up = clawq.up("fetch_reach.yaml", "f1", "record.animation=false")
    assert up.wait(140) == 0, up.output + clawq.logs("f1")
    report = clawq.report("f1")
    assert report["final_evaluation"]["success"] >= 0.8, json.dumps(report)
    assert report["seconds"] <= 60
