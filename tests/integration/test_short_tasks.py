"""C15: ten thousand short tasks leave a worker's memory and Redis as they were, under every pool."""

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from clawq.control.celery_settings import send_command
from clawq.control.queues import lease_queue
from clawq.transport.client import connect
from clawq.transport.keys import CELERY_PREFIX
from tests.integration.test_restarts import census

if TYPE_CHECKING:
    from tests.integration.conftest import Bench, WorkerProcess

#: Tasks until memory has settled, and tasks after that.
WARM_UP, TASKS = 2000, 10_000
#: What a worker's processes may grow by over those: 100 bytes a task that stay would be seen.
GROWTH_BYTES = 1_000_000


def private_bytes(worker: "WorkerProcess") -> int:
    return sum(process.memory_full_info().uss for process in worker.tree())


def files(worker: "WorkerProcess") -> int:
    return sum(process.num_fds() + process.num_threads() for process in worker.tree())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_C15_ten_thousand_short_tasks_leave_memory_and_keys_as_they_were(own_bench: "Bench", pool: str) -> None:
    bench = own_bench
    run = bench.run("short")
    worker = bench.worker(pool, supervised=True)
    bench.lease(run, 0.3)
    bench.wait_events(run, "lease", timeout_s=60.0)
    broker: Any = connect(bench.broker_url)
    queue = CELERY_PREFIX + lease_queue(run.run_id)

    def work(count: int) -> None:
        # A lease of a run that is not there: all that a worker does for a task, and no actor.
        for _ in range(count):
            send_command(bench.sender, "clawq.rollout", lease_queue(run.run_id), run_id="nobody", seconds=1.0)
        bench.wait_for(partial(_taken, broker, queue), "all tasks to be taken", 300.0)
        done = len(bench.events(run, "lease"))
        bench.lease(run, 0.1)
        bench.wait_events(run, "lease", done + 1)

    work(WARM_UP)
    keys, memory, handles, main = census(broker), private_bytes(worker), files(worker), worker.main()
    work(TASKS)
    grown = private_bytes(worker) - memory
    assert worker.main() == main, "it was never started again"
    assert census(broker) == keys
    # A connection or a thread more may be at work at this moment, but not one for each thousand tasks.
    assert files(worker) < handles + TASKS / 1000
    assert grown < GROWTH_BYTES, f"{grown / TASKS:.0f} bytes a task stay"
    assert worker.stop(timeout_s=60.0)[0] == 0
    broker.close()


def _taken(broker: Any, queue: str) -> bool:
    return not broker.llen(queue)
