"""N single Gymnasium environments stepped one after the other, under clawq's convention.

An env that ends is reset within the step: its `obs` row is the first observation of the next episode and its true last
observation is in `final_obs`. So every row is a real transition (`valid` is always true), and nothing is wasted on
reset steps. There are no threads and no processes here: one actor is one core, and a worker runs as many actors as it
has slots.

Later episodes go on with each env's own random stream; only `reset` seeds it.
"""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from clawq.core import StepResult
from clawq.errors import SimulatorFailed, UserError
from clawq.specs import EnvSpec
from clawq.types import Array, BoolArray, FloatArray, Obs
from clawq_hands.spaces import empty_obs, write_row


class GymnasiumVector:
    """A `clawq.core.VectorEnv` over single envs that all have the same spec.

    Args:
        envs: the envs; closed by `close`.
        spec: what one of them shows and takes.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], spec: EnvSpec) -> None:
        self._envs = list(envs)
        self._spec = spec
        self._action_dtype = self._envs[0].action_space.dtype or np.dtype(np.float32)

    @property
    def spec(self) -> EnvSpec:
        """What one env shows and takes."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """N."""
        return len(self._envs)

    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start all episodes; one seed for each env. Returns key -> [N, ...]."""
        obs = empty_obs(self._spec, self.num_envs)
        for i, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            write_row(obs, i, env.reset(seed=int(seed))[0])
        self._obs = obs
        return {key: column.copy() for key, column in obs.items()}

    def step(self, action: FloatArray) -> StepResult:
        """Take one step with env-space actions [N, A]; see `clawq.core.StepResult`."""
        n = self.num_envs
        obs = empty_obs(self._spec, n)
        reward = np.empty(n, np.float32)
        terminated, truncated = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        success = np.full(n, np.nan, np.float32)
        finals: list[Any] = []
        # A simulator that blows up may leave float32's range; the adder finds such rows, numpy need not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (env, row) in enumerate(zip(self._envs, action.astype(self._action_dtype, copy=False), strict=True)):
                seen, reward[i], ended, cut, facts = _stepped(env, row)
                success[i] = _success(facts)
                if ended or cut:
                    terminated[i], truncated[i] = ended, cut
                    finals.append(seen)
                    seen = env.reset()[0]
                write_row(obs, i, seen)
            final_obs = empty_obs(self._spec, len(finals))
            for k, seen in enumerate(finals):
                write_row(final_obs, k, seen)
        self._obs = obs
        valid = np.ones(n, np.bool_)
        return StepResult(obs, reward, terminated, truncated, valid, final_obs, success)

    def restart(self, rows: BoolArray) -> Obs:
        """Abandon the episodes of the chosen rows [N] and start new ones; returns obs of all N rows."""
        for i in np.flatnonzero(rows):
            write_row(self._obs, int(i), self._envs[i].reset()[0])
        return {key: column.copy() for key, column in self._obs.items()}

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()


class RenderedGymnasium(GymnasiumVector):
    """A vector of one env that can be drawn."""

    def frame(self) -> Array:
        """The env as it is now, uint8 [H, W, 3].

        Raises:
            UserError: the env cannot draw pictures here.
        """
        try:
            picture = self._envs[0].render()
        except Exception as error:  # every simulator has its own, mujoco.FatalError among them
            raise UserError(f"{self._spec.name} cannot be drawn here: {type(error).__name__}: {error}") from error
        if not isinstance(picture, np.ndarray):
            raise UserError(f"{self._spec.name} gives no rgb_array picture, so it cannot be drawn")
        return picture


def _stepped(env: gymnasium.Env[Any, Any], action: Array) -> Any:
    """One step; SimulatorFailed if MuJoCo has given up, which is for all envs of the process."""
    try:
        return env.step(action)
    except Exception as error:
        # By name: MuJoCo need not be installed for other simulators.
        if type(error).__module__.startswith("mujoco") and type(error).__name__ in ("FatalError", "UnexpectedError"):
            raise SimulatorFailed(f"MuJoCo cannot go on: {error}") from error
        raise


def _success(facts: dict[str, Any]) -> float:
    """1 or 0 where the env reports success (goal envs `is_success`, Adroit `success`), else nan."""
    reported = facts.get("is_success", facts.get("success"))
    return math.nan if reported is None else float(reported)


__all__ = ["GymnasiumVector", "RenderedGymnasium"]
