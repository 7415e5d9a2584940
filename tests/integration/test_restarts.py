"""Workers that come and go leave nothing in Redis: no results, no mailboxes, no bindings, however often."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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


def restart(bench: "Bench", count: int, *name: str, **env: str) -> None:
    words = [sys.executable, str(RESTARTS), str(count), *name]
    done = subprocess.run(words, env=bench.env(**env), capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
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
    restart(bench, 20, "same", CLAWQ_REMOTE_CONTROL="1")
    assert census(broker) == before
    assert not [key for key in census(broker) if "celery-task-meta" in key]
    broker.close()
