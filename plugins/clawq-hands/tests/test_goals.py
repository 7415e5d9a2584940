"""Rewards for any goals are those that the environments give."""

from typing import Any

import numpy as np
import pytest
from clawq_hands.goals import GymnasiumGoals
from clawq_hands.plugin import GymnasiumOptions, plugin

from clawq.errors import UserError


@pytest.mark.parametrize(
    "env_id",
    [
        "FetchReach-v4",
        "FetchReachDense-v4",
        "FetchPush-v4",
        "HandReach-v3",
        "HandReachDense-v3",
        "HandManipulateBlock-v1",
    ],
)
def test_C36_for_its_own_goals_the_rewards_are_those_of_the_rollout(env_id: str) -> None:
    options = GymnasiumOptions(id=env_id)
    env, goals = plugin.make(options, 2), plugin.make_goals(options)
    obs, rng = env.reset([1, 2]), np.random.default_rng(0)
    rewards, achieved, desired = [], [], []
    for _ in range(8):
        result = env.step(rng.uniform(-1, 1, (2, env.spec.action.size)).astype(np.float32))
        rewards.append(result.reward)
        achieved.append(result.obs["achieved_goal"])
        desired.append(obs["desired_goal"])
        obs = result.obs
    env.close()
    many = [np.concatenate(column) for column in (achieved, desired)]
    np.testing.assert_allclose(goals.reward(*many), np.concatenate(rewards), atol=1e-5)
    # A goal that is reached exactly has the best reward there is.
    assert np.abs(goals.reward(many[0], many[0])).max() < 1e-6
    assert not goals.terminated(*many).any()


class OneByOne:
    """A goal environment that judges single goals only, as the mazes of Gymnasium-Robotics do."""

    spec = None

    @property
    def unwrapped(self) -> "OneByOne":
        return self

    def compute_reward(self, achieved: Any, desired: Any, info: dict[str, Any]) -> float:
        return -float(np.linalg.norm(achieved - desired))

    def compute_terminated(self, achieved: Any, desired: Any, info: dict[str, Any]) -> bool:
        return bool(np.linalg.norm(achieved - desired) < 0.5)


def test_an_environment_that_judges_one_by_one_is_asked_one_by_one() -> None:
    goals = GymnasiumGoals(OneByOne())
    achieved, desired = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32), np.zeros((2, 2), np.float32)
    assert goals.reward(achieved, desired).tolist() == [0.0, -5.0]
    assert goals.terminated(achieved, desired).tolist() == [True, False]


def test_an_environment_without_goals_is_refused() -> None:
    with pytest.raises(UserError, match="no goal environment"):
        plugin.make_goals(GymnasiumOptions(id="Reacher-v5"))
