"""Rewards and terminations of Gymnasium-Robotics' goal environments, for any goals: what hindsight relabelling needs.

`GoalEnv.compute_reward(achieved, desired, info)` takes whole batches in all its environments, as
`compute_terminated` does in some; where one gives a single answer for a batch, it is asked row by row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from clawq.errors import UserError
from clawq.types import Array, BoolArray, FloatArray


class GymnasiumGoals:
    """Implements clawq.core.GoalReward.

    Args:
        env: a goal environment.

    Raises:
        UserError: it has no `compute_reward`.
    """

    def __init__(self, env: Any) -> None:
        self._env = env.unwrapped
        if not callable(getattr(self._env, "compute_reward", None)):
            raise UserError(f"replay.hindsight: {env.spec.id} is no goal environment: it has no compute_reward")

    def reward(self, achieved: FloatArray, desired: FloatArray) -> FloatArray:
        """Rewards float32 [B] of goals [B, G]."""
        return _for_each(self._env.compute_reward, achieved, desired).astype(np.float32)

    def terminated(self, achieved: FloatArray, desired: FloatArray) -> BoolArray:
        """Whether reaching these goals [B, G] ends the episode, bool [B]; never, if the environment does not say."""
        terminated = getattr(self._env, "compute_terminated", None)
        if terminated is None:
            return np.zeros(len(achieved), np.bool_)
        return _for_each(terminated, achieved, desired).astype(np.bool_)


def _for_each(judge: Callable[[Array, Array, dict[str, Any]], Any], achieved: Array, desired: Array) -> Array:
    found = np.asarray(judge(achieved, desired, {}))
    if found.shape == (len(achieved),):
        return found
    return np.array([judge(one, other, {}) for one, other in zip(achieved, desired, strict=True)]).reshape(-1)
