"""The watchdog as the actor of last resort in a whole run: what nobody else ends and replaces, it does."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stuck
from clawq_process import Clawq
from processes import outliving

from clawq.procfs import Identity
from clawq.registry import Record, Registry, registry_folder

Eventually = Callable[..., None]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Clawq]:
    # Only the watchdog: whoever else may look after a worker is slower.
    home = Clawq(tmp_path, CLAWQ_WATCHDOG="1", CLAWQ_WORKER_STALL_S="3")
    yield home
    home.close()


def living(home: Clawq, role: str) -> list[Record]:
    found = [record for record in Registry(registry_folder(home.env)).records() if record.role == role]
    return [record for record in found if record.identity.alive]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_C5_a_stopped_worker_is_ended_with_its_actors_told_and_replaced(home: Clawq, eventually: Eventually) -> None:
    up = home.up("point.yaml", "p1", "budget={seconds: 1000}", "evaluation.interval_s=null")
    eventually(lambda: home.metrics("p1"), "the learner to learn", 200)
    eventually(lambda: living(home, "actor"), "an actor", 60)
    [worker], actors = living(home, "worker"), living(home, "actor")
    trees = [process for process in up.tree() if process.pid in (worker.pid, *(actor.pid for actor in actors))]
    assert len(trees) == 1 + len(actors)
    # When the whole worker stands still, not only its actor
    os.kill(worker.pid, signal.SIGSTOP)
    # Then it and its actors are ended, and another one takes its place and has actors at work
    eventually(lambda: not outliving(trees, 0.1), "the old tree to be gone", 120)
    eventually(lambda: [one for one in living(home, "worker") if one.identity != worker.identity], "a new worker", 200)
    eventually(lambda: living(home, "actor"), "a new actor", 200)
    # And it is told where people look
    eventually(lambda: "the watchdog ended worker" in up.output, "the run to tell of it", 60)
    assert home.status("p1")["metrics"]["workers_reaped_total/hung"] == 1.0
    # And what its actors may have taken with them unsent is counted
    eventually(lambda: home.status("p1")["metrics"].get("lost_unacked", 0) > 0, "the loss to be counted", 30)
    shown = home.call("watchdog", "status").output
    assert 'workers_reaped_total{reason="hung"} 1' in shown
    explained = home.call("watchdog", "explain", str(worker.pid)).output
    assert "no progress" in explained
    [report] = Registry(registry_folder(home.env)).folder.joinpath("reports").iterdir()
    assert {"decision.json", "stack.txt", "proc.txt", "events.json"} <= {path.name for path in report.iterdir()}
    assert "celery" in (report / "stack.txt").read_text(), "the stacks of the worker, which writes to its parent's log"
    # And what is told to stop then stops, with nothing left behind
    assert up.stop(timeout_s=60.0)[2] == []
    left = [one for one in Registry(registry_folder(home.env)).records() if Identity.of(one.pid) == one.identity]
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_R18_both_redis_servers_stopped_for_75_s_cost_no_process(home: Clawq, eventually: Eventually) -> None:
    up = home.up("point.yaml", "r18", "budget={seconds: 1000}", "evaluation.interval_s=null")
    eventually(lambda: any(line.get("updates", 0) > 50 for line in home.metrics("r18")), "updates", 200)
    roles = ("actor", "worker", "coordinator", "learner", "supervisor", "watchdog")
    before = {(role, one.identity) for role in roles for one in living(home, role)}
    assert len(before) >= len(roles)
    servers = living(home, "redis")
    assert len(servers) == 2
    for server in servers:
        os.kill(server.pid, signal.SIGSTOP)
    time.sleep(75.0)  # the fault itself
    for server in servers:
        os.kill(server.pid, signal.SIGCONT)
    steps = home.metrics("r18")[-1]["env_steps"]
    eventually(lambda: home.metrics("r18")[-1].get("env_steps", 0) > steps + 2000, "env steps to go on", 60)
    after = {(role, one.identity) for role in roles for one in living(home, role)}
    assert after == before, up.output + home.logs("r18")
    audit = registry_folder(home.env) / "audit.jsonl"
    ended = [line for line in audit.read_text().splitlines() if '"ended": true' in line] if audit.exists() else []
    assert ended == []
    status, _, left = up.stop(timeout_s=60.0)
    assert (status, left) == (0, [])


def stuck_env(home: Clawq, **more: str) -> dict[str, str]:
    """The environment in which `td3-stuck` is an installed plugin."""
    stuck.install(home.folder / "site")
    path = os.pathsep.join(
        [str(home.folder / "site"), str(Path(stuck.__file__).parent), home.env.get("PYTHONPATH", "")]
    )
    return {"PYTHONPATH": path, **more}


STUCK = (
    *("algorithm.name=td3-stuck", "watchdog.learner_s=3", "learner.checkpoint_interval_s=1", "budget={}"),
    "evaluation.interval_s=null",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_C5_a_learner_stuck_in_an_update_is_ended_and_goes_on_from_its_checkpoint(
    home: Clawq, eventually: Eventually
) -> None:
    env = stuck_env(home, CLAWQ_TEST_STUCK_AT="400", CLAWQ_TEST_STUCK_ONCE=str(home.folder / "once"))
    up = home.up("point.yaml", "s1", *STUCK, **env)
    eventually((home.folder / "once").exists, "the learner to hang", 100)
    [hung], began_s = living(home, "learner"), time.monotonic()
    eventually(lambda: hung.identity.alive is False, "it to be ended", 60)
    eventually(lambda: "it goes on from step-" in up.output, "it to be resumed", 60)
    before = home.metrics("s1")[-1]
    eventually(lambda: home.metrics("s1")[-1].get("updates", 0) > before["updates"] + 200, "updates to go on", 60)
    print(f"hung learner: updates again after {time.monotonic() - began_s:.0f} s")  # noqa: T201
    # And the reason is told where the user looks: which phase, and where the stacks are
    assert "the watchdog ended the learner: no progress for" in up.output
    assert "in phase 'step'" in up.output
    [report] = Registry(registry_folder(home.env)).folder.joinpath("reports").iterdir()
    assert "stuck_step" in (report / "stack.txt").read_text()
    assert home.status("s1")["metrics"]["workers_reaped_total/hung"] == 1.0
    versions = [line["weights_version"] for line in home.metrics("s1") if "weights_version" in line]
    assert versions == sorted(versions)
    status, _, left = up.stop(timeout_s=60.0)
    assert (status, left) == (0, []), up.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_that_hangs_every_time_is_given_up_with_the_stack_of_the_first(
    home: Clawq, eventually: Eventually
) -> None:
    # It never comes to a checkpoint
    env = stuck_env(home, CLAWQ_TEST_STUCK_AT="1")
    up = home.up("point.yaml", "s2", *STUCK, "learner.checkpoint_interval_s=600", **env)
    tree = up.tree()
    assert up.wait(400) != 0
    assert (
        "came to nothing 4 times in a row (its last checkpoint: none) and is given up. The first time the w"
        in up.output
    )
    assert up.output.count("it goes on anew: it had written no checkpoint") == 3
    assert "stuck_step" in up.output
    assert not outliving(tree, 5.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_learner_that_crashes_at_each_start_is_given_up_with_status_4_and_its_own_words(home: Clawq) -> None:
    up = home.up("point.yaml", "s3", *STUCK, **stuck_env(home, CLAWQ_TEST_STUCK_AT="0", CLAWQ_WATCHDOG="0"))
    tree = up.tree()
    assert up.wait(150) == 4, up.output
    told = "given up. The first time the learner was killed by signal 6"
    assert told in up.output
    # Where it crashed is told there, not in a log that somebody has to look for
    words = up.output.partition(told)[2]
    assert "Fatal Python error: Aborted" in words
    assert "in crash_on_purpose" in words
    assert up.output.count("it will be resumed") == 3
    assert not outliving(tree, 5.0)
