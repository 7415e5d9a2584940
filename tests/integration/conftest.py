"""A bench for tests with real workers: real Celery processes, real actors, real Redis."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from books import assert_every_ledger_balances, assert_ledger_balances
from clawq_process import Clawq
from processes import outliving
from redis_process import RedisProcess

from clawq.config import RunConfig
from clawq.control.celery_settings import make_app, send_command
from clawq.control.queues import lease_queue, run_queues
from clawq.state import ServerState
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.control import ControlRecord, Event, Events, RunRecord, RunRegistry, delete_run
from clawq.transport.keys import CELERY_PREFIX, new_tag
from clawq.transport.server import EmbeddedRedis
from clawq.transport.weights import WeightsPublisher


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """At the end of every test the ledger of each of its runs must balance, while its servers still run."""
    result = yield
    for made in getattr(item, "funcargs", {}).values():
        if isinstance(made, Clawq):
            state = ServerState.read(made.folder / "state")
            assert_every_ledger_balances(connect(state.data_url) if state else None, made.runs)
        elif isinstance(home := getattr(made, "home", None), Clawq):
            assert_every_ledger_balances(made.data, home.runs)
        elif isinstance(made, Bench):
            for run in made.runs:
                assert_ledger_balances(made.data, run.keys, None)
    return result


class WorkerProcess:
    """A Celery worker in a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def tree(self) -> list[psutil.Process]:
        """The worker and all that it started."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def actors(self) -> list[psutil.Process]:
        return [p for p in self.tree() if "clawq.programs.actor" in _words(p)]

    def main(self) -> psutil.Process | None:
        """The Celery main process of a supervised worker, while there is one."""
        return next((p for p in self.tree() if "clawq.control.worker" in _words(p)), None)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 10.0) -> tuple[int, float, list[psutil.Process]]:
        """Signal it; returns its status, the seconds that it took, and the processes that outlived it."""
        tree = self.tree()
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        took_s = time.monotonic() - began
        return status, took_s, outliving(tree[1:], 1.0)

    def text(self) -> str:
        return self.log.read_text()


class Bench:
    """Makes runs and workers on a pair of servers, and ends them all."""

    def __init__(self, broker_url: str, data_url: str, folder: Path) -> None:
        self.broker_url, self.data_url, self.folder = broker_url, data_url, folder
        self.data = connect(data_url)
        self.registry = RunRegistry(connect(broker_url))
        self.sender = make_app(broker_url)
        self.runs: list[RunRecord] = []
        self.workers: list[WorkerProcess] = []
        self._before: set[str] = set()
        self._before = self.leftovers()

    def run(self, run_id: str, options: dict[str, Any] | None = None, **sections: Any) -> RunRecord:
        """A run with a control record and untrained weights, as a learner makes it."""
        options = {"step_s": 0.005, **(options or {})}
        environment = {"name": "point", "num_envs": 2, "options": options}
        config = RunConfig.model_validate({"name": "test", "environment": environment, **sections})
        tag = new_tag()
        record = RunRecord(
            run_id=f"{run_id}-{tag[:8]}",
            tag=tag,
            config=config.model_dump(mode="json"),
            spec=point_spec(PointOptions.model_validate(options)).to_json(),
            state="running",
            created_ms=int(time.time() * 1000),
        )
        claim = Claim.take(self.data, record.keys.claim("learner"), "test", 600.0)
        ControlRecord(self.data, record.keys).write(stop=False, window_bytes=8_000_000, config_epoch=1)
        WeightsPublisher(self.data, record.keys, claim).publish({"nothing": np.zeros(1, np.float32)}, 1, 0)
        self.registry.add(record)
        self.runs.append(record)
        return record

    def env(self, **extra: str) -> dict[str, str]:
        """What a worker on this bench finds in its environment."""
        named = {
            "CLAWQ_BROKER_URL": self.broker_url,
            "CLAWQ_DATA_URL": self.data_url,
            "CLAWQ_LOG_DIR": str(self.folder / "logs"),
        }
        return {**os.environ, **named, **extra}

    def worker(
        self, pool: str = "threads", slots: int = 1, *, supervised: bool | None = None, **env: str
    ) -> WorkerProcess:
        """`clawq worker start` (if it is to be supervised; the default for threads), or a bare `celery worker`."""
        celery = ["celery", "-A", "clawq.control.app", "worker", "-P", pool, "-c", str(slots), "-l", "INFO"]
        ours = ["clawq.cli.main", "worker", "start", "--slots", str(slots), "--pool", pool]
        log = self.folder / f"worker-{len(self.workers)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", *(ours if supervised or (supervised is None and pool == "threads") else celery)],
                env=self.env(**env),
                stdout=out,
                stderr=out,
                cwd=self.folder,
            )
        worker = WorkerProcess(process, log)
        self.workers.append(worker)
        return worker

    def lease(self, run: RunRecord, seconds: float = 1.0, count: int = 1) -> None:
        for _ in range(count):
            name = lease_queue(run.run_id)
            send_command(self.sender, "clawq.rollout", name, run_id=run.run_id, seconds=seconds)

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        """The first true value of `condition`; fails after `timeout_s` (busy machines: times CLAWQ_TEST_PATIENCE)."""
        timeout_s *= float(os.environ.get("CLAWQ_TEST_PATIENCE", "1"))
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() >= deadline:
                pytest.fail(f"waited {timeout_s:.0f} s for {what}\n{self.describe()}")
            time.sleep(0.05)
        return value

    def events(self, run: RunRecord, kind: str) -> list[Event]:
        return [event for event in Events(self.data, run.keys).read() if event.kind == kind]

    def wait_events(self, run: RunRecord, kind: str, count: int = 1, timeout_s: float = 30.0) -> list[Event]:
        def found() -> list[Event]:
            events = self.events(run, kind)
            return events if len(events) >= count else []

        return list(self.wait_for(found, f"{count} {kind} events", timeout_s))

    def entries(self, run: RunRecord) -> list[tuple[str, str]]:
        """(slot, id) of all entries in the run's streams."""
        found: list[tuple[str, str]] = []
        data: Any = self.data
        for slot in data.hkeys(run.keys.slots):
            entries = data.xrange(run.keys.stream(slot.decode()))
            found += [(slot.decode(), entry_id.decode()) for entry_id, _ in entries]
        return found

    def queued(self, run: RunRecord) -> int:
        with self.sender.connection_for_write() as connection:
            return int(connection.default_channel.queue_declare(queue=lease_queue(run.run_id)).message_count)

    def drop_queued(self, run: RunRecord) -> None:
        """Empty the queues of a run."""
        with self.sender.connection_for_write() as connection:
            for name in run_queues(run.run_id):
                connection.default_channel.queue_purge(name)

    def describe(self) -> str:
        """The last events of all runs and the ends of all logs."""
        events = [event for run in self.runs for event in Events(self.data, run.keys).read()[-20:]]
        lines = [f"{event.id} {event.kind} {json.dumps(event.facts)}" for event in events]
        lines += [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log"))]
        return "\n".join(lines)

    def forget_connections(self) -> None:
        """After a restart of the broker."""
        self.sender.close()
        self.sender = make_app(self.broker_url)

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                tree = worker.tree()
                worker.process.kill()
                worker.process.wait()
                for process in outliving(tree[1:], 5.0):
                    process.kill()
        for run in self.runs:
            self.registry.remove(run.run_id)
            delete_run(self.data, run.keys)
            self.drop_queued(run)
        self.data.close()
        self.sender.close()

    def leftovers(self) -> set[str]:
        """Celery's keys on the broker since the bench was made, beside the bookkeeping that runs out by itself."""
        broker: Any = connect(self.broker_url)
        keys = {key.decode().removeprefix(CELERY_PREFIX) for key in broker.keys(f"{CELERY_PREFIX}*")}
        broker.close()
        return keys - {"_kombu.binding_deadlines", "unacked_mutex"} - self._before


@pytest.fixture
def clawq(tmp_path: Path) -> Iterator[Clawq]:
    """A home in which commands are started, and ended after the test."""
    home = Clawq(tmp_path)
    yield home
    home.close()


@pytest.fixture
def bench(redis_servers: EmbeddedRedis, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(redis_servers.broker_url, redis_servers.data_url, tmp_path)
    yield bench
    bench.close()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[RedisProcess]:
    """A broker of one test's own, with an append-only file."""
    broker = RedisProcess(tmp_path / "own-broker", aof=True, tcp=False)
    yield broker
    broker.close()


@pytest.fixture
def own_bench(own_broker: RedisProcess, redis_servers: EmbeddedRedis, tmp_path: Path) -> Iterator[Bench]:
    """A bench whose broker the test may break."""
    bench = Bench(own_broker.url, redis_servers.data_url, tmp_path)
    yield bench
    own_broker.go_on()
    bench.close()
