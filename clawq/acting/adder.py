"""The adder: env steps -> fragments.

    adder.begin(obs)                             once, after the reset
    while acting:
        adder.open(version, now)                 a fragment, under one weights version
        while not adder.full(now):
            broken = adder.add(action, extras, result)
            if broken is not None: adder.restarted(env.restart(broken))
        fragment = adder.close()

A fragment ends by time or by size, whichever comes first, or by a number of steps where one is given. Observations are
stored once: T+1 rows, and the true last observation where an episode ended.

An env that goes non-finite is no experience from its episode's start: its rows in this fragment become invalid, rows
that went out earlier are named in the fragment's `voided`, and the env must be restarted. No non-finite number ever
leaves here.

Fragments carry this actor's own running numbers (`seq` 1, 2, 3 ... and cumulative `produced` over its whole life); the
sender turns them into those of the epoch under which it sends.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np

from clawq.core import StepResult
from clawq.specs import EnvSpec, check_shape
from clawq.types import (
    UNKNOWN,
    Array,
    BoolArray,
    EpisodeSummary,
    FloatArray,
    Fragment,
    FragmentMeta,
    Obs,
    Provenance,
    Voided,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who makes the fragments: the part of FragmentMeta that stays the same."""

    run: str
    worker: str
    slot: str
    seed: int
    made_by: Provenance = UNKNOWN


@dataclass(frozen=True, slots=True)
class Limits:
    """When a fragment ends, whichever comes first.

    Attributes:
        seconds: after so long.
        size_bytes: before it is larger than that.
        rows: before it could take more rows of a replay ring; None = any number.
    """

    seconds: float
    size_bytes: int
    rows: int | None = None


class Adder:
    """Builds fragments of one actor.

    Args:
        spec: the env spec.
        num_envs: N.
        origin: who makes them.
        limits: when a fragment ends.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, origin: Origin, limits: Limits) -> None:
        self._spec, self._n, self._origin, self._limits = spec, num_envs, origin, limits
        self._fingerprint = spec.fingerprint
        self._capacity = max(1, limits.size_bytes // step_bytes(spec, num_envs))
        if limits.rows is not None:
            # Each step may end an episode, whose last obs takes a row; behind all steps lie those of the tail.
            self._capacity = max(1, min(self._capacity, (limits.rows - num_envs) // (2 * num_envs)))
        self._index = 0
        self._produced = 0
        self._episodes = _OpenEpisodes(num_envs)
        self._rows: _Rows | None = None

    @property
    def steps(self) -> int:
        """T of the open fragment, 0 if none is open."""
        return self._rows.t if self._rows else 0

    @property
    def produced(self) -> int:
        """Env steps packed into fragments so far."""
        return self._produced

    @property
    def unfinished(self) -> int:
        """Episodes that are under way: envs that have taken a step since their last reset."""
        return int(np.count_nonzero(self._episodes.length))

    def begin(self, obs: Obs) -> None:
        """All envs were reset and show `obs` [N, ...]."""
        self._last_obs = obs
        self._rows = None
        self._episodes = _OpenEpisodes(self._n)
        self._episodes.start(np.ones(self._n, np.bool_), self._index + 1, 0)

    def open(self, version: int, now_s: float, most_steps: int | None = None) -> None:
        """Begin a fragment under that weights version, of at most T = `most_steps`."""
        self._index += 1
        capacity = self._capacity if most_steps is None else min(self._capacity, most_steps)
        self._rows = _Rows(self._spec, self._n, capacity, self._last_obs, version)
        self._deadline_s = now_s + self._limits.seconds

    def full(self, now_s: float) -> bool:
        """True when the open fragment must end here."""
        rows = self._open_rows()
        return rows.t >= rows.capacity or (rows.t > 0 and now_s >= self._deadline_s)

    def ends_with_next(self, now_s: float, step_s: float) -> bool:
        """True when a step that takes `step_s` is expected to be the last one of the open fragment."""
        rows = self._open_rows()
        return rows.t + 1 >= rows.capacity or now_s + step_s >= self._deadline_s

    def add(self, action: FloatArray, extras: Obs, result: StepResult) -> BoolArray | None:
        """Add one step of all envs.

        Args:
            action: [N, A] in policy space, as executed.
            extras: the policy's outputs to store, name -> [N, ...].
            result: what the step gave.

        Returns:
            None, or which envs [N] show something that is not finite: restart them and call `restarted`.

        Raises:
            SpecMismatch: an observation has another shape than the spec says.
        """
        rows = self._open_rows()
        t = rows.add(action, extras, result)
        outcome_ok, obs_ok = _finite_outcome(result), finite_rows(result.obs, self._n)
        if outcome_ok.all() and obs_ok.all():
            self._follow(rows, t, result)
            return None
        ended = result.terminated | result.truncated
        # What was wrong is the old episode, unless the step ended it well and only the next one starts badly.
        condemned = ~outcome_ok | (~obs_ok & ~ended)
        self._condemn(rows, t, condemned)
        self._follow(rows, t, result)
        self._episodes.start(condemned | ~obs_ok, self._index, t + 1)
        # An env that ended in nonsense was reset by its own step and may be fine again.
        broken = ~obs_ok
        return broken if broken.any() else None

    def restarted(self, obs: Obs) -> None:
        """The broken envs were restarted, and all envs show `obs` [N, ...] now."""
        self._open_rows().replace_last(obs)

    def close(self) -> Fragment:
        """End the open fragment, which must hold at least one step."""
        rows, self._rows = self._open_rows(), None
        self._produced += rows.t * self._n
        self._last_obs = {key: column[rows.t] for key, column in rows.obs.items()}
        self._episodes.carry_over(self._index, rows.t)
        meta = FragmentMeta(
            run=self._origin.run,
            worker=self._origin.worker,
            slot=self._origin.slot,
            epoch=0,
            seq=self._index,
            env=self._fingerprint,
            seed=self._origin.seed,
            weights_version=rows.version,
            steps=rows.t,
            envs=self._n,
            produced=self._produced,
            episodes=tuple(rows.episodes),
            voided=tuple(rows.voided),
            created_ms=int(time.time() * 1000),
            made_by=self._origin.made_by,
        )
        return rows.fragment(meta)

    def _open_rows(self) -> "_Rows":
        if self._rows is None:
            raise RuntimeError("no fragment is open: call open() first")
        return self._rows

    def _follow(self, rows: "_Rows", t: int, result: StepResult) -> None:
        """Keep the episodes' books for step t, whose rows are final."""
        rows.episodes += self._episodes.step(rows.reward[t], rows.valid[t], rows.boundary(t), result.success)
        self._episodes.start(rows.boundary(t), self._index, t + 1)

    def _condemn(self, rows: "_Rows", t: int, envs: BoolArray) -> None:
        """Make the episodes of those envs no experience, from their start to step t."""
        rows.drop_boundaries(t, envs)
        for env in np.flatnonzero(envs):
            index, start = int(self._episodes.index[env]), int(self._episodes.t[env])
            if index != self._index:
                rows.voided.append(Voided(int(env), index, start))
                start = 0
            rows.valid[start : t + 1, env] = False
            rows.reward[t, env] = 0.0
            log.warning(
                "env %d of %s went non-finite after %d steps; its episode is dropped and it is restarted",
                env,
                self._origin.slot,
                self._episodes.length[env],
            )


class _OpenEpisodes:
    """Where each env's running episode began, and its sums so far; all arrays [N]."""

    def __init__(self, num_envs: int) -> None:
        self.index = np.zeros(num_envs, np.int64)
        self.t = np.zeros(num_envs, np.int64)
        self.length = np.zeros(num_envs, np.int64)
        self.episode_return = np.zeros(num_envs, np.float64)

    def start(self, envs: BoolArray, index: int, t: int) -> None:
        """Those envs begin an episode at step t of fragment `index`."""
        self.index[envs], self.t[envs] = index, t
        self.length[envs], self.episode_return[envs] = 0, 0.0

    def carry_over(self, index: int, steps: int) -> None:
        """Fragment `index` ended with T = steps: what would begin there begins in the next one."""
        beyond = (self.index == index) & (self.t >= steps)
        self.index[beyond], self.t[beyond] = index + 1, 0

    def step(self, reward: FloatArray, valid: BoolArray, ended: BoolArray, success: FloatArray) -> list[EpisodeSummary]:
        """Add one step; returns the episodes that it ended."""
        self.length += valid
        self.episode_return += np.where(valid, reward, 0.0)
        return [
            EpisodeSummary(int(i), int(self.length[i]), float(self.episode_return[i]), float(success[i]))
            for i in np.flatnonzero(ended)
        ]


class _Rows:
    """The columns of an open fragment, filled row by row. Fresh memory each time: the fragment takes it along."""

    def __init__(self, spec: EnvSpec, n: int, capacity: int, obs: Obs, version: int) -> None:
        self.t = 0
        self.capacity, self.version = capacity, version
        self.obs = {k: np.empty((capacity + 1, n, *a.shape), a.dtype) for k, a in spec.obs.items()}
        self.replace_last(obs)
        self.action = np.empty((capacity, n, spec.action.size), np.float32)
        self.reward = np.empty((capacity, n), np.float32)
        self.terminated = np.empty((capacity, n), np.bool_)
        self.truncated = np.empty((capacity, n), np.bool_)
        self.valid = np.empty((capacity, n), np.bool_)
        self.episodes: list[EpisodeSummary] = []
        self.voided: list[Voided] = []
        self._finals: dict[str, list[Array]] = {k: [np.empty((0, *a.shape), a.dtype)] for k, a in spec.obs.items()}
        self._extras: dict[str, list[Array]] = {}

    def add(self, action: FloatArray, extras: Obs, result: StepResult) -> int:
        """Write the next row; returns its t."""
        t, self.t = self.t, self.t + 1
        self.action[t], self.reward[t], self.valid[t] = action, result.reward, result.valid
        self.terminated[t], self.truncated[t] = result.terminated, result.truncated
        self.replace_last(result.obs)
        for key, rows in result.final_obs.items():
            if len(rows):
                check_shape(f"final_obs.{key}", rows, (len(rows), *self.obs[key].shape[2:]))
                self._finals[key].append(rows)
        for name, value in extras.items():
            self._extras.setdefault(name, []).append(value)
        return t

    def replace_last(self, obs: Obs) -> None:
        for key, column in self.obs.items():
            check_shape(f"obs.{key}", obs[key], column.shape[1:])
            column[self.t] = obs[key]

    def boundary(self, t: int) -> BoolArray:
        ended: BoolArray = self.terminated[t] | self.truncated[t]
        return ended

    def drop_boundaries(self, t: int, envs: BoolArray) -> None:
        """Step t ended nothing for those envs: take the ends and their final observations out again."""
        ended = self.boundary(t)
        if (ended & envs).any():
            kept = ~envs[ended]
            for rows in self._finals.values():
                rows[-1] = rows[-1][kept]
            self.terminated[t, envs] = self.truncated[t, envs] = False

    def fragment(self, meta: FragmentMeta) -> Fragment:
        """The fragment of the rows so far; arrays are contiguous views of our memory."""
        t = self.t
        return Fragment(
            meta=meta,
            obs={key: column[: t + 1] for key, column in self.obs.items()},
            action=self.action[:t],
            reward=self.reward[:t],
            terminated=self.terminated[:t],
            truncated=self.truncated[:t],
            valid=self.valid[:t],
            final_obs={key: np.concatenate(rows) for key, rows in self._finals.items()},
            extras={name: np.stack(rows) for name, rows in self._extras.items()},
        )


def step_bytes(spec: EnvSpec, num_envs: int) -> int:
    """Bytes that one step of N envs takes in a fragment, ends not counted."""
    return num_envs * (sum(array.nbytes for array in spec.obs.values()) + 4 * spec.action.size + 4 + 3)


def finite_rows(obs: Obs, rows: int) -> BoolArray:
    """[rows]: True where every number of that row of every key is finite."""
    ok = np.ones(rows, np.bool_)
    for column in obs.values():
        if column.dtype != np.uint8:
            ok &= np.isfinite(column.reshape(rows, -1)).all(axis=1)
    return ok


def _finite_outcome(result: StepResult) -> BoolArray:
    """[N]: True where the reward, and the last observation of what ended, are finite."""
    ok: BoolArray = np.isfinite(result.reward)
    ended = np.flatnonzero(result.terminated | result.truncated)
    if len(ended):
        ok[ended] &= finite_rows(result.final_obs, len(ended))
    return ok


__all__ = ["Adder", "Limits", "Origin", "finite_rows", "step_bytes"]
