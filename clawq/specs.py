"""Specs: what an environment's arrays are, and the one place where actions are scaled.

An `EnvSpec` travels with a run (as JSON) and its fingerprint with every fragment, so that a worker whose simulator
differs is noticed by the learner instead of spoiling the replay ring.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clawq.errors import SpecMismatch
from clawq.types import FloatArray, Obs

#: dtypes that the wire carries as observations.
OBS_DTYPES = ("float32", "uint8")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape (without T, N, B) and dtype name of one array."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def size(self) -> int:
        """Number of items."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one array."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """A bounded continuous action of A numbers.

    Policies act in [-1, 1]^A (policy space); that is what is stored and learned from. `to_env` is the only place where
    an action is clipped and scaled to the env's own bounds.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """A."""
        return len(self.low)

    def to_env(self, action: FloatArray) -> FloatArray:
        """Policy-space actions [..., A] -> env actions [..., A], float32, inside the bounds.

        -1 maps to `low`, 0 to the middle, +1 to `high`; what lies outside [-1, 1] is clipped first.
        """
        low = np.asarray(self.low, np.float32)
        high = np.asarray(self.high, np.float32)
        unit = (np.clip(action, -1.0, 1.0) + 1.0) * np.float32(0.5)
        return np.clip(low + unit * (high - low), low, high).astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What one environment shows and takes.

    Attributes:
        name: `plugin:id`, for people and for the fingerprint.
        obs: key -> spec, in the env's own order.
        action: the action spec.
        policy_keys: the observation keys that the policy sees, in order (concatenated).
        critic_keys: the keys that the critic sees.
        max_episode_steps: time limit in env steps, 0 if there is none.
        goal_keys: (achieved, desired) for goal environments, else empty.
    """

    name: str
    obs: Mapping[str, ArraySpec]
    action: ActionSpec
    policy_keys: tuple[str, ...]
    critic_keys: tuple[str, ...]
    max_episode_steps: int = 0
    goal_keys: tuple[str, ...] = field(default=())

    @property
    def policy_size(self) -> int:
        """Width of the policy's input."""
        return sum(self.obs[key].size for key in self.policy_keys)

    @property
    def critic_size(self) -> int:
        """Width of the critic's observation input."""
        return sum(self.obs[key].size for key in self.critic_keys)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; `from_json` is its inverse."""
        return {
            "name": self.name,
            "obs": {key: [list(spec.shape), spec.dtype] for key, spec in self.obs.items()},
            "action": [list(self.action.low), list(self.action.high)],
            "policy_keys": list(self.policy_keys),
            "critic_keys": list(self.critic_keys),
            "max_episode_steps": self.max_episode_steps,
            "goal_keys": list(self.goal_keys),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "EnvSpec":
        """Inverse of `to_json`."""
        return cls(
            name=raw["name"],
            obs={key: ArraySpec(tuple(shape), dtype) for key, (shape, dtype) in raw["obs"].items()},
            action=ActionSpec(tuple(raw["action"][0]), tuple(raw["action"][1])),
            policy_keys=tuple(raw["policy_keys"]),
            critic_keys=tuple(raw["critic_keys"]),
            max_episode_steps=raw["max_episode_steps"],
            goal_keys=tuple(raw["goal_keys"]),
        )

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when name, keys, order, shapes, dtypes or bounds change."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def check_obs(self, obs: Obs, lead: tuple[int, ...]) -> None:
        """Raise SpecMismatch unless `obs` has exactly our keys, each `lead + shape` of our dtype."""
        if list(obs) != list(self.obs):
            raise SpecMismatch("obs", f"keys {list(self.obs)}", f"keys {list(obs)}")
        for key, spec in self.obs.items():
            check_array(f"obs.{key}", obs[key], ArraySpec(lead + spec.shape, spec.dtype))


def check_shape(leaf: str, array: Any, shape: tuple[int, ...]) -> None:
    """Raise SpecMismatch unless `array` has exactly that shape: numpy would spread a smaller one without a word."""
    # The first look is for arrays, and cheap: this is asked of every observation. The second one is for lists.
    if getattr(array, "shape", None) != shape and np.shape(array) != shape:
        raise SpecMismatch(leaf, f"shape {list(shape)}", f"shape {list(np.shape(array))}")


def check_array(leaf: str, array: Any, spec: ArraySpec) -> None:
    """Raise SpecMismatch unless `array` has exactly that shape and dtype."""
    got = ArraySpec(tuple(array.shape), str(array.dtype))
    if got != spec:
        raise SpecMismatch(leaf, str(spec), str(got))
