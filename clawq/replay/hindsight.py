"""Hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495): learn from goals that were reached.

Of every k + 1 rows of a batch, k are told another goal: one that was achieved in the same episode. Rewards and
terminations are those that the environment itself gives for that goal (`core.GoalReward`); n-step returns are added up
anew, and end where the new goal ends the episode. Nothing is stored twice: goals are looked up in the ring, along the
same links as returns (nstep.py).

    future    achieved after a step of the episode from this one on     (k = 4 in the paper)
    final     achieved after the episode's last step
    episode   achieved after any step of the episode

An episode that is not over counts as far as it is known, and no further back or on than the ring holds it.
"""

from typing import Literal

import numpy as np
import torch

from clawq.core import Batch, GoalReward
from clawq.replay.returns import Returns
from clawq.replay.ring import BACK, HOP, ReplayRing, pick_from
from clawq.types import Array

Strategy = Literal["future", "final", "episode"]
#: Steps that are walked at most in an environment without a time limit.
LONGEST = 1000


class Hindsight:
    """Relabels batches in place.

    Args:
        ring: where the rows are from; its spec has goal keys.
        goals: rewards and terminations of the environment.
        strategy: which achieved goals are taken.
        k: relabelled rows for each row that stays as it was, ≥ 1.
        returns: n, γ, and the factor on rewards.
        generator: a CPU generator; the sampler's, so that both go back together.
    """

    def __init__(
        self,
        ring: ReplayRing,
        goals: GoalReward,
        strategy: Strategy,
        k: int,
        returns: Returns,
        generator: torch.Generator,
    ) -> None:
        self._ring, self._goals, self._strategy = ring, goals, strategy
        self._achieved_key, self._desired_key = ring.spec.goal_keys
        self._share = k / (k + 1)
        self._returns = returns
        self._generator = generator
        self._reach = ring.spec.max_episode_steps or LONGEST

    def relabel(self, batch: Batch, rows: Array) -> None:
        """Give the first k/(k+1) of a batch other goals.

        Args:
            batch: what was gathered for `rows`; goals, rewards, discounts and next_obs are overwritten.
            rows: int64 [B], positions.
        """
        rows = rows[: round(len(rows) * self._share)]
        ahead, known = self._ahead(rows % self._ring.capacity)
        goal = self._achieved(self._choose(rows, ahead, known))
        count, most = len(rows), min(self._returns.n, len(ahead) - 1)
        after = np.stack(ahead[1 : most + 1])
        achieved = self._achieved(after.reshape(-1))
        wanted = np.broadcast_to(goal, (most, *goal.shape)).reshape(achieved.shape)
        reward = self._goals.reward(achieved, wanted).reshape(most, count)
        ends = self._goals.terminated(achieved, wanted).reshape(most, count)

        taken = np.arange(most)[:, None] < known
        taken[1:] &= ~np.logical_or.accumulate(ends, axis=0)[:-1]
        steps, columns = taken.sum(0), np.arange(count)
        power = self._returns.gamma ** np.arange(most + 1)
        total = (np.where(taken, reward, 0.0) * power[:most, None]).sum(0) * self._returns.reward_scale
        batch.reward[:count] = self._send(total)
        # discount = γ^k · (1 − terminated_{t+k−1})
        batch.discount[:count] = self._send(power[steps] * ~ends[steps - 1, columns])
        self._move_next(batch, after, steps, np.minimum(known, most))
        for obs in (batch.obs, batch.next_obs):
            obs[self._desired_key][:count] = torch.from_numpy(goal).to(self._ring.device)

    def _choose(self, rows: Array, ahead: list[Array], known: Array) -> Array:
        """Slots (int64 [S]) of the rows whose achieved goals are taken."""
        if self._strategy == "final":
            return pick_from(ahead, known)
        if self._strategy == "future":
            return pick_from(ahead, 1 + self._draw(known))
        behind, past = self._behind(rows)
        # After step t − j came row t − j + 1, which is j − 1 rows behind.
        pick = self._draw(known + past) - past
        onward = pick_from(ahead, np.maximum(pick + 1, 0))
        back = pick_from(behind, np.maximum(-pick - 1, 0))
        return np.where(pick >= 0, onward, back)

    def _draw(self, counts: Array) -> Array:
        """Uniform in 0 .. counts − 1, int64 [S]."""
        share: Array = torch.rand(len(counts), dtype=torch.float64, generator=self._generator).numpy()
        drawn: Array = np.minimum((share * counts).astype(np.int64), counts - 1)
        return drawn

    def _ahead(self, slots: Array) -> tuple[list[Array], Array]:
        """Walk on to the episodes' ends.

        Returns:
            Slots of the rows after 0, 1, 2 ... steps (each int64 [S]; what lies behind an episode's end is nothing),
            and how many steps are known of each, this one included: int64 [S], ≥ 1.
        """
        ring = self._ring
        walk, known = [slots], np.ones(len(slots), np.int64)
        going = np.ones(len(slots), np.bool_)
        while True:
            walk.append((walk[-1] + ring.links_of(walk[-1])[:, HOP]) % ring.capacity)
            going &= ring.valid_slots.take(walk[-1])
            if len(walk) > self._reach or not going.any():
                return walk, known
            known += going

    def _behind(self, rows: Array) -> tuple[list[Array], Array]:
        """Walk back to the episodes' beginnings, as `_ahead`: slots after 0, 1, 2 ... steps back, and how many."""
        ring = self._ring
        walk, past = [rows], np.zeros(len(rows), np.int64)
        going = np.ones(len(rows), np.bool_)
        while len(walk) <= self._reach:
            back = ring.links_of(walk[-1] % ring.capacity)[:, BACK]
            before = walk[-1] - back
            going &= (back > 0) & (before >= ring.oldest) & ring.valid_slots.take(before % ring.capacity)
            if not going.any():
                break
            past += going
            walk.append(np.where(going, before, walk[-1]))
        return [row % ring.capacity for row in walk], past

    def _achieved(self, slots: Array) -> Array:
        """Goals achieved in rows: float32 [R, ...]."""
        there = torch.from_numpy(slots).to(self._ring.device)
        achieved: Array = self._ring.obs_in(there, self._achieved_key).cpu().numpy()
        return achieved

    def _move_next(self, batch: Batch, after: Array, steps: Array, before: Array) -> None:
        """Where the new goal ends a return early, bootstrap from there."""
        moved = np.flatnonzero(steps != before)
        if len(moved):
            there = self._send_index(after[steps[moved] - 1, moved])
            for key, column in batch.next_obs.items():
                column[self._send_index(moved)] = self._ring.obs_in(there, key)

    def _send(self, numbers: Array) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.float32)).to(self._ring.device)

    def _send_index(self, slots: Array) -> torch.Tensor:
        return torch.from_numpy(slots).to(self._ring.device)
