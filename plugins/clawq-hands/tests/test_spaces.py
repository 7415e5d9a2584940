from typing import Any

import numpy as np
import pytest
from clawq_hands.spaces import describe, spec_name
from gymnasium import spaces

from clawq.errors import UnsupportedSpace, UserError
from clawq.specs import ArraySpec

ACTION = spaces.Box(-1.0, 1.0, (2,), np.float32)


def box(*shape: int, dtype: Any = np.float64) -> spaces.Box:
    return spaces.Box(0, 255, shape, dtype) if dtype == np.uint8 else spaces.Box(-np.inf, np.inf, shape, dtype)


def test_a_flat_box_is_the_policys_observation() -> None:
    spec = describe("x", box(5), ACTION, 50)
    assert spec.obs == {"policy": ArraySpec((5,), "float32")}
    assert spec.policy_keys == spec.critic_keys == ("policy",)
    assert spec.max_episode_steps == 50


def test_a_goal_environment_shows_its_policy_the_wanted_goal_only() -> None:
    space = spaces.Dict({"observation": box(4), "achieved_goal": box(2), "desired_goal": box(2)})
    spec = describe("x", space, ACTION)
    assert list(spec.obs) == list(space.spaces)
    assert spec.policy_keys == spec.critic_keys == ("observation", "desired_goal")
    assert spec.goal_keys == ("achieved_goal", "desired_goal")


def test_privileged_observations_are_the_critics() -> None:
    spec = describe("x", spaces.Dict({"policy": box(3), "privileged": box(4)}), ACTION)
    assert spec.policy_keys == ("policy",)
    assert set(spec.critic_keys) == {"policy", "privileged"}


def test_images_stay_uint8_and_chosen_keys_are_kept() -> None:
    space = spaces.Dict({"camera": box(8, 8, 3, dtype=np.uint8), "joints": box(4)})
    spec = describe("x", space, ACTION, policy_keys=("joints",))
    assert spec.obs["camera"] == ArraySpec((8, 8, 3), "uint8")
    assert spec.policy_keys == spec.critic_keys == ("joints",)


def test_lopsided_bounds_are_kept() -> None:
    spec = describe("x", box(1), spaces.Box(np.array([-0.2, -1.0]), np.array([1.4, 1.0]), dtype=np.float64))
    assert spec.action.low == (-0.2, -1.0)
    assert spec.action.high == (1.4, 1.0)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (spaces.Discrete(4), r"Discrete\(4\)"),
        (spaces.MultiDiscrete([2, 3]), "MultiDiscrete"),
        (spaces.Box(-np.inf, np.inf, (2,)), "unbounded.*RescaleAction"),
        (spaces.Box(-1, 1, (2, 2)), r"shape \[2, 2\]"),
        (spaces.Box(0, 5, (2,), np.int64), "Box of int64"),
    ],
)
def test_actions_that_cannot_be_carried_are_refused_with_what_can(action: spaces.Space[Any], said: str) -> None:
    with pytest.raises(UnsupportedSpace, match=said) as caught:
        describe("gymnasium:Thing-v0", box(3), action)
    assert "gymnasium:Thing-v0" in str(caught.value)
    assert "bounded one-dimensional Box" in str(caught.value)


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        (spaces.Discrete(4), r"the observation is Discrete\(4\)"),
        (spaces.Tuple((box(2), box(3))), "a Tuple"),
        (spaces.Text(5), "a Text"),
        (spaces.Dict({"a": box(2), "b": spaces.Dict({"c": box(1)})}), "observation 'b' is a Dict"),
        (spaces.Dict({}), "empty Dict"),
    ],
)
def test_observations_that_cannot_be_carried_are_refused(observation: spaces.Space[Any], said: str) -> None:
    with pytest.raises(UnsupportedSpace, match=said):
        describe("x", observation, ACTION)


def test_a_key_that_is_not_there_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match="policy_keys names nothing; the observations are policy"):
        describe("x", box(2), ACTION, policy_keys=("nothing",))


def test_kwargs_change_the_fingerprint() -> None:
    plain = describe(spec_name("A-v1", {}), box(2), ACTION)
    changed = describe(spec_name("A-v1", {"reward_type": "sparse"}), box(2), ACTION)
    assert plain.name == "gymnasium:A-v1"
    assert plain.fingerprint != changed.fingerprint
