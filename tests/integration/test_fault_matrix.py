"""Every fault of Celery and its broker that we know, under every pool: how long until work is taken up again.

One worker for each pool lives through all of them; what each fault cost is printed as a table at the end, with -s
(ops/decisions/celery.md quotes one). Minutes: run by ops/test-slow; `-k stopped` and the like choose faults.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from garbage import GARBAGE
from redis_process import RedisProcess
from wire import Wire

from clawq.control.queues import lease_queue
from clawq.transport.control import Heartbeats, RunRecord
from clawq.transport.keys import CELERY_PREFIX
from clawq.transport.server import EmbeddedRedis
from tests.integration.conftest import Bench, WorkerProcess

POOLS = ("threads", "prefork", "solo")
#: Work is taken up again so soon after a fault is over, seconds; on a busy machine times CLAWQ_TEST_PATIENCE.
RECOVERY_S = 30.0 * float(os.environ.get("CLAWQ_TEST_PATIENCE", "1"))
STALL_S = 30.0


class TcpBroker(RedisProcess):
    """A broker behind a wire that can be cut."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, aof=True)
        self.wire = Wire(("127.0.0.1", self.port))
        self.wired_url = f"redis://127.0.0.1:{self.wire.port}/0"


class Household:
    """One supervised worker for each pool, each with a run of its own."""

    def __init__(self, bench: Bench, broker: TcpBroker) -> None:
        self.bench, self.broker = bench, broker
        self.runs: dict[str, RunRecord] = {pool: bench.run(pool) for pool in POOLS}
        self.workers: dict[str, WorkerProcess] = {
            pool: bench.worker(pool, supervised=True, CLAWQ_RUNS=run.run_id) for pool, run in self.runs.items()
        }
        self.table: dict[str, dict[str, float]] = {}
        for pool in POOLS:
            self.work(pool)
        self.await_work(dict.fromkeys(POOLS, 0), 600.0)

    def done(self, pool: str) -> int:
        return len(self.bench.events(self.runs[pool], "lease"))

    def work(self, pool: str) -> None:
        """Ask for a short lease, until the broker takes it."""
        deadline_s = time.monotonic() + RECOVERY_S
        while True:
            try:
                self.bench.lease(self.runs[pool], 0.3)
                return
            except Exception:
                assert time.monotonic() < deadline_s, "the broker takes no leases"
                self.bench.forget_connections()

    def await_work(self, before: dict[str, int], timeout_s: float = RECOVERY_S) -> dict[str, float]:
        """Seconds until each pool has done a lease more than before."""
        began_s, took_s = time.monotonic(), dict[str, float]()
        while len(took_s) < len(before):
            for pool, count in before.items():
                if pool not in took_s and self.done(pool) > count:
                    took_s[pool] = round(time.monotonic() - began_s, 1)
                elif pool not in took_s and not self.waiting(pool):
                    # As a coordinator does: what was lost on the way is sent again.
                    self.work(pool)
            if time.monotonic() - began_s > timeout_s:
                pytest.fail(f"only {took_s} work again after {timeout_s:.0f} s\n{self.bench.describe()}")
            time.sleep(0.25)  # between two looks, as a coordinator's
        return took_s

    def waiting(self, pool: str) -> int:
        """Leases in the pool's queue."""
        return int(self.broker.ask("LLEN", CELERY_PREFIX + lease_queue(self.runs[pool].run_id)))

    def settle(self, pools: tuple[str, ...]) -> None:
        """Wait until no lease waits or is at work: what is done after the fault was taken up after it."""
        for pool in pools:
            self.bench.wait_for(partial(self._taken, pool), f"{pool} to take all leases", 60.0)
        # The second heartbeat from now was written when whatever had just been taken was at work.
        seconds, _ = self.bench.data.time()
        for pool in pools:
            self.bench.wait_for(partial(self._idle_since, pool, (seconds + 2) * 1000), f"{pool} to have nothing to do")

    def _taken(self, pool: str) -> bool:
        return not self.waiting(pool)

    def _idle_since(self, pool: str, at_ms: int) -> bool:
        beats = Heartbeats(self.bench.data, self.runs[pool].keys).read().values()
        return any(beat.time_ms > at_ms and not beat.busy for beat in beats)

    def suffer(self, name: str, fault: Callable[["Household"], None], pools: tuple[str, ...]) -> None:
        """Let a fault happen while nothing runs, then time how long each pool takes to do a lease."""
        self.settle(pools)
        before = {pool: self.done(pool) for pool in pools}
        fault(self)
        for pool in pools:
            self.work(pool)
        self.table[name] = self.await_work(before)

    def show(self) -> str:
        lines = ["", "| fault | threads | prefork | solo |", "|---|---|---|---|"]
        for name, took in self.table.items():
            lines.append(f"| {name} | " + " | ".join(str(took.get(pool, "-")) for pool in POOLS) + " |")
        return "\n".join(lines)


def restart(home: Household) -> None:
    home.broker.kill()
    home.broker.start()


def flap(home: Household) -> None:
    for _ in range(4):
        restart(home)


def cut(home: Household) -> None:
    for _ in range(5):
        home.broker.ask("CLIENT", "KILL", "TYPE", "normal")


def stall(home: Household) -> None:
    home.broker.stall()
    time.sleep(STALL_S)  # the fault itself
    home.broker.go_on()


def lose(seconds: float, home: Household) -> None:
    home.broker.wire.lost = True
    time.sleep(seconds)  # the fault itself
    home.broker.wire.lost = False


def fill(home: Household) -> None:
    home.broker.ask("CONFIG", "SET", "maxmemory", "1")
    # Commands that no ack can follow, and time for workers to run into it.
    time.sleep(5.0)
    home.broker.ask("CONFIG", "SET", "maxmemory", "0")


def litter(home: Household) -> None:
    for run in home.runs.values():
        home.broker.ask("LPUSH", CELERY_PREFIX + lease_queue(run.run_id), *GARBAGE)


def hit_main(number: int, home: Household) -> None:
    mains = [home.bench.wait_for(worker.main, "the Celery worker") for worker in home.workers.values()]
    for main in mains:
        main.send_signal(number)


def hit_child(number: int, home: Household) -> None:
    main = home.workers["prefork"].main()
    assert main is not None
    [child] = [p for p in main.children() if "clawq.programs" not in " ".join(p.cmdline())]
    child.send_signal(number)


#: Name -> (what happens, to which pools).
FAULTS: dict[str, tuple[Callable[[Household], None], tuple[str, ...]]] = {
    "broker killed, started again": (restart, POOLS),
    "four times in a row": (flap, POOLS),
    "all connections cut, five times": (cut, POOLS),
    "broker stopped for 30 s": (stall, POOLS),
    # Workers notice after 10 to 20 s, and then wait for an answer of the lost network.
    "network loses everything for 15 s": (partial(lose, STALL_S / 2), POOLS),
    "network loses everything for 30 s": (partial(lose, STALL_S), POOLS),
    "broker full for 5 s": (fill, POOLS),
    "garbage in the queue": (litter, POOLS),
    "pool child killed": (partial(hit_child, signal.SIGKILL), ("prefork",)),
    "pool child stopped": (partial(hit_child, signal.SIGSTOP), ("prefork",)),
    "main process killed": (partial(hit_main, signal.SIGKILL), POOLS),
    "main process stopped": (partial(hit_main, signal.SIGSTOP), POOLS),
    "main process told to begin anew": (partial(hit_main, signal.SIGHUP), POOLS),
}


@pytest.fixture(scope="module")
def household(redis_servers: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Household]:
    folder = tmp_path_factory.mktemp("faults")
    broker = TcpBroker(folder)
    bench = Bench(broker.wired_url, redis_servers.data_url, folder)
    try:
        home = Household(bench, broker)
        yield home
        sys.stdout.write(home.show() + "\n")
        assert {worker.stop(timeout_s=60.0)[0] for worker in home.workers.values()} == {0}
    finally:
        broker.go_on()
        broker.wire.lost = False
        bench.close()
        broker.close()
        broker.wire.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_C13_T1_T2_every_pool_takes_work_up_again_after(household: Household, name: str) -> None:
    household.suffer(name, *FAULTS[name])
