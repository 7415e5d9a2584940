"""Gymnasium spaces -> clawq specs, and observations -> flat dicts of arrays.

A flat Box becomes one observation `policy`. A Dict of Boxes keeps its keys and its own order. A goal environment
(observation, achieved_goal, desired_goal) shows its policy `observation` and `desired_goal`; the achieved goal travels
along for hindsight. uint8 stays uint8 (images); every other number becomes float32.

What clawq cannot carry is refused here, before anything is simulated, with the space, the reason and what would do.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from clawq.errors import UnsupportedSpace, UserError
from clawq.specs import ActionSpec, ArraySpec, EnvSpec, check_shape
from clawq.types import Obs

#: Name of the one observation of an environment with a flat Box.
FLAT_KEY = "policy"
#: The three keys of a goal environment (gymnasium_robotics.core.GoalEnv).
GOAL_KEYS = frozenset({"observation", "achieved_goal", "desired_goal"})


def describe(
    name: str,
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    max_episode_steps: int = 0,
    policy_keys: Sequence[str] = (),
    critic_keys: Sequence[str] = (),
) -> EnvSpec:
    """The EnvSpec of a single env.

    Args:
        name: what errors call it and what the fingerprint covers, as `gymnasium:HandReachDense-v3`.
        observation: space of one observation.
        action: space of one action.
        max_episode_steps: time limit, 0 if there is none.
        policy_keys: what the policy sees; empty = chosen from the space (see the module's text).
        critic_keys: what the critic sees; empty = as the policy, and privileged keys where the space has them.

    Raises:
        UnsupportedSpace: a space that clawq cannot carry.
        UserError: a key that the environment does not have.
    """
    obs = _obs_specs(name, observation)
    policy, critic, goal = _default_keys(tuple(obs))
    for option, keys in (("policy_keys", policy_keys), ("critic_keys", critic_keys)):
        unknown = [key for key in keys if key not in obs]
        if unknown:
            raise UserError(f"{name}: {option} names {', '.join(unknown)}; the observations are {', '.join(obs)}")
    return EnvSpec(
        name=name,
        obs=obs,
        action=_action_spec(name, action),
        policy_keys=tuple(policy_keys) or policy,
        critic_keys=tuple(critic_keys) or tuple(policy_keys) or critic,
        max_episode_steps=max_episode_steps,
        goal_keys=goal,
    )


def spec_name(env_id: str, kwargs: Mapping[str, Any]) -> str:
    """`gymnasium:<id>`, and the kwargs where there are some: they may change what an env is without its shapes."""
    extra = f"?{json.dumps(dict(kwargs), sort_keys=True, separators=(',', ':'))}" if kwargs else ""
    return f"gymnasium:{env_id}{extra}"


def flat(observation: Any) -> Mapping[str, Any]:
    """An env's observation as a mapping: itself if it is one, else under `policy`."""
    return observation if isinstance(observation, dict) else {FLAT_KEY: observation}


def empty_obs(spec: EnvSpec, rows: int) -> Obs:
    """Uninitialised arrays key -> [rows, ...]."""
    return {key: np.empty((rows, *array.shape), array.dtype) for key, array in spec.obs.items()}


def write_row(obs: Obs, i: int, seen: Any) -> None:
    """Copy one env's observation into row i of `obs`; SpecMismatch if its shape is not the spec's."""
    parts = flat(seen)
    for key, column in obs.items():
        check_shape(f"obs.{key}", parts[key], column.shape[1:])
        column[i] = parts[key]


def _default_keys(keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(policy keys, critic keys, goal keys) of a space with those keys."""
    if GOAL_KEYS.issubset(keys):
        seen = ("observation", "desired_goal")
        return seen, seen, ("achieved_goal", "desired_goal")
    if FLAT_KEY in keys:
        return (FLAT_KEY,), keys, ()
    return keys, keys, ()


def _obs_specs(name: str, space: spaces.Space[Any]) -> dict[str, ArraySpec]:
    if isinstance(space, spaces.Dict):
        if not space.spaces:
            raise UnsupportedSpace(f"{name}: the observation space is an empty Dict; clawq needs at least one Box.")
        return {key: _obs_spec(f"{name}: observation {key!r}", part) for key, part in space.spaces.items()}
    return {FLAT_KEY: _obs_spec(f"{name}: the observation", space)}


def _obs_spec(what: str, space: spaces.Space[Any]) -> ArraySpec:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.number):
        raise UnsupportedSpace(
            f"{what} is {_word(space)}; clawq carries a Box of numbers, or one flat Dict of such Boxes. "
            "Flatten it with a wrapper (gymnasium.wrappers.FlattenObservation) in an environment plugin of your own."
        )
    return ArraySpec(tuple(space.shape), "uint8" if space.dtype == np.uint8 else "float32")


def _action_spec(name: str, space: spaces.Space[Any]) -> ActionSpec:
    supported = "clawq acts in a bounded one-dimensional Box of floats"
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UnsupportedSpace(f"{name}: the action space is {_word(space)}; {supported}.")
    if len(space.shape) != 1:
        raise UnsupportedSpace(f"{name}: the action space is a Box of shape {list(space.shape)}; {supported}.")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UnsupportedSpace(
            f"{name}: the action space is unbounded; {supported}. "
            "Give it bounds with a wrapper (gymnasium.wrappers.RescaleAction) in an environment plugin of your own."
        )
    return ActionSpec(tuple(float(x) for x in space.low), tuple(float(x) for x in space.high))


def _word(space: spaces.Space[Any]) -> str:
    """A space in a few words: `Discrete(4)`, `a Dict`, `a Box of bool`."""
    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})"
    if isinstance(space, spaces.Box):
        return f"a Box of {space.dtype}"
    return f"a {type(space).__name__}"


__all__ = ["FLAT_KEY", "GOAL_KEYS", "describe", "empty_obs", "flat", "spec_name", "write_row"]
