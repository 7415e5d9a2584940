"""Scripted ends of an actor, for tests: an env whose rows say where they come from, and a stream that fails on order.

`CountingEnv` shows (env, episode, step) in every observation, so that a test can tell which row is which;
`ScriptedSink` keeps what it is sent and raises what it is told to; `FixedWeights` has one version.
"""

import threading
from collections.abc import Sequence

import numpy as np

from clawq.core import Control, StepResult, Weights
from clawq.errors import ClawqError
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.types import BoolArray, FloatArray, Obs

#: What CountingEnv shows and takes; the bounds are lopsided, so that wrong scaling shows.
SPEC = EnvSpec(
    name="test:count",
    obs={"policy": ArraySpec((3,))},
    action=ActionSpec((-0.2, -1.0), (1.4, 1.0)),
    policy_keys=("policy",),
    critic_keys=("policy",),
)


class CountingEnv:
    """Shows (env, episode, step), rewards 100·episode + step.

    Args:
        num_envs: N.
        lengths: episode k of env i is truncated after `lengths[(i + k) % len(lengths)]` steps.

    Attributes:
        break_at: (env, episode, step) -> "obs" or "reward": what is not finite there.
        actions: every action that was executed.
        restarts: every env that was restarted.
    """

    def __init__(self, num_envs: int, lengths: Sequence[int] = (3, 5, 4)) -> None:
        self.num_envs = num_envs
        self.spec = SPEC
        self.lengths = lengths
        self.episode = np.zeros(num_envs, np.int64)
        self.t = np.zeros(num_envs, np.int64)
        self.break_at: dict[tuple[int, int, int], str] = {}
        self.actions: list[FloatArray] = []
        self.restarts: list[int] = []

    def obs(self) -> Obs:
        """What all envs show now."""
        return {"policy": np.stack([np.arange(self.num_envs), self.episode, self.t], axis=1).astype(np.float32)}

    def reset(self, seeds: Sequence[int]) -> Obs:
        """Start at episode 0, whatever the seeds."""
        assert len(seeds) == self.num_envs
        self.episode[:] = 0
        self.t[:] = 0
        return self.obs()

    def step(self, action: FloatArray) -> StepResult:
        """Count one further."""
        self.actions.append(action.copy())
        self.t += 1
        reward = (self.episode * 100 + self.t).astype(np.float32)
        limit = np.array([self.lengths[(i + k) % len(self.lengths)] for i, k in enumerate(self.episode.tolist())])
        truncated = self.t >= limit
        shown = self.obs()["policy"]
        for i in range(self.num_envs):
            what = self.break_at.get((i, int(self.episode[i]), int(self.t[i])))
            if what == "obs":
                shown[i] = np.nan
            if what == "reward":
                reward[i] = np.inf
        final_obs = {"policy": shown[truncated]}
        self.episode[truncated] += 1
        self.t[truncated] = 0
        shown = np.where(truncated[:, None], self.obs()["policy"], shown)
        n = self.num_envs
        success = np.where(truncated, 1.0, np.nan).astype(np.float32)
        return StepResult(
            {"policy": shown}, reward, np.zeros(n, np.bool_), truncated, np.ones(n, np.bool_), final_obs, success
        )

    def restart(self, rows: BoolArray) -> Obs:
        """Go to the next episode in those envs."""
        self.restarts += [int(i) for i in np.flatnonzero(rows)]
        self.episode[rows] += 1
        self.t[rows] = 0
        return self.obs()

    def close(self) -> None:
        """Nothing to close."""


class ScriptedSink:
    """A stream in memory that fails on order: the next sends raise `faults`, the next polls `poll_faults`, one each."""

    def __init__(self, epoch: int = 1, log: list[tuple[int, int, bytes]] | None = None) -> None:
        self.epoch = epoch
        self.log = log if log is not None else []
        self.control: Control | None = Control(head=1, stop=False, window_bytes=1_000_000, config_epoch=0)
        self.faults: list[ClawqError] = []
        self.poll_faults: list[ClawqError] = []
        self.unread = 0
        self.closed = 0
        #: Whether it was given back with everything sent.
        self.all_sent = False
        self.arrived = threading.Condition()

    def send(self, seq: int, payload: bytes | bytearray | memoryview) -> Control | None:
        """Keep it, or raise the next fault."""
        if self.faults:
            raise self.faults.pop(0)
        with self.arrived:
            self.log.append((self.epoch, seq, bytes(payload)))
            self.arrived.notify_all()
        return self.control

    def poll(self) -> Control | None:
        """The control record that was set, or the next fault."""
        if self.poll_faults:
            raise self.poll_faults.pop(0)
        return self.control

    def unread_bytes(self) -> int:
        """What was set."""
        return self.unread

    def close(self, all_sent: bool = False) -> None:
        """Count."""
        self.closed += 1
        self.all_sent = self.all_sent or all_sent

    def wait_for(self, count: int, timeout_s: float = 5.0) -> bool:
        """Wait until so many entries are there."""
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.log) >= count, timeout_s)


class FixedWeights:
    """A weights source that has one version."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def fetch_newer(self, than: int) -> Weights | None:
        """The version, if it is newer."""
        return self.weights if self.weights.version > than else None

    def fetch(self, version: int) -> Weights:
        """The version, whichever was asked for."""
        return self.weights
