"""Every fault of Celery and its broker that we know, under every pool: how long until work is taken up again.

One worker for each pool lives through all of them; what each fault cost is printed as a table at the end
(ops/decisions/celery.md quotes one). Minutes: run by ops/test-slow.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from garbage import GARBAGE
from redis_process import RedisProcess
from wire import Wire

from clawq.control.queues import lease_queue
from clawq.transport.control import RunRecord
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
                pytest.fail(f"only {sorted(took_s)} work again after {timeout_s:.0f} s\n{self.bench.describe()}")
            time.sleep(0.25)  # between two looks, as a coordinator's
        return took_s

    def waiting(self, pool: str) -> int:
        """Leases in the pool's queue."""
        return int(self.broker.ask("LLEN", CELERY_PREFIX + lease_queue(self.runs[pool].run_id)))

    def suffer(self, name: str, fault: Callable[[], None], pools: tuple[str, ...] = POOLS) -> None:
        """Let a fault happen while nothing runs, then time how long each pool takes to do a lease."""
        fault()
        before = {pool: self.done(pool) for pool in pools}
        for pool in pools:
            self.work(pool)
        self.table[name] = self.await_work(before)

    def mains(self) -> list[psutil.Process]:
        found = [self.bench.wait_for(worker.main, "the Celery worker") for worker in self.workers.values()]
        return list(found)

    def show(self) -> str:
        lines = ["", "| fault | threads | prefork | solo |", "|---|---|---|---|"]
        for name, took in self.table.items():
            lines.append(f"| {name} | " + " | ".join(str(took.get(pool, "-")) for pool in POOLS) + " |")
        return "\n".join(lines)


@pytest.fixture
def household(redis_servers: EmbeddedRedis, tmp_path: Path) -> Iterator[Household]:
    broker = TcpBroker(tmp_path)
    bench = Bench(broker.wired_url, redis_servers.data_url, tmp_path)
    yield Household(bench, broker)
    broker.go_on()
    broker.wire.lost = False
    bench.close()
    broker.close()
    broker.wire.close()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_C13_T1_T2_every_pool_takes_work_up_again_after_every_fault(household: Household) -> None:
    broker = household.broker

    def restart() -> None:
        broker.kill()
        broker.start()

    def flap() -> None:
        for _ in range(4):
            restart()

    def kick() -> None:
        for _ in range(5):
            broker.ask("CLIENT", "KILL", "TYPE", "normal")

    def stall() -> None:
        broker.stall()
        time.sleep(STALL_S)  # the fault itself
        broker.go_on()

    def lose() -> None:
        broker.wire.lost = True
        time.sleep(STALL_S)  # the fault itself
        broker.wire.lost = False

    def fill() -> None:
        broker.ask("CONFIG", "SET", "maxmemory", "1")
        # Commands that no ack can follow, and time for workers to run into it.
        time.sleep(5.0)
        broker.ask("CONFIG", "SET", "maxmemory", "0")

    def litter() -> None:
        for run in household.runs.values():
            broker.ask("LPUSH", CELERY_PREFIX + lease_queue(run.run_id), *GARBAGE)

    def kill_mains(number: int) -> Callable[[], None]:
        def kill() -> None:
            old = household.mains()
            for main in old:
                main.send_signal(number)

        return kill

    def hit_child(number: int) -> Callable[[], None]:
        def hit() -> None:
            main = household.workers["prefork"].main()
            assert main is not None
            [child] = [p for p in main.children() if "clawq.programs" not in " ".join(p.cmdline())]
            child.send_signal(number)

        return hit

    try:
        household.suffer("broker killed, started again", restart)
        household.suffer("four times in a row", flap)
        household.suffer("all connections cut, five times", kick)
        household.suffer("broker stopped for 30 s", stall)
        household.suffer("network loses everything for 30 s", lose)
        household.suffer("broker full for 5 s", fill)
        household.suffer("garbage in the queue", litter)
        household.suffer("pool child killed", hit_child(signal.SIGKILL), ("prefork",))
        household.suffer("pool child stopped", hit_child(signal.SIGSTOP), ("prefork",))
        household.suffer("main process killed", kill_mains(signal.SIGKILL))
        household.suffer("main process stopped", kill_mains(signal.SIGSTOP))
        household.suffer("main process told to begin anew", kill_mains(signal.SIGHUP))
    finally:
        sys.stdout.write(household.show() + "\n")
    for worker in household.workers.values():
        assert worker.stop(timeout_s=60.0)[0] == 0
