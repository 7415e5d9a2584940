"""Episodes compared with what really happened (`clawq.testing.experience.Truth`)."""

from collections.abc import Iterable

import numpy as np

from clawq.programs.episodes import Episode
from clawq.testing.experience import TrueStep, Truth, ids_of


def assert_true(episodes: Iterable[Episode], truth: Truth) -> None:
    """The episodes hold each valid step of the truth once, and nothing else."""
    seen: dict[int, TrueStep] = {}
    for episode in episodes:
        ids = ids_of(episode.obs)
        assert len(ids) == episode.steps + 1
        for t in range(episode.steps):
            step = truth.steps[int(ids[t])]
            assert step.valid
            assert int(ids[t]) not in seen
            seen[int(ids[t])] = step
            assert (step.next_obs, step.reward) == (int(ids[t + 1]), float(episode.reward[t]))
            assert (step.terminated, step.truncated) == (bool(episode.terminated[t]), bool(episode.truncated[t]))
            assert step.weights_version == episode.weights_version[t]
            np.testing.assert_array_equal(step.action, episode.action[t])
            # Rows beside each other are steps after one another
            assert t + 1 == episode.steps or step.following is truth.steps[int(ids[t + 1])]
        last = truth.steps[int(ids[-2])]
        assert episode.ended == (last.terminated or last.truncated)
    assert seen.keys() == {obs for obs, step in truth.steps.items() if step.valid}
