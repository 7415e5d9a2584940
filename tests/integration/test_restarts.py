"""Workers that come and go leave nothing in Redis: no results, no mailboxes, no bindings, however often."""

import contextlib
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clawq.control.celery_settings import make_app
from clawq.transport.client import connect

if TYPE_CHECKING:
    from tests.integration.conftest import Bench

RESTARTS = Path(__file__).parents[1] / "support" / "restarts.py"


def census(broker: Any) -> dict[str, int]:
    """Every key of the broker and how many members it has; but for what runs out by itself."""
    sizes = {"list": broker.llen, "set": broker.scard, "zset": broker.zcard, "hash": broker.hlen}
    found = {}
    for key in broker.keys("*"):
        if broker.pttl(key) < 0:
            found[key.decode()] = sizes.get(broker.type(key).decode(), lambda key: 1)(key)
    return found


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Keys that have more members than before."""
    return {key: count for key, count in after.items() if count > before.get(key, 0)}


def restart(bench: "Bench", count: int, *name: str, **env: str) -> None:
    words = [sys.executable, str(RESTARTS), str(count), *name]
    done = subprocess.run(words, env=bench.env(**env), capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("count", [5, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_T13_T14_F18_restarts_leave_no_key_and_no_member_behind(own_bench: "Bench", count: int) -> None:
    bench = own_bench
    bench.run("restarts")
    broker: Any = connect(bench.broker_url)
    restart(bench, 2)
    before = census(broker)
    restart(bench, count)
    assert census(broker) == before
    assert not [key for key in before if "celery-task-meta" in key or "pidbox" in key]
    broker.close()


@pytest.mark.slow
def test_C59_with_remote_control_a_worker_that_keeps_its_name_keeps_one_mailbox(own_bench: "Bench") -> None:
    # Under a supervisor it does; else each killed worker leaves a binding until kombu sweeps, after an hour.
    bench = own_bench
    bench.run("restarts")
    broker: Any = connect(bench.broker_url)
    restart(bench, 2, "same", CLAWQ_REMOTE_CONTROL="1")
    before = census(broker)
    # The last one ends in order, and takes its mailbox with it.
    restart(bench, 20, "same", CLAWQ_REMOTE_CONTROL="1")
    assert grown(before, census(broker)) == {}
    assert not [key for key in census(broker) if "celery-task-meta" in key]
    broker.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_C59_who_looks_on_as_flower_does_leaves_nothing_over_restarts_of_the_worker(own_bench: "Bench") -> None:
    bench = own_bench
    run = bench.run("watched")
    worker = bench.worker("threads", supervised=True, CLAWQ_REMOTE_CONTROL="1")
    broker: Any = connect(bench.broker_url)
    looker = make_app(bench.broker_url)

    def look_on() -> bool:
        """Ask all workers, as Flower does again and again, and follow their events for a moment."""
        inspect = looker.control.inspect(timeout=0.5)
        answers = [inspect.ping(), inspect.active(), inspect.stats(), inspect.active_queues()]
        with looker.connection() as connection, contextlib.suppress(TimeoutError):
            looker.events.Receiver(connection, handlers={"*": lambda event: None}).capture(limit=5, timeout=0.5)
        return all(answers)

    def another(main: object) -> bool:
        return worker.main() not in (None, main)

    def live() -> None:
        bench.wait_for(look_on, "the worker to answer", 60.0)
        done = len(bench.events(run, "lease"))
        bench.lease(run, 0.1)
        bench.wait_events(run, "lease", done + 1)

    for _ in range(2):
        live()
    before = census(broker)
    # No more: the supervisor's pause grows with each end in a row.
    for _ in range(6):
        main = bench.wait_for(worker.main, "the Celery worker")
        main.send_signal(signal.SIGKILL)
        bench.wait_for(partial(another, main), "the next one", 60.0)
        live()
    assert grown(before, census(broker)) == {}
    assert not [key for key in broker.keys("*") if b"celery-task-meta" in key]
    assert worker.stop(timeout_s=60.0)[0] == 0
    looker.close()
    broker.close()
