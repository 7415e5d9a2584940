"""A learner is a function of its log and its schedule, however often it is killed (C28, DESIGN §5)."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lineage import PRIORITISED, Lineage, differences, follow

from clawq.programs.schedule import SCHEDULE_FILE, FragmentCommitted, SessionBegun, read_schedule
from clawq.transport.server import EmbeddedRedis


def killed_and_resumed(lineage: Lineage, kills: int, fragments: int, seed: int) -> list[str]:
    """Kill the learner at random updates, each time a little further; then let it end. What it said on resuming."""
    rng, said, updates = random.Random(seed), [], 0
    total = lineage.steps * 4 // 32
    for _ in range(kills):
        updates = min(total - 30, max(updates, 0) + rng.randrange(2, 2 * total // (kills + 1)))
        status, words = lineage.call("learn", entries=fragments, kill_at=updates, before=rng.random() < 0.5)
        assert status == -signal.SIGKILL, words
        said.append(words)
    status, words = lineage.call("learn", entries=fragments)
    assert status == 0, words
    return [*said, words]


def assert_the_twin_is_the_same(lineage: Lineage, own_process: bool) -> dict[str, Any]:
    """An uninterrupted learner, fed the log by the schedule, is the killed one to the last bit."""
    if own_process:
        status, words = lineage.call("apply")
        assert status == 0, words
    else:
        torch.set_num_threads(1)
        follow(lineage.run, lineage.folder / "log")
    learned, applied = (torch.load(lineage.run.folder / name) for name in ("learned.pt", "applied.pt"))
    assert list(differences(learned, applied)) == []
    losses = lineage.losses("losses.txt"), lineage.losses("losses_applied.txt")
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == list(range(1, learned["updates"] + 1))
    found: dict[str, Any] = learned
    return found


@pytest.mark.parametrize(
    ("replay", "kills", "fragments"),
    [
        pytest.param(PRIORITISED, 1, 60, id="prioritised", marks=pytest.mark.timeout(900)),
        pytest.param(PRIORITISED, 20, 200, id="prioritised-20", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param({}, 20, 200, id="uniform-20", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_C28_a_learner_killed_again_and_again_is_the_one_that_never_was(
    tmp_path: Path, redis_servers: EmbeddedRedis, replay: dict[str, Any], kills: int, fragments: int
) -> None:
    urls = redis_servers.broker_url, redis_servers.data_url
    lineage = Lineage(tmp_path, urls, replay, fragments)
    try:
        killed_and_resumed(lineage, kills, fragments, seed=kills)
        learned = assert_the_twin_is_the_same(lineage, own_process=kills > 1)
        assert learned["env_steps"] == lineage.steps
        assert learned["updates"] > 100
        records = list(read_schedule(lineage.run.folder / SCHEDULE_FILE))
        # Every fragment once, whoever committed it; and sessions whose checkpoint was overtaken did not happen.
        committed = [(r.slot, r.epoch, r.seq) for r in records if isinstance(r, FragmentCommitted)]
        assert len(committed) == len(set(committed)) == fragments
        assert 1 <= sum(isinstance(r, SessionBegun) for r in records) <= kills + 1
    finally:
        lineage.close()
