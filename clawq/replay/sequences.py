"""Sequences for recurrent policies (Kapturowski et al. 2019, R2D2): L steps of one env, one after another.

A sequence begins at a row and goes on along the ring's links: from fragment to fragment over joined seams, wherever in
the ring they lie. It ends where an n-step return would: at a boundary, before a row that is not valid, at a seam that
is not joined (another actor or incarnation, a gap) and at the newest row of its env. What is missing of L steps is
padding: `mask` is False there, the obs after the last step is repeated, and everything else is 0.

The first `burn_in` steps only warm up the recurrent state: they are real, but not in `mask`.

Every row that can be sampled is equally likely to be a beginning, so a step far from its episode's beginning is in more
sequences than an early one, and there is no grid whose seams a policy could learn.
"""

from dataclasses import dataclass

import numpy as np
import torch

from clawq.core import SequenceBatch
from clawq.replay.ring import HOP, VERSION, ReplayRing
from clawq.types import Array


@dataclass(frozen=True, slots=True)
class Sequences:
    """What sequences are made of.

    Attributes:
        length: L, steps of a sequence, ≥ 1.
        burn_in: of these, steps at the beginning that are not learned from, < L.
        gamma: discount of one env step.
        reward_scale: factor on every reward.
    """

    length: int
    burn_in: int
    gamma: float
    reward_scale: float = 1.0


class SequenceGatherer:
    """Gathers batches of sequences.

    Args:
        ring: the ring.
        sequences: see Sequences.
    """

    def __init__(self, ring: ReplayRing, sequences: Sequences) -> None:
        self._ring, self._sequences = ring, sequences

    def gather(self, rows: Array, importance_weight: torch.Tensor | None = None) -> SequenceBatch:
        """The sequences that begin at `rows`, in memory of their own.

        Args:
            rows: int64 [B], positions of sampleable rows.
            importance_weight: float32 [B] on the ring's device; None = all are 1.
        """
        ring, wanted = self._ring, self._sequences
        length, count, device = wanted.length, len(rows), ring.device
        walk, steps, versions = self._walk(rows % ring.capacity)
        real = np.arange(length)[:, None] < steps
        shown = np.take_along_axis(walk, np.minimum(np.arange(length + 1)[:, None], steps), axis=0)
        there = torch.from_numpy(shown.reshape(-1)).to(device)
        parts = ring.packed.parts(ring.packed.select(there))
        parts |= {name: column.select(there) for name, column in ring.separate.items()}
        by_time = {name: one.reshape(length + 1, count, *one.shape[1:]) for name, one in parts.items()}
        happened = torch.from_numpy(real).to(device)
        learned_from = real & (np.arange(length) >= wanted.burn_in)[:, None]

        def of_steps(name: str) -> torch.Tensor:
            """What was stored with each step; 0 where there was none (there lies whatever was there before)."""
            stored = by_time[name][:-1]
            return torch.where(happened.view(length, count, *[1] * (stored.ndim - 2)), stored, 0)

        obs = {key: by_time[f"obs.{key}"] for key in ring.spec.obs}
        ones = torch.ones(count, device=device)
        return SequenceBatch(
            obs={key: one[:-1] for key, one in obs.items()},
            action=of_steps("action"),
            reward=of_steps("reward") * wanted.reward_scale,
            discount=of_steps("bootstrap") * wanted.gamma,
            next_obs={key: one[1:] for key, one in obs.items()},
            importance_weight=ones if importance_weight is None else importance_weight,
            row=torch.from_numpy(np.array(rows)).to(device),
            weights_version=torch.from_numpy(np.where(real, versions, 0)).to(device),
            extras={name: of_steps(f"extras.{name}") for name in ring.extras},
            made_by=versions[learned_from] if learned_from.any() else versions[real],
            mask=torch.from_numpy(learned_from).to(device),
            steps=torch.from_numpy(steps).to(device),
        )

    def _walk(self, slots: Array) -> tuple[Array, Array, Array]:
        """Walk on from slots int64 [B].

        Returns:
            Slots after 0 .. L steps, int64 [L+1, B] (behind the end of a sequence they are anything); how many steps
            each sequence has, int64 [B], ≥ 1; the weights versions of the steps, int64 [L, B].
        """
        ring, length = self._ring, self._sequences.length
        walk = np.empty((length + 1, len(slots)), np.int64)
        versions = np.empty((length, len(slots)), np.int64)
        walk[0] = slots
        for step in range(length):
            links = ring.links_of(walk[step])
            versions[step] = links[:, VERSION]
            walk[step + 1] = (walk[step] + links[:, HOP]) % ring.capacity
        going = np.logical_and.accumulate(ring.valid_slots.take(walk[:-1]), axis=0)
        steps: Array = going.sum(0)
        return walk, steps, versions
