"""The watchdog as the actor of last resort in a whole run: what nobody else ends and replaces, it does."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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
    shown = home.call("watchdog", "status").output
    assert 'workers_reaped_total{reason="hung"} 1' in shown
    explained = home.call("watchdog", "explain", str(worker.pid)).output
    assert "no progress" in explained
    [report] = Registry(registry_folder(home.env)).folder.joinpath("reports").iterdir()
    assert {"decision.json", "stack.txt", "proc.txt", "events.json"} <= {path.name for path in report.iterdir()}
    # And what is told to stop then stops, with nothing left behind
    assert up.stop(timeout_s=60.0)[2] == []
    left = [one for one in Registry(registry_folder(home.env)).records() if Identity.of(one.pid) == one.identity]
    assert left == []
