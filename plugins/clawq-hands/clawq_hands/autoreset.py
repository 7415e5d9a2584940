"""Any `gymnasium.vector.VectorEnv`, in any of its three autoreset modes, under clawq's convention.

    mode        obs when an env ends   the step after                      what is done here
    NEXT_STEP   its last one           action ignored, reward 0, obs=s0    that row gets valid=False
    SAME_STEP   s0                     an ordinary one                     final_obs is taken from the infos
    DISABLED    its last one           refused until it is reset           reset with a mask, within the step

The multiset of valid transitions is the same whatever the mode (case C42).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from clawq.core import StepResult
from clawq.errors import UserError
from clawq.specs import EnvSpec, check_shape
from clawq.types import BoolArray, FloatArray, Obs
from clawq_hands.spaces import describe, empty_obs, flat, write_row


class AutoresetAdapter:
    """A `clawq.core.VectorEnv` over a Gymnasium vector env.

    Args:
        envs: the vector env; its `metadata["autoreset_mode"]` says how it resets. Closed by `close`.
        name: what the spec is called.
        max_episode_steps: time limit, 0 if unknown.

    Raises:
        UnsupportedSpace: a space that clawq cannot carry.
        UserError: a vector env that does not declare its autoreset mode.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], name: str, max_episode_steps: int = 0) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise UserError(f"{name}: metadata['autoreset_mode'] is {mode!r}, so episode ends are unknown")
        self._envs, self._mode = envs, mode
        self._spec = describe(name, envs.single_observation_space, envs.single_action_space, max_episode_steps)
        self._resetting = np.zeros(envs.num_envs, np.bool_)

    @property
    def spec(self) -> EnvSpec:
        """What one env shows and takes."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """N."""
        return int(self._envs.num_envs)

    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start all episodes; one seed for each env."""
        self._resetting[:] = False
        # Every vector env takes a list of seeds; only the base class is annotated without it.
        chosen: Any = [int(seed) for seed in seeds]
        return self._take(self._envs.reset(seed=chosen)[0])

    def step(self, action: FloatArray) -> StepResult:
        """Take one step with env-space actions [N, A]."""
        valid = ~self._resetting
        seen, reward, terminated, truncated, facts = self._envs.step(action)
        obs = self._take(seen)
        # Copies: vector envs may hand out their own buffers.
        terminated, truncated = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        ended = terminated | truncated
        success = _success(facts, self.num_envs)
        if self._mode is AutoresetMode.SAME_STEP:
            final_obs = self._final_from(facts, ended)
            success = np.where(ended, _success(facts.get("final_info", {}), self.num_envs), success)
        else:
            final_obs = {key: column[ended] for key, column in obs.items()}
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resetting = ended
        elif self._mode is AutoresetMode.DISABLED and ended.any():
            obs = self._take(self._envs.reset(options={"reset_mask": ended})[0])
        reward = np.array(reward, np.float32)
        return StepResult(obs, reward, terminated, truncated, valid, final_obs, success.astype(np.float32))

    def restart(self, rows: BoolArray) -> Obs:
        """Abandon the episodes of the chosen rows [N] and start new ones; returns obs of all N rows."""
        self._resetting = self._resetting & ~rows
        return self._take(self._envs.reset(options={"reset_mask": rows.copy()})[0])

    def close(self) -> None:
        """Close the vector env."""
        self._envs.close()

    def _take(self, seen: Any) -> Obs:
        """Our own copy, in the spec's order and dtypes; SpecMismatch if it has other shapes."""
        parts = flat(seen)
        for key, spec in self._spec.obs.items():
            check_shape(f"obs.{key}", parts[key], (self.num_envs, *spec.shape))
        with np.errstate(over="ignore", invalid="ignore"):
            return {key: np.array(parts[key], spec.dtype) for key, spec in self._spec.obs.items()}

    def _final_from(self, facts: dict[str, Any], ended: BoolArray) -> Obs:
        rows = np.flatnonzero(ended)
        final_obs = empty_obs(self._spec, len(rows))
        for k, i in enumerate(rows):
            write_row(final_obs, k, facts["final_obs"][i])
        return final_obs


def _success(facts: dict[str, Any], n: int) -> FloatArray:
    """[N]: 1 or 0 where an env reports success, else nan."""
    success = np.full(n, np.nan, np.float32)
    for name in ("success", "is_success"):
        if name in facts:
            reported = np.asarray(facts[name], np.float32)
            success = np.where(np.asarray(facts.get(f"_{name}", True), np.bool_), reported, success)
    return success


__all__ = ["AutoresetAdapter"]
