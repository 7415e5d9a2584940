"""Axis convention, array aliases and the fragment: what every layer shares. numpy and stdlib only.

Axes, declared once: **T** = time within a fragment, **N** = envs of one actor, **B** = batch. Arrays are
`[T, N, ...]`; observations are `[T+1, N, ...]`: row t is what the policy saw before action t, row t+1 what came after.
In names `_t`, `_tm1` and `_tp1` give the time where it matters.

Observations are a flat dict of float32 (or uint8) arrays, in the order of the env spec, never reordered.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
#: Flat observation: key -> array.
Obs: TypeAlias = dict[str, Array]
#: Flat metrics: name -> value.
Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """One episode that ended within a fragment.

    Attributes:
        env: index of the env, 0..N-1.
        length: valid env steps of the whole episode.
        episode_return: undiscounted sum of raw rewards.
        success: 1.0 or 0.0 where the env reports it, else nan.
    """

    env: int
    length: int
    episode_return: float
    success: float


@dataclass(frozen=True, slots=True)
class Voided:
    """Rows of one env that turned out to be no experience, though they were sent already.

    All rows of `env` of this slot and epoch from fragment `seq`, time `t` on, up to the fragment that carries this
    notice, are void (the env went non-finite: its episode is condemned from its start).
    """

    env: int
    seq: int
    t: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an actor's fragments come from, beside what the rest of the header says; for people. "" = not known.

    Attributes:
        host: name of the machine.
        env: name of the env spec (its fingerprint is `FragmentMeta.env`).
        version: of clawq.
        commit: of the git checkout that clawq ran from.
    """

    host: str = ""
    env: str = ""
    version: str = ""
    commit: str = ""


#: Of whoever does not tell.
UNKNOWN = Provenance()


@dataclass(frozen=True, slots=True)
class FragmentMeta:
    """Who made a fragment, under what, and how much it holds.

    Attributes:
        run: tag of the run, 32 hex digits.
        worker: host and Celery worker of the actor, for people.
        slot: name of the slot; it is also the name of its stream.
        epoch: incarnation of the slot's actor; with `seq` it is the stream id.
        seq: 1, 2, 3 ... within an epoch.
        env: fingerprint of the env spec.
        seed: the seed of the actor's envs.
        weights_version: the one version under which all T steps were taken.
        steps: T.
        envs: N.
        produced: cumulative env steps (T·N, valid or not) packed into fragments by this actor, this one included.
        dropped: cumulative env steps dropped by this actor's outbox, by reason.
        episodes: the episodes that ended in this fragment.
        voided: rows sent earlier that are void.
        created_ms: wall clock of the host, milliseconds; for people only.
        life: the first epoch of the actor that made it, over which `produced` and `dropped` count; 0 = this epoch. An
            actor takes a new epoch when its stream went away, and what was lost with it must still show.
        made_by: where it comes from; empty in fragments of older versions.
    """

    run: str
    worker: str
    slot: str
    epoch: int
    seq: int
    env: str
    seed: int
    weights_version: int
    steps: int
    envs: int
    produced: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    episodes: tuple[EpisodeSummary, ...] = ()
    voided: tuple[Voided, ...] = ()
    created_ms: int = 0
    life: int = 0
    made_by: Provenance = UNKNOWN


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Consecutive steps of N parallel envs under one weights version; the unit on the wire.

    Attributes:
        meta: who, when, under what.
        obs: key -> [T+1, N, ...].
        action: float32 [T, N, A], in policy space [-1, 1].
        reward: float32 [T, N], raw.
        terminated: bool [T, N].
        truncated: bool [T, N].
        valid: bool [T, N]; False marks a row that is no transition.
        final_obs: key -> [K, ...]: the true last observations, one row for each boundary (terminated | truncated),
            in the row-major order of `np.nonzero(boundary)`: time first, then env.
        extras: per-step policy outputs that the algorithm asked for (log_prob, value): name -> [T, N, ...].

    After a boundary at t the row t+1 of `obs` is the first observation of the next episode, unless row t+1 is not
    valid (autoreset step): then it is the last observation of the old one.
    """

    meta: FragmentMeta
    obs: Obs
    action: FloatArray
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    valid: BoolArray
    final_obs: Obs
    extras: Obs = field(default_factory=dict)

    @property
    def boundary(self) -> BoolArray:
        """Where an episode ended (terminated | truncated), bool [T, N]."""
        return self.terminated | self.truncated
