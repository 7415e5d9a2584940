"""Who must not be ended although something looks wrong: real processes, a real watchdog, a real Redis."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from clawq_process import Clawq

from clawq import progress
from clawq.procfs import rss_mb
from clawq.registry import Registry
from clawq.transport.client import connect
from clawq.transport.control import Heartbeat, Heartbeats, RunRecord, RunRegistry
from clawq.watchdog.audit import Audit
from clawq.watchdog.daemon import Watchdog, watchdog_pid
from clawq.watchdog.policy import Policy

if TYPE_CHECKING:
    from clawq.transport.keys import RunKeys
    from clawq.transport.server import EmbeddedRedis
    from tests.watchdog.conftest import Kennel

Alive = Callable[[int], bool]
Eventually = Callable[..., None]
BUSY = "print('ready', flush=True)\nwhile True:\n    mine.moved('step'); time.sleep(0.01)"


def rounds_of(registry: Registry) -> int:
    """How often the host's watchdog has looked so far."""
    found = (progress.read(registry.progress_file(one.tag)) for one in registry.records() if one.role == "watchdog")
    return max((reading.counter for reading in found if reading is not None), default=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stopped_s", [3.0, 60.0])
def test_R19_a_watchdog_that_was_stopped_beside_all_others_and_goes_on_kills_nobody(
    kennel: "Kennel", home: Clawq, alive: Alive, eventually: Eventually, stopped_s: float
) -> None:
    busy = kennel.child(BUSY, {"step": 2.0}, role="program")
    dog, audit = home.start("watchdog", "start"), Audit(kennel.registry.folder)
    eventually(lambda: rounds_of(kennel.registry) >= 2, "the watchdog to watch", 60.0)
    assert watchdog_pid(kennel.registry) == dog.process.pid
    # As when a machine sleeps: everything stands still
    for pid in (dog.process.pid, busy.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped_s)  # the fault itself
    # And the watchdog is the first to wake up
    dog.process.send_signal(signal.SIGCONT)
    eventually(lambda: any(line["kind"] == "gap" for line in audit.lines()), "it to notice", 30.0)
    os.kill(busy.pid, signal.SIGCONT)
    looked = rounds_of(kennel.registry)
    eventually(lambda: rounds_of(kennel.registry) >= looked + 3, "more rounds", 30.0)
    assert alive(busy.pid)
    assert not [line for line in audit.lines() if line.get("ended")]
    assert dog.stop()[0] == 0


def test_R13_eight_children_that_share_200_mb_by_fork_do_not_leak(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    code = """
from clawq.registry import Registration, enrol
limits, me, pids = {"step": 60.0, "memory_mb": 150.0}, os.getpid(), []
model = bytearray(os.urandom(1000) * 200_000)
for number in range(8):
    pids.append(os.fork())
    if not pids[-1]:
        enrol(Registration("pool", f"pool-{number}", limits), parent=me)
        while True:
            progress.mine().moved('step'); time.sleep(0.05)
print(*pids, flush=True)
while True:
    mine.moved('step'); time.sleep(0.05)"""
    parent = kennel.child(code, {"step": 60.0, "memory_mb": 150.0}, role="worker")
    children = [int(word) for word in parent.words]  # type: ignore[attr-defined]
    watchdog = Watchdog(kennel.registry, replace(quick, leak_mb_per_h=1e9), memory_s=0.2)
    deadline = time.monotonic() + 20.0
    while len([one for one in kennel.registry.records() if one.role == "pool"]) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    decided = [decision.kind for _ in range(8) for decision in _turn(watchdog)]
    assert decided == []
    # By what is resident each of them would be over its limit
    assert all((rss_mb(pid) or 0.0) > 200.0 for pid in (parent.pid, *children))
    assert all(alive(pid) for pid in (parent.pid, *children))


def test_a_worker_whose_heartbeats_are_missing_while_its_work_goes_on_is_told_and_not_ended(
    kennel: "Kennel", quick: Policy, alive: Alive, redis_servers: "EmbeddedRedis", data_client: Any, run_keys: "RunKeys"
) -> None:
    registry = RunRegistry(connect(redis_servers.broker_url))
    run = RunRecord(f"silent-{run_keys.tag[:8]}", run_keys.tag, state="running")
    registry.add(run)
    urls = (redis_servers.broker_url, redis_servers.data_url)
    facts = {"slots": 1, "name": "w1", "runs": [run.run_id]}
    worker = kennel.child(BUSY, {"step": 5.0}, role="worker", urls=urls, facts=facts)
    beats, watchdog = Heartbeats(data_client, run_keys), Watchdog(kennel.registry, replace(quick, silent_s=0.3))
    beats.beat(Heartbeat("w1", 1, 0, "here", 1))
    assert [decision.kind for _ in range(6) for decision in _turn(watchdog)] == []
    # When the thread that writes them has died
    beats.leave("w1")
    decided = [(decision.kind, decision.action) for _ in range(8) for decision in _turn(watchdog)]
    assert set(decided) == {("silent", "report")}
    assert alive(worker.pid)
    [line] = Audit(kennel.registry.folder).lines()
    assert "its work goes on" in line["why"]
    registry.remove(run.run_id)


def test_R10_a_zombie_goes_with_its_parent_that_hangs(kennel: "Kennel", quick: Policy, alive: Alive) -> None:
    code = """
from pathlib import Path
from clawq.registry import Registration
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Spawner
child = Spawner().spawn('this', LogFile(Path(__file__).with_suffix('.zombie')), registration=Registration("actor", "z"))
child.wait_exit(30.0)
mine.moved('step')
print(child.pid, flush=True)
time.sleep(600)"""
    parent = kennel.child(code, {"step": 1.0}, role="worker")
    watchdog = Watchdog(kennel.registry, replace(quick, defunct_s=0.1))
    told: list[tuple[str, str, str]] = []
    deadline = time.monotonic() + 20.0
    while alive(parent.pid):
        assert time.monotonic() < deadline, told
        told += [(one.kind, one.name.partition(" (")[0], one.why) for one in _turn(watchdog)]
    defunct = [why for kind, name, why in told if (kind, name) == ("defunct", "actor z")]
    assert "worker place-child0" in defunct[0]
    assert "is the patient" in defunct[-1]
    assert {line["role"] for line in Audit(kennel.registry.folder).lines() if line.get("ended")} == {"worker"}
    while kennel.registry.records():
        assert time.monotonic() < deadline
        kennel.children[0].end_tree()
        _turn(watchdog)


def _turn(watchdog: Watchdog) -> Any:
    time.sleep(0.1)  # the watchdog's period
    return watchdog.turn()
