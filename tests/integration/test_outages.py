"""Workers and the end of their Redis: they wait and say so, or end with what they were for; real processes."""

import signal
from collections.abc import Callable

import pytest
from clawq_process import Clawq

from clawq.transport.server import EmbeddedRedis

Eventually = Callable[..., None]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_ends_with_the_servers_of_its_machine_that_will_never_come_back(
    clawq: Clawq, eventually: Eventually
) -> None:
    clawq.start("redis", "start")
    eventually(lambda: "no runs" in clawq.call("status").output, "the servers run", 60)
    worker = clawq.start("worker", "start", "--slots", "1")
    eventually(lambda: "ready" in worker.output, "the worker is connected", 60)
    assert clawq.call("redis", "stop").status == 0
    assert worker.wait(60) == 0, worker.output
    assert "the Redis servers of this machine have ended" in worker.output
    assert "Traceback" not in worker.output


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_waits_for_a_redis_that_was_named_says_so_and_ends_in_bounded_time_meanwhile(
    clawq: Clawq, own_servers: EmbeddedRedis, eventually: Eventually
) -> None:
    urls = {"CLAWQ_BROKER_URL": own_servers.broker_url, "CLAWQ_DATA_URL": own_servers.data_url}
    worker = clawq.start("worker", "start", "--slots", "1", **urls)
    eventually(lambda: "ready" in worker.output, "the worker is connected", 60)
    own_servers.stop()
    eventually(lambda: "the worker waits for it" in worker.output, "it says that it waits", 60)
    assert worker.status is None
    status, took_s, left = worker.stop(signal.SIGTERM, 60)
    assert status == 0, worker.output
    assert took_s < 10
    assert not left
