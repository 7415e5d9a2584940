"""`point`: a goal environment without a simulator, numpy only. For tests, smoke runs and first steps.

A point in the square [-1, 1]² moves by at most `SPEED` a step towards where the action says; the reward is minus its
distance to the goal after the step, and an episode ends by a time limit (truncated). It has everything that a hand
environment has and the tests need: goal keys, an asymmetric action bound, exact final observations, success reports,
frames, and faults on purpose. TD3 and SAC reach success 1.0 within a few hundred updates.

All randomness comes from the seed of each env: the same seeds and actions give the same rows, bit for bit.
"""

import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from clawq.core import StepResult
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.testing.faults import FaultPlan, Faults
from clawq.types import Array, BoolArray, FloatArray, Obs

#: Largest move in one step along each axis.
SPEED = 0.2
#: Distance to the goal that counts as success.
REACHED = 0.1
#: Bounds of the env's own actions: lopsided, so that wrong scaling shows.
LOW, HIGH = (-1.0, -0.5), (1.0, 1.5)

_FRAME = 96


class PointOptions(BaseModel):
    """Options of the `point` environment.

    Attributes:
        max_episode_steps: time limit.
        terminate_on_success: end an episode (terminated) when the goal is reached.
        step_s: each batched step sleeps so long, to be as slow as a simulator.
        fault: what goes wrong on purpose.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_episode_steps: int = Field(default=20, ge=1)
    terminate_on_success: bool = False
    step_s: float = Field(default=0.0, ge=0.0, le=60.0)
    fault: FaultPlan = FaultPlan()


def point_spec(options: PointOptions) -> EnvSpec:
    """The spec: observation [2] position, achieved_goal [2], desired_goal [2]; action [2]."""
    return EnvSpec(
        name="point:goal",
        obs={key: ArraySpec((2,)) for key in ("observation", "achieved_goal", "desired_goal")},
        action=ActionSpec(LOW, HIGH),
        policy_keys=("observation", "desired_goal"),
        critic_keys=("observation", "desired_goal"),
        max_episode_steps=options.max_episode_steps,
        goal_keys=("achieved_goal", "desired_goal"),
    )


class PointEnv:
    """N points; implements core.VectorEnv (and core.RenderedEnv)."""

    def __init__(self, options: PointOptions, num_envs: int) -> None:
        self._options = options
        self._spec = point_spec(options)
        self._num_envs = num_envs
        self._faults = Faults(options.fault)
        self._rngs = [np.random.default_rng(index) for index in range(num_envs)]
        self._position = np.zeros((num_envs, 2), np.float32)
        self._goal = np.zeros((num_envs, 2), np.float32)
        self._age = np.zeros(num_envs, np.int64)
        idle = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._children = [subprocess.Popen(idle) for _ in range(options.fault.child_processes)]

    @property
    def spec(self) -> EnvSpec:
        """See `point_spec`."""
        return self._spec

    @property
    def num_envs(self) -> int:
        """N."""
        return self._num_envs

    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start all episodes; one seed for each env."""
        self._faults.strike("reset")
        self._rngs = [np.random.default_rng(seed) for seed in seeds]
        self._begin(np.ones(self._num_envs, np.bool_))
        return self._obs()

    def step(self, action: FloatArray) -> StepResult:
        """Move all points: env-space actions [N, 2] inside LOW..HIGH."""
        broken = self._faults.strike("step")
        if self._options.step_s:
            time.sleep(self._options.step_s)
        low, high = np.asarray(LOW, np.float32), np.asarray(HIGH, np.float32)
        unit = (action - low) / (high - low) * np.float32(2.0) - np.float32(1.0)
        self._position = np.clip(self._position + np.float32(SPEED) * unit, -1.0, 1.0).astype(np.float32)
        self._age += 1
        distance = np.linalg.norm(self._position - self._goal, axis=1).astype(np.float32)
        reached = distance < REACHED
        terminated = reached & self._options.terminate_on_success
        truncated = (self._age >= self._options.max_episode_steps) & ~terminated
        ended = terminated | truncated
        if broken:
            self._position[0] = np.nan
        last = self._obs()
        self._begin(ended)
        return StepResult(
            obs=self._obs(),
            reward=-distance,
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(self._num_envs, np.bool_),
            final_obs={key: rows[ended] for key, rows in last.items()},
            success=reached.astype(np.float32),
        )

    def restart(self, rows: BoolArray) -> Obs:
        """Abandon the episodes of `rows` [N] and start new ones."""
        self._begin(rows)
        return self._obs()

    def frame(self) -> Array:
        """uint8 [96, 96, 3]: the goal in green, the point in white."""
        image = np.full((_FRAME, _FRAME, 3), 24, np.uint8)
        for place, colour, radius in ((self._goal[0], (64, 200, 96), 5), (self._position[0], (240, 240, 240), 3)):
            column, row = ((place * [1, -1] + 1.0) * 0.5 * (_FRAME - 1)).astype(int)
            rows, columns = np.ogrid[:_FRAME, :_FRAME]
            image[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2] = colour
        return image

    def close(self) -> None:
        """End the child processes, if any were asked for."""
        for child in self._children:
            child.kill()
            child.wait()
        self._children = []

    def _begin(self, rows: BoolArray) -> None:
        for index in np.flatnonzero(rows):
            start = self._rngs[index].uniform(-1.0, 1.0, 4).astype(np.float32)
            self._position[index], self._goal[index] = start[:2], start[2:]
            self._age[index] = 0

    def _obs(self) -> Obs:
        return {
            "observation": self._position.copy(),
            "achieved_goal": self._position.copy(),
            "desired_goal": self._goal.copy(),
        }


class PointGoals:
    """What the environment gives for goals; implements core.GoalReward."""

    def __init__(self, options: PointOptions) -> None:
        self._ends = options.terminate_on_success

    def reward(self, achieved: FloatArray, desired: FloatArray) -> FloatArray:
        """Minus the distance: [B]."""
        distance: FloatArray = np.linalg.norm(achieved - desired, axis=1).astype(np.float32)
        return -distance

    def terminated(self, achieved: FloatArray, desired: FloatArray) -> BoolArray:
        """Whether the goal is reached and ends the episode: [B]."""
        ended: BoolArray = (-self.reward(achieved, desired) < REACHED) & self._ends
        return ended


class PointPlugin:
    """The entry point `point` of `clawq.environments`."""

    Options = PointOptions

    def make(self, options: PointOptions, num_envs: int) -> PointEnv:
        """N points."""
        return PointEnv(options, num_envs)

    def make_goals(self, options: PointOptions) -> PointGoals:
        """Rewards of other goals, for hindsight."""
        return PointGoals(options)

    def make_rendered(self, options: PointOptions) -> PointEnv:
        """One point that can be drawn."""
        return PointEnv(options, 1)


plugin = PointPlugin()

__all__ = ["PointEnv", "PointGoals", "PointOptions", "PointPlugin", "plugin", "point_spec"]
