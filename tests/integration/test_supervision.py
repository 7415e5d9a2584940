"""Workers that outlive garbage, kills and poison: one short case for each kind of fault; test_fault_matrix has all."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from garbage import GARBAGE, message

from clawq.control.celery_settings import give_back, send_command
from clawq.control.queues import lease_queue
from clawq.transport.client import connect
from clawq.transport.commands import MAX_ATTEMPTS, Commands
from clawq.transport.control import Heartbeats
from clawq.transport.keys import CELERY_PREFIX

if TYPE_CHECKING:
    from tests.integration.conftest import Bench

#: Busy machines take longer.
PATIENCE = float(os.environ.get("CLAWQ_TEST_PATIENCE", "1"))


def test_F10_a_worker_outlives_garbage_and_comes_back_when_it_is_killed(bench: "Bench") -> None:
    run = bench.run("supervised")
    worker = bench.worker()
    bench.lease(run, 0.3)
    bench.wait_events(run, "lease")
    main, [actor] = worker.main(), worker.actors()
    assert main is not None
    broker: Any = connect(bench.broker_url)
    books = Commands(broker)
    before = {command.id for command in books.dead()}

    # Garbage costs nothing, nor does a task of a plugin that this worker does not have
    unknown = message("headers.task", "lab.elsewhere")
    broker.lpush(CELERY_PREFIX + lease_queue(run.run_id), *GARBAGE, unknown)
    bench.wait_for(lambda: not bench.queued(run), "the garbage to be read")
    bench.lease(run, 0.3)
    bench.wait_events(run, "lease", 2)
    assert worker.main() == main
    assert worker.actors() == [actor]
    buried = [command for command in books.dead() if command.id not in before]
    assert Counter(command.reason for command in buried) == {"garbage": len(GARBAGE), "unknown": 1}
    assert {command.queue for command in buried} == {lease_queue(run.run_id)}
    [(task, arguments)] = [(one.task, one.arguments()) for one in buried if one.reason == "unknown"]
    assert (task, arguments) == ("lab.elsewhere", ([], {})), "it can be given back"
    assert "Connection to broker lost" not in worker.text()

    # A kill costs the actors and a moment
    main.send_signal(signal.SIGKILL)
    bench.wait_for(lambda: worker.main() not in (None, main), "the next Celery worker")
    assert not actor.is_running() or actor.status() == psutil.STATUS_ZOMBIE
    bench.lease(run, 0.3)
    bench.wait_events(run, "lease", 3)
    [name] = {event.facts["slot"] for event in bench.events(run, "lease")}
    assert name, "the slot is the one that it was"
    [beat] = bench.wait_for(lambda: list(Heartbeats(bench.data, run.keys).read().values()), "a heartbeat")
    assert bench.wait_for(partial(_restarts, bench, run), "the restart to be told") == 1
    assert beat.slots == 1
    # The cold way, as a second signal: at once
    status, took_s, survivors = worker.stop(signal.SIGQUIT, timeout_s=60.0)
    assert (status, survivors) == (1, [])
    assert took_s < 1.5 * PATIENCE
    broker.close()


def _restarts(bench: "Bench", run: Any) -> int:
    return max((beat.restarts for beat in Heartbeats(bench.data, run.keys).read().values()), default=0)


POISON = """
import os, signal
from celery import shared_task

@shared_task(name="lab.poison", acks_late=True, reject_on_worker_lost=True)
def poison(path):
    with open(path, "a") as out:
        out.write("x")
    if not os.path.exists(path + ".cured"):
        os.kill(os.getpid(), signal.SIGKILL)

@shared_task(name="lab.good", acks_late=True)
def good(path):
    with open(path, "a") as out:
        out.write("x")
"""


@pytest.fixture
def lab(tmp_path: Path) -> Callable[[str], str]:
    """Installs a plugin with these tasks; returns the folder for PYTHONPATH."""

    def install(module: str) -> str:
        metadata = tmp_path / "site" / "lab_tasks-1.0.dist-info"
        metadata.mkdir(parents=True)
        (tmp_path / "site" / "lab_tasks.py").write_text(module)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-tasks\nVersion: 1.0\n")
        names = [line.split()[1].split("(")[0] for line in module.splitlines() if line.startswith("def ")]
        (metadata / "entry_points.txt").write_text(
            "[clawq.tasks]\n" + "".join(f"{name} = lab_tasks:{name}\n" for name in names)
        )
        return f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    return install


@pytest.mark.slow
def test_T5_a_command_that_kills_its_worker_is_set_aside_after_three_attempts(
    bench: "Bench", tmp_path: Path, lab: Callable[[str], str]
) -> None:
    worker = bench.worker("prefork", supervised=True, PYTHONPATH=lab(POISON))
    broker: Any = connect(bench.broker_url)
    died, done = tmp_path / "died", tmp_path / "done"
    send_command(bench.sender, "lab.poison", path=str(died))
    bench.wait_for(
        lambda: any(dead.task == "lab.poison" for dead in Commands(broker).dead()), "the poison to be buried"
    )
    assert died.read_text() == "x" * MAX_ATTEMPTS
    [dead] = [dead for dead in Commands(broker).dead() if dead.task == "lab.poison"]
    assert (dead.reason, len(dead.command)) == ("attempts", 32)
    assert str(died).encode() in dead.head
    for _ in range(MAX_ATTEMPTS + 2):
        send_command(bench.sender, "lab.good", path=str(done))
    bench.wait_for(lambda: done.exists() and len(done.read_text()) == MAX_ATTEMPTS + 2, "others are unaffected")
    # What killed it is mended, and somebody gives the command back
    (tmp_path / "died.cured").touch()
    give_back(bench.sender, Commands(broker), dead)
    bench.wait_for(lambda: died.read_text() == "x" * (MAX_ATTEMPTS + 1), "the command to be done")
    assert worker.stop(timeout_s=60.0)[0] == 0
    assert not broker.keys("clawq:attempts:*"), "what has ended is not counted any longer"
    broker.close()


SLOW = """
import time
from celery import shared_task

@shared_task(name="lab.slow", acks_late=True)
def slow(path, seconds):
    with open(path, "a") as out:
        out.write("b")
    time.sleep(seconds)
    with open(path, "a") as out:
        out.write("e")
"""


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
@pytest.mark.parametrize(
    ("number", "seconds", "supervised"),
    [
        (signal.SIGTERM, 2.0, True),
        (signal.SIGTERM, 60.0, True),
        (signal.SIGQUIT, 60.0, True),
        (signal.SIGTERM, 60.0, False),
        (signal.SIGQUIT, 60.0, False),
    ],
    ids=["warm", "soft", "cold", "bare soft", "bare cold"],
)
def test_T12_a_worker_ends_in_bounded_time_and_loses_no_command(
    own_bench: "Bench",
    tmp_path: Path,
    lab: Callable[[str], str],
    pool: str,
    number: int,
    seconds: float,
    supervised: bool,
) -> None:
    bench = own_bench
    worker = bench.worker(pool, supervised=supervised, PYTHONPATH=lab(SLOW), CLAWQ_TASK_GRACE_S="5")
    marks = tmp_path / "marks"
    for _ in range(6):
        send_command(bench.sender, "lab.slow", path=str(marks), seconds=seconds)
    bench.wait_for(marks.exists, "the first one to begin")
    status, took_s, survivors = worker.stop(number, timeout_s=60.0)
    cold = number == signal.SIGQUIT
    assert (status, survivors) == (1 if cold else 0, [])
    assert took_s < (1.5 if cold else 8.0) * PATIENCE
    broker: Any = connect(bench.broker_url)
    ended = marks.read_text().count("e")
    assert ended >= 1 or seconds > 5.0, "a short one is waited for"
    waiting = broker.llen(f"{CELERY_PREFIX}clawq") + broker.hlen(f"{CELERY_PREFIX}unacked")
    assert ended + waiting == 6, "each is done, or is still on the broker"
    broker.close()
