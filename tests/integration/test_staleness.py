"""The staleness contract in whole runs: real Redis, worker, actors, coordinator and learner."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import POINT, Cluster

Eventually = Callable[..., None]
SLOTS = 2
#: Each env step is sampled so often that actors could make at least ten times what the learner takes.
SLOW_LEARNER = (
    *("rate_limit.samples_per_insert=64", "rate_limit.min_size_to_sample=200", "actors.fragment_s=0.02"),
    *("learner.publish_interval_s=0.5", "evaluation.interval_s=null", "record.animation=false", "budget={}"),
)


class Scene(Cluster):
    """A cluster with one worker, and runs on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.worker = self.home.start("worker", "start", "--slots", str(SLOTS))

    def start(self, run: str, *overrides: str) -> None:
        self.home.start("learner", "start", POINT, f"folder={self.home.runs}", *SLOW_LEARNER, *overrides, "--run", run)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_C23_C25_with_workers_ten_times_faster_lag_and_queue_are_bounded_by_pacing_and_nothing_is_wasted(
    scene: Scene, eventually: Eventually
) -> None:
    versions = 120
    scene.start("paced", "staleness.target=4", "staleness.hard=60")
    eventually(lambda: scene.number("paced", "updates") > 100, "updates", 90)
    begun = scene.number("paced", "weights_version")
    eventually(lambda: scene.number("paced", "weights_version") > begun + versions, "versions", 3 * versions + 30)
    # Without pacing, 1 MB of fragments in each slot's window would be some hundred versions old.
    lags, unread = scene.series("paced", "policy_lag/max"), scene.series("paced", "unread_fragments")
    assert max(lags[len(lags) // 2 :]) <= 30
    assert max(unread[len(unread) // 2 :]) <= 400
    # Both stand where they stood: they do not grow with the run.
    third = len(lags) // 3
    assert max(lags[-third:]) <= 2 * max(lags[third : 2 * third]) + 4
    # The lag is told where the gradient uses it, and waste by its name
    assert scene.number("paced", "lag_at_use/max") <= 60
    assert scene.number("paced", "wasted_fragments") <= SLOTS
    counts = scene.stop("paced")
    assert counts["rejected"].get("stale", 0) <= SLOTS
    assert counts["unaccounted_steps"] == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_C25_dropping_wastes_much_of_the_same_work_and_every_step_of_it_is_counted(
    scene: Scene, eventually: Eventually
) -> None:
    scene.start("drops", "staleness.hard=0")
    eventually(lambda: scene.number("drops", "wasted_fragments") > 10 * SLOTS, "much that is wasted", 120)
    counts = scene.stop("drops")
    assert counts["rejected"]["stale"] >= 10 * SLOTS
    assert counts["stale_steps"] == counts["refused_steps"] > 0
    told = counts["committed_steps"] + counts["refused_steps"] + sum(counts["dropped_steps"].values())
    assert counts["produced_steps"] == told + counts["unaccounted_steps"]
    assert counts["unaccounted_steps"] == 0
