"""Workers with every pool: they find runs, serve them, keep them apart, and end in order."""

import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from processes import outliving

from clawq.transport.codec import peek_meta
from clawq.transport.control import Heartbeats

if TYPE_CHECKING:
    from tests.integration.conftest import Bench


@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_C10_a_worker_finds_a_run_serves_it_and_ends_in_order_under_every_pool(bench: "Bench", pool: str) -> None:
    worker = bench.worker(pool)
    bench.wait_for(lambda: "ready" in worker.text(), "the worker")
    # A run that comes after the worker, whose environment has a child process of its own.
    run = bench.run("late", {"fault": {"child_processes": 1}})
    bench.lease(run, 1.0)
    [report] = bench.wait_events(run, "lease")
    assert report.facts["reason"] == "lease_over"
    assert report.facts["env_steps"] > 0
    [actor] = worker.actors()
    assert actor.children(), "the environment's own child"
    # A second lease goes on in the same actor; a third one is cut short by the shutdown.
    bench.lease(run, 30.0)
    bench.wait_for(lambda: len(bench.entries(run)) > report.facts["fragments"], "the second lease")
    assert worker.actors() == [actor]
    for process in worker.tree():
        if process != actor and process not in actor.children():
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "torch" not in maps, "Celery's processes must not load torch"
    status, took_s, survivors = worker.stop()
    assert (status, survivors) == (0, [])
    assert took_s < 5.0
    last = bench.events(run, "lease")[-1].facts
    assert last["reason"] == "ended"
    # What the actor made was sent before it ended, and the slot is free (at the latest when its claim has run out).
    assert len(bench.entries(run)) == report.facts["fragments"] + last["fragments"]
    claim = run.keys.claim(f"slot:{last['slot']}")
    bench.wait_for(lambda: not bench.data.exists(claim), "the slot to be free", 12.0)
    assert Heartbeats(bench.data, run.keys).read() == {}
    assert bench.leftovers() == set()


def test_two_runs_on_one_worker_do_not_mix_and_a_run_that_ends_is_left(bench: "Bench") -> None:
    first, second = bench.run("first"), bench.run("second")
    bench.worker(slots=2)
    for run in (first, second):
        bench.lease(run, 1.0)
    for run in (first, second):
        bench.wait_events(run, "lease")
        entries = bench.wait_for(partial(bench.entries, run), "fragments")
        for slot in {slot for slot, _ in entries}:
            data: Any = bench.data
            metas = [peek_meta(next(iter(fields.values()))) for _, fields in data.xrange(run.keys.stream(slot))]
            assert {meta.run for meta in metas} == {run.tag}
    beats = Heartbeats(bench.data, first.keys).read()
    assert [(beat.slots, beat.busy >= 0) for beat in beats.values()] == [(2, True)]
    bench.registry.remove(first.run_id)
    bench.wait_for(lambda: "Canceling queue" in bench.workers[0].text(), "the worker to leave the run")
    bench.lease(first, 1.0)
    bench.lease(second, 0.5)
    bench.wait_events(second, "lease", 2)
    assert bench.queued(first) == 1, "nobody takes a lease of a run that is over"


def test_who_asks_by_remote_control_gets_an_answer(bench: "Bench") -> None:
    worker = bench.worker("solo", CLAWQ_REMOTE_CONTROL="1")
    bench.wait_for(lambda: "ready" in worker.text(), "the worker")
    ask = [sys.executable, "-m", "celery", "-A", "clawq.control.app", "inspect", "ping", "--timeout", "10"]
    # (It would wait for others all that time.)
    name = bench.wait_for(lambda: re.search(r"(\S+) ready\.", worker.text()), "its name").group(1)
    asked = subprocess.run(
        [*ask, "--destination", name], env=bench.env(), capture_output=True, text=True, timeout=60, check=False
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "pong" in asked.stdout


def test_a_worker_can_be_held_to_some_runs(bench: "Bench") -> None:
    mine, other = bench.run("mine"), bench.run("other")
    bench.worker(CLAWQ_RUNS=mine.run_id)
    bench.lease(other, 0.5)
    bench.lease(mine, 0.5)
    bench.wait_events(mine, "lease")
    assert bench.queued(other) == 1
    assert Heartbeats(bench.data, other.keys).read() == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_C1_C2_four_workers_end_within_five_seconds_and_leave_only_what_they_sent(bench: "Bench") -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    run = bench.run("four")
    for _ in range(4):
        bench.worker()
    # Each takes one for its slot and keeps one at hand.
    bench.lease(run, 60.0, count=8)
    bench.wait_for(lambda: len({slot for slot, _ in bench.entries(run)}) == 4, "four slots to send", 60.0)
    # Entries that nobody reads, as after a learner that was stopped.
    data: Any = bench.data
    stream = run.keys.stream("unread")
    for number in range(1000):
        data.xadd(stream, {"p": b"x"}, id=f"1-{number + 1}")
    trees = [process for worker in bench.workers for process in worker.tree()]
    began = time.monotonic()
    for worker in bench.workers:
        worker.process.send_signal(signal.SIGTERM)
    statuses = [worker.process.wait(10.0) for worker in bench.workers]
    assert time.monotonic() - began < 5.0, "\n".join(worker.text() for worker in bench.workers)
    assert statuses == [0] * 4
    assert outliving(trees, 1.0) == []
    assert {event.facts["reason"] for event in bench.events(run, "lease")} == {"ended"}
    sent = sum(event.facts["fragments"] for event in bench.events(run, "lease"))
    assert len(bench.entries(run)) == sent
    assert data.xlen(stream) == 1000, "unread entries are still there"
    assert {path for path in Path("/dev/shm").iterdir() if path.name.startswith("sem.")} <= shared_memory


def test_a_second_signal_ends_a_worker_at_once(bench: "Bench", tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    run = bench.run("stuck", {"fault": {"kind": "hang", "at": 20, "once_file": str(hung)}})
    worker = bench.worker()
    bench.lease(run, 60.0)
    bench.wait_for(hung.exists, "the environment to hang")
    tree = worker.tree()
    worker.process.send_signal(signal.SIGINT)
    time_between_signals_s = 0.2
    assert not psutil.wait_procs([psutil.Process(worker.pid)], time_between_signals_s)[0]
    began = time.monotonic()
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(5.0) == 1
    assert time.monotonic() - began < 1.0
    assert outliving(tree, 2.0) == []


def test_a_worker_without_redis_says_what_to_do(bench: "Bench", tmp_path: Path) -> None:
    for pool in ("threads", "solo"):
        worker = bench.worker(pool, CLAWQ_BROKER_URL="", CLAWQ_DATA_URL="", CLAWQ_STATE_DIR=str(tmp_path))
        assert worker.process.wait(20.0) != 0
        assert "clawq redis start" in worker.text()
        assert "Traceback" not in worker.text()
