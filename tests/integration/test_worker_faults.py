"""Workers when things break: hung and killed actors, killed pool children, doubled commands, a broker restart."""

import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from kombu.connection import Connection
from processes import outliving
from redis_process import RedisProcess

from clawq.transport.codec import decode
from clawq.transport.control import RunRecord
from clawq.transport.keys import CELERY_PREFIX
from clawq.transport.stream import PAYLOAD_FIELD
from clawq.transport.urls import celery_url
from clawq.types import Fragment

if TYPE_CHECKING:
    from tests.integration.conftest import Bench, WorkerProcess


@pytest.mark.slow
def test_C5_a_hung_environment_is_ended_with_its_children_reported_and_replaced(bench: "Bench", tmp_path: Path) -> None:
    fault = {"kind": "hang", "at": 50, "once_file": str(tmp_path / "hung"), "child_processes": 1}
    run = bench.run("hang", {"fault": fault})
    worker = bench.worker(CLAWQ_STALL_TIMEOUT_S="2")
    bench.lease(run, 30.0)
    [actor] = bench.wait_for(worker.actors, "the actor")
    family = bench.wait_for(lambda: [actor, *actor.children()] if actor.children() else [], "the environment's child")
    [failure] = bench.wait_events(run, "actor_failed")
    assert failure.facts["reason"] == "stall"
    assert "faults.py" in failure.facts["error"], "the stack of the hung environment"
    assert outliving(family, 2.0) == []
    sent = len(bench.entries(run))
    bench.lease(run, 1.0, count=2)
    bench.wait_for(lambda: len(bench.entries(run)) > sent, "the replacement to send")
    assert worker.process.poll() is None


@pytest.mark.slow
def test_C14_a_killed_actor_and_a_killed_pool_child_cost_a_slot_only_for_a_while(bench: "Bench") -> None:
    run = bench.run("killed")
    worker = bench.worker("prefork")

    bench.lease(run, 60.0)
    bench.wait_for(lambda: bench.entries(run), "the first fragments")
    for kill_the_child in (False, True):
        [actor] = worker.actors()
        victim = psutil.Process(actor.ppid()) if kill_the_child else actor
        victim.send_signal(signal.SIGKILL)
        assert outliving([actor], 2.0) == [], "the actor does not outlive its pool child"
        before = len(bench.entries(run))
        bench.lease(run, 60.0, count=2)
        bench.wait_for(partial(_more_than, bench, run, before), "the slot to send again", 25.0)
    # And every entry is whole, follows the one before it, and is there once
    data: Any = bench.data
    for slot in {slot for slot, _ in bench.entries(run)}:
        seen: dict[int, Fragment] = {}
        for entry_id, fields in data.xrange(run.keys.stream(slot)):
            fragment = decode(fields[PAYLOAD_FIELD])
            meta, last = fragment.meta, seen.get(fragment.meta.epoch)
            assert entry_id.decode() == f"{meta.epoch}-{meta.seq}"
            assert meta.seq == (last.meta.seq + 1 if last else 1)
            assert meta.produced == meta.steps * meta.envs + (last.meta.produced if last else 0)
            for key, rows in fragment.obs.items():
                np.testing.assert_array_equal(rows[0], last.obs[key][-1] if last else rows[0])
            seen[meta.epoch] = fragment
        assert len({one.meta.seed for one in seen.values()}) == len(seen) == 3, "each actor acted on its own"


def _more_than(bench: "Bench", run: RunRecord, count: int) -> bool:
    return len(bench.entries(run)) > count


def test_C12_a_lease_that_is_delivered_twice_or_outlives_the_visibility_timeout_makes_nothing_twice(
    bench: "Bench",
) -> None:
    run = bench.run("twice")
    worker = bench.worker("prefork", slots=2)
    bench.lease(run, 4.0)
    bench.wait_for(lambda: bench.entries(run), "the lease to begin")
    # Another app on this broker, with a visibility timeout far shorter than the lease: it would take back what is not
    # acknowledged. Then the very same message once more, as Celery's own retries may send it.
    options = {"global_keyprefix": CELERY_PREFIX, "visibility_timeout": 0.5, "unacked_restore_throttle": 0}
    connect: Any = Connection
    with connect(celery_url(bench.broker_url), transport_options=options) as connection:
        channel: Any = connection.default_channel
        bench.wait_for(lambda: "received" in worker.text(), "the task")
        for _ in range(3):
            channel.qos.restore_visible(interval=0)
    assert bench.queued(run) == 0, "an early-acknowledged lease cannot be taken back"
    bench.lease(run, 2.0)
    reports = [event.facts for event in bench.wait_events(run, "lease", 2)]
    made = sum(report["fragments"] for report in reports)
    # The last fragment of a lease is sent after the lease's report.
    bench.wait_for(lambda: len(bench.entries(run)) >= made, "every fragment that was made")
    ids = bench.entries(run)
    assert max(Counter(ids).values()) == 1
    by_slot = Counter((slot, entry.split("-")[0]) for slot, entry in ids)
    assert made == len(ids)
    for (slot, epoch), count in by_slot.items():
        seqs = sorted(int(entry.split("-")[1]) for s, entry in ids if s == slot and entry.startswith(epoch))
        assert seqs == list(range(1, count + 1)), "nothing is lost"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_C13_every_pool_takes_work_again_within_thirty_seconds_of_a_broker_restart(
    own_bench: "Bench", own_broker: RedisProcess
) -> None:
    bench = own_bench
    runs = {pool: bench.run(pool) for pool in ("threads", "prefork", "solo")}
    workers = [bench.worker(pool, CLAWQ_RUNS=run.run_id) for pool, run in runs.items()]
    for run in runs.values():
        bench.lease(run, 0.5)
    for run in runs.values():
        bench.wait_events(run, "lease")
    own_broker.kill()
    for worker in workers:
        bench.wait_for(partial(_lost_connection, worker), "the loss to show")
    own_broker.start()
    restarted = time.monotonic()
    bench.forget_connections()
    for run in runs.values():
        bench.lease(run, 0.5)
    for run in runs.values():
        bench.wait_events(run, "lease", 2, timeout_s=30.0)
    assert time.monotonic() - restarted < 30.0
    assert [worker.stop()[0] for worker in workers] == [0, 0, 0]


def _lost_connection(worker: "WorkerProcess") -> bool:
    return "onnection" in worker.text().split("ready.")[-1]


def test_a_worker_ends_in_time_while_the_broker_does_not_answer(own_bench: "Bench", own_broker: RedisProcess) -> None:
    run = own_bench.run("away")
    worker = own_bench.worker()
    own_bench.lease(run, 60.0)
    own_bench.wait_for(lambda: own_bench.entries(run), "the lease")
    own_broker.stall()
    status, took_s, survivors = worker.stop()
    assert (status, survivors) == (0, [])
    assert took_s < 5.5
