"""Slots drive real child processes: they keep, replace, and end them with everything they started."""

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_for

from clawq.control import slots as slots_module
from clawq.control.actor_process import ActorProcess, Lease, Patience
from clawq.control.shutdown import Shutdown
from clawq.control.slots import Slots
from clawq.spawning.failure import Failure
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Spawner

HERE = str(Path(__file__).parent)
RUN = {"id": "r", "tag": "ab" * 16, "config": {}, "spec": {}}
OTHER = {**RUN, "id": "other", "tag": "cd" * 16}


class Bench:
    """Slots over tiny actors, with everything that a test wants to look at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spawner = Spawner()
        self.shutdown = Shutdown()
        self.mode = ""
        self.patience = Patience(start_s=20.0, step_s=1.0, overrun_s=1.0, ending_s=1.0)
        self.started: list[ActorProcess] = []

    def start_actor(self, lease: Lease) -> ActorProcess:
        env = {"PYTHONPATH": HERE, "TINY_ACTOR": self.mode}
        child = self.spawner.spawn("tiny_actor", LogFile(self.folder / f"{lease.slot}.log"), env, control=True)
        self.started.append(ActorProcess(child, str(lease.run["tag"]), self.patience))
        return self.started[-1]

    def slots(self, count: int = 1, idle_s: float = 30.0) -> Slots:
        return Slots([f"slot-{k}" for k in range(count)], self.start_actor, self.shutdown, idle_s)


def lease(slots: Slots, seconds: float = 0.2, run: dict[str, Any] = RUN) -> dict[str, Any]:
    return slots.run_lease(lambda slot: Lease(run, slot, "w", "redis://x", seconds), run["tag"], seconds)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Failure as failure:
            results.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.shutdown.begin()
    for actor in bench.started:
        actor.close(0.0)
    assert not [actor for actor in bench.started if psutil.pid_exists(actor.child.pid)]


def test_an_actor_lives_on_between_leases(bench: Bench) -> None:
    slots = bench.slots()
    first, second = lease(slots), lease(slots)
    assert (first["pid"], first["leases"], first["slot"]) == (second["pid"], 1, "slot-0")
    assert second["leases"] == 2
    assert second["reason"] == "lease_over"


def test_leases_run_side_by_side_and_prefer_the_actor_of_their_run(bench: Bench) -> None:
    slots = bench.slots(2)
    mine, other = in_thread(lambda: lease(slots, 1.0)), in_thread(lambda: lease(slots, 1.0, OTHER))
    mine[0].join()
    other[0].join()
    assert mine[1][0]["pid"] != other[1][0]["pid"]
    assert lease(slots)["pid"] == mine[1][0]["pid"]
    assert lease(slots, run=OTHER)["pid"] == other[1][0]["pid"]


def test_a_lease_is_overrun_by_acting_not_by_waiting_for_redis(bench: Bench) -> None:
    bench.patience, bench.mode = replace(bench.patience, overrun_s=0.5), "send"
    assert lease(bench.slots())["reason"] == "lease_over"
    bench.mode = "step"
    with pytest.raises(Failure, match="did not end its lease") as failure:
        lease(bench.slots())
    assert failure.value.kind == "overrun"


def test_no_process_serves_two_runs(bench: Bench) -> None:
    slots = bench.slots()
    first, second = lease(slots), lease(slots, run=OTHER)
    assert first["pid"] != second["pid"]
    assert not psutil.pid_exists(first["pid"])


def test_a_lease_without_a_free_slot_gives_up_after_its_own_length(bench: Bench) -> None:
    slots = bench.slots()
    running, _ = in_thread(lambda: lease(slots, 3.0))
    wait_for(lambda: slots.busy == 1, "the first lease")
    began = time.monotonic()
    assert lease(slots, 0.3) == {"reason": "no_slot"}
    assert time.monotonic() - began < 1.5
    running.join()


def test_a_run_that_is_over_when_its_slot_is_free_starts_no_actor(bench: Bench) -> None:
    assert bench.slots().run_lease(lambda slot: None, "ab" * 16, 1.0) == {"reason": "run_stopped"}
    assert bench.started == []


def test_C5_a_hung_actor_is_ended_with_its_descendants_and_its_stack_is_kept(bench: Bench) -> None:
    slots = bench.slots()
    bench.mode = "hang"
    with pytest.raises(Failure, match="no progress for 1 s in phase 'step'") as caught:
        lease(slots, 5.0)
    assert caught.value.kind == "stall"
    assert "tiny_actor.py" in str(caught.value), "the stack dump is in the log"
    grandchild = int(Path(bench.folder / "slot-0.log").read_text().split("grandchild ")[1].split()[0])
    wait_for(lambda: not psutil.pid_exists(grandchild), "the grandchild (of another session) to be gone")
    bench.mode = ""
    assert lease(slots)["reason"] == "lease_over", "the slot works again"


def test_an_actor_that_dies_is_reported_with_the_end_of_its_log_and_replaced_after_a_back_off(bench: Bench) -> None:
    slots = bench.slots()
    bench.mode = "exit"
    with pytest.raises(Failure, match="exited with status 3") as caught:
        lease(slots)
    assert "about to exit" in str(caught.value)
    assert lease(slots, 0.1) == {"reason": "no_slot"}, "not at once"
    bench.mode = ""
    assert lease(slots, 1.0)["leases"] == 1


def test_an_actor_that_says_why_it_failed_is_quoted(bench: Bench) -> None:
    bench.mode = "fail"
    with pytest.raises(Failure, match="no such simulator") as caught:
        lease(bench.slots())
    assert caught.value.kind == "PluginNotFound"


def test_a_killed_actor_is_noticed_at_once_and_the_slot_works_again(bench: Bench) -> None:
    slots = bench.slots()
    running, results = in_thread(lambda: lease(slots, 30.0))
    wait_for(lambda: bool(bench.started) and "lease 1" in bench.started[0].child.log.tail(), "the lease")
    psutil.Process(bench.started[0].child.pid).kill()
    running.join(3.0)
    assert not running.is_alive()
    assert isinstance(results[0], Failure)
    assert "signal 9" in str(results[0])
    assert lease(slots, 1.0)["leases"] == 1


def test_split_and_garbled_lines_do_no_harm(bench: Bench) -> None:
    bench.mode = "chatty"
    assert lease(bench.slots(), 0.5)["env_steps"] == 7


def test_a_shutdown_ends_leases_early_and_leaves_no_process(bench: Bench) -> None:
    slots = bench.slots(2)
    running = [in_thread(lambda: lease(slots, 60.0)) for _ in range(3)]
    wait_for(lambda: sum("lease 1" in actor.child.log.tail() for actor in bench.started) == 2, "two leases")
    began = time.monotonic()
    bench.shutdown.begin()
    for thread, _ in running:
        thread.join(5.0)
    assert time.monotonic() - began < 2.0
    assert sorted(results[0]["reason"] for _, results in running) == ["ended", "ended", "worker_stopping"]
    assert all(not psutil.pid_exists(actor.child.pid) for actor in bench.started)
    assert lease(slots, 5.0) == {"reason": "worker_stopping"}


def test_an_actor_that_ignores_the_end_is_killed_in_time(bench: Bench) -> None:
    slots = bench.slots()
    bench.mode = "deaf"
    bench.patience = dataclasses.replace(bench.patience, ending_s=0.5)
    running, results = in_thread(lambda: lease(slots, 60.0))
    wait_for(lambda: bool(bench.started) and "lease 1" in bench.started[0].child.log.tail(), "the lease")
    bench.shutdown.begin()
    running.join(3.0)
    assert isinstance(results[0], Failure)
    assert results[0].kind == "late"


def test_an_idle_actor_is_closed(bench: Bench) -> None:
    slots = bench.slots(idle_s=0.2)
    pid = lease(slots)["pid"]
    wait_for(lambda: not psutil.pid_exists(pid), "the idle actor to be gone")
    assert lease(slots)["pid"] != pid


def test_an_idle_actor_stays_while_redis_is_away_and_that_time_is_not_idle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "_LOOK_S", 0.1)
    away, looks = [True], [0, 0]

    def is_over(tag: str) -> bool | None:
        looks[away[0]] += 1
        return None if away[0] else False

    slots = Slots(["slot-0"], bench.start_actor, bench.shutdown, 2.0, is_over)
    lease(slots)
    [actor], until_s = bench.started, time.monotonic() + 2.5
    wait_for(lambda: time.monotonic() > until_s or not actor.alive, "it to have had no lease for longer than it may")
    assert looks[True] > 2
    assert actor.alive
    # Its next lease may be under way
    away[0] = False
    wait_for(lambda: not actor.alive, "it to be closed")
    assert looks[False] > 2


def test_an_idle_actor_of_a_run_that_is_over_is_closed_soon(bench: Bench) -> None:
    over: set[str] = set()
    slots = Slots(["slot-0", "slot-1"], bench.start_actor, bench.shutdown, is_over=over.__contains__)
    mine, other = lease(slots)["pid"], lease(slots, run=OTHER)["pid"]
    over.add(str(RUN["tag"]))
    wait_for(lambda: not psutil.pid_exists(mine), "the actor of the run that is over to be gone", 5.0)
    assert psutil.pid_exists(other)


def test_an_actor_ends_when_its_worker_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from clawq.spawning.spawner import Spawner\n"
        "from clawq.spawning.logfile import LogFile\n"
        "program = ['timeit', '-n1', '-r1', 'import time; open(sys_argv, \"w\"); time.sleep(600)']\n"
        "program[3] = program[3].replace('sys_argv', repr(sys.argv[1]))\n"
        "child = Spawner().spawn(program, LogFile(Path(sys.argv[1] + '.log')))\n"
        "sys.stdout.write(f'{child.pid}\\n'); sys.stdout.flush(); time.sleep(600)"
    )
    running = tmp_path / "running"
    parent = subprocess.Popen([sys.executable, "-c", code, str(running)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(running.exists, "the child to run")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not psutil.pid_exists(pid), "the orphan to be gone")
