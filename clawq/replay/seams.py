"""Where fragments lie in the ring, and which envs go on from one fragment to the next.

A seam joins an env only if three things agree: the fragments are neighbours (same slot and epoch, the next seq), the
actor packed nothing between them (its cumulative counter of produced steps), and the first obs of the new fragment is
the obs after the last action of the old one, number for number. So a gap, a restarted env or an actor that counts
wrongly costs a shorter n-step return, never a false transition.
"""

from dataclasses import dataclass

import numpy as np

from clawq.types import Array, BoolArray, Fragment, Obs


@dataclass(slots=True, eq=False)
class Placed:
    """One fragment in the ring.

    Attributes:
        slot: name of the slot.
        epoch: with `slot` and `seq`, which fragment it is.
        seq: see `epoch`.
        produced: the actor's counter of env steps packed, this fragment included.
        start: position of its first step row.
        steps: T.
        envs: N.
        tail: position of its first tail row.
        running: bool [N]: the last step of this env is no boundary.
        last_obs: key -> [N, ...]: obs[T], until the next fragment of the slot has come.
        worker: who made it.
        created_ms: when, by the clock of its host.
    """

    slot: str
    epoch: int
    seq: int
    produced: int
    start: int
    steps: int
    envs: int
    tail: int
    running: BoolArray
    last_obs: Obs
    worker: str
    created_ms: int

    @classmethod
    def of(cls, fragment: Fragment, start: int, tail: int) -> "Placed":
        """Describe a fragment whose first row is at position `start`, its tail at `tail`."""
        meta = fragment.meta
        return cls(
            meta.slot,
            meta.epoch,
            meta.seq,
            meta.produced,
            start,
            meta.steps,
            meta.envs,
            tail,
            running=~fragment.boundary[-1],
            last_obs={key: array[-1].copy() for key, array in fragment.obs.items()},
            worker=meta.worker,
            created_ms=meta.created_ms,
        )

    @property
    def last_row(self) -> int:
        """Position of its last step row."""
        return self.start + self.steps * self.envs - 1

    def rows_of(self, env: int, first_t: int) -> Array:
        """Positions of the step rows of one env from time `first_t` on, int64."""
        return self.start + np.arange(first_t, self.steps, dtype=np.int64) * self.envs + env

    def forget_seam(self) -> None:
        """Let go of what only the next fragment of the slot needed."""
        self.last_obs = {}


def joined_envs(previous: Placed | None, fragment: Fragment) -> BoolArray:
    """Which envs of `fragment` go on where `previous` ended: bool [N] (none if it is no neighbour)."""
    meta = fragment.meta
    joined = np.zeros(meta.envs, np.bool_)
    if (
        previous is None
        or (meta.epoch, meta.seq, meta.envs) != (previous.epoch, previous.seq + 1, previous.envs)
        or meta.produced - meta.steps * meta.envs != previous.produced
    ):
        return joined
    joined[:] = True
    for key, last in previous.last_obs.items():
        joined &= (fragment.obs[key][0] == last).reshape(meta.envs, -1).all(axis=1)
    return joined
