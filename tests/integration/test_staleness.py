"""The staleness contract in whole runs: real Redis, worker, actors, coordinator and learner."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from books import assert_books_balance
from clawq_process import ROOT, Clawq

from clawq.transport.client import connect
from clawq.transport.control import RunRegistry
from clawq.transport.server import EmbeddedRedis

Eventually = Callable[..., None]
POINT = str(ROOT / "configs" / "point.yaml")
SLOTS = 2
#: Each env step is sampled so often that actors could make at least ten times what the learner takes.
SLOW_LEARNER = (
    *("rate_limit.samples_per_insert=64", "rate_limit.min_size_to_sample=200", "actors.fragment_s=0.02"),
    *("learner.publish_interval_s=0.5", "evaluation.interval_s=null", "record.animation=false", "budget={}"),
)


class Scene:
    """Two servers, one worker, and runs on it."""

    def __init__(self, servers: EmbeddedRedis, home: Clawq) -> None:
        self.home = home
        self.data: Any = connect(servers.data_url)
        self.registry = RunRegistry(connect(servers.broker_url))
        self.worker = home.start("worker", "start", "--slots", str(SLOTS))

    def start(self, run: str, *overrides: str) -> None:
        self.home.start("learner", "start", POINT, f"folder={self.home.runs}", *SLOW_LEARNER, *overrides, "--run", run)

    def series(self, run: str, name: str) -> list[float]:
        """All values of a metric so far, one a second."""
        return [float(line[name]) for line in self.home.metrics(run) if line.get(name) is not None]

    def newest(self, run: str, name: str) -> float:
        return (self.series(run, name) or [0.0])[-1]

    def stop(self, run: str) -> dict[str, Any]:
        """Stop the learner; the checkpoint's counts, after checking that all books balance."""
        record = self.registry.get(run)
        assert record is not None
        assert self.home.call("learner", "stop", run).status == 0
        return assert_books_balance(self.data, record.keys, self.home.runs / run)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    servers = EmbeddedRedis.start(tmp_path / "redis", data_memory_mb=128)
    home = Clawq(tmp_path, CLAWQ_BROKER_URL=servers.broker_url, CLAWQ_DATA_URL=servers.data_url)
    scene = Scene(servers, home)
    yield scene
    home.close()
    scene.data.close()
    servers.stop()


@pytest.mark.parametrize(
    "versions",
    [
        pytest.param(15, marks=pytest.mark.timeout(150)),
        pytest.param(120, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)
def test_C23_C25_with_workers_ten_times_faster_lag_and_queue_are_bounded_by_pacing_and_nothing_is_wasted(
    scene: Scene, eventually: Eventually, versions: int
) -> None:
    scene.start("paced", "staleness.target=4", "staleness.hard=60")
    eventually(lambda: scene.newest("paced", "updates") > 100, "updates", 90)
    begun = scene.newest("paced", "weights_version")
    eventually(lambda: scene.newest("paced", "weights_version") > begun + versions, "versions", 3 * versions + 30)
    # Without pacing, 1 MB of fragments in each slot's window would be some hundred versions old.
    lags, unread = scene.series("paced", "policy_lag/max"), scene.series("paced", "unread_fragments")
    assert max(lags[len(lags) // 2 :]) <= 30
    assert max(unread[len(unread) // 2 :]) <= 400
    # Both stand where they stood: they do not grow with the run.
    third = len(lags) // 3
    assert max(lags[-third:]) <= 2 * max(lags[third : 2 * third]) + 4
    # The lag is told where the gradient uses it, and waste by its name
    assert scene.newest("paced", "lag_at_use/max") <= 60
    assert scene.newest("paced", "wasted_fragments") <= SLOTS
    counts = scene.stop("paced")
    assert counts["rejected"].get("stale", 0) <= SLOTS
    assert counts["unaccounted_steps"] == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_C25_dropping_wastes_much_of_the_same_work_and_every_step_of_it_is_counted(
    scene: Scene, eventually: Eventually
) -> None:
    scene.start("drops", "staleness.hard=0")
    eventually(lambda: scene.newest("drops", "wasted_fragments") > 10 * SLOTS, "much that is wasted", 120)
    counts = scene.stop("drops")
    assert counts["rejected"]["stale"] >= 10 * SLOTS
    assert counts["stale_steps"] == counts["refused_steps"] > 0
    told = counts["committed_steps"] + counts["refused_steps"] + sum(counts["dropped_steps"].values())
    assert counts["produced_steps"] == told + counts["unaccounted_steps"]
    assert counts["unaccounted_steps"] == 0
