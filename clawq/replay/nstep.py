"""n-step returns (Sutton & Barto 2018, §7.1) as index arithmetic over the ring.

For a step row t the return takes rewards r_t, γ·r_{t+1}, ... of at most n steps of the same episode:

    reward   = Σ_{i<k} γ^i · r_{t+i}
    discount = γ^k · (1 − terminated_{t+k−1})
    next_obs = the obs that came after step t+k−1

with k ≤ n the steps really taken: the walk ends at a boundary, before a row that is not valid, and at the newest row
of its env. A time limit (truncated) bootstraps from final_obs like any other last step; only `terminated` sets the
discount to zero. Final and tail rows are never valid, so one test, "is the successor valid?", ends the walk in all
these cases.

The walk looks its way up on the host, where the ring keeps its links; the device gathers and computes.

After an update the caches hold nothing of this code, so each torch call costs 10 to 30 µs, even one that only makes a
view. A `Gatherer` therefore makes the memory of a batch, and all views of it, once.
"""

from functools import lru_cache

import numpy as np
import torch

from clawq.core import Batch
from clawq.replay.columns import Selection
from clawq.replay.hindsight import Hindsight
from clawq.replay.returns import Returns
from clawq.replay.ring import HOP, VERSION, ReplayRing, pick_from
from clawq.types import Array

#: Lines of a batch's index: positions, weights versions, slots, slots of what to bootstrap from.
POSITION, MADE_BY, SLOT, AFTER = range(4)


class Gatherer:
    """Gathers batches of n-step transitions, one after another into the same memory.

    Args:
        ring: the ring.
        batch_size: B.
        returns: n, γ, and the factor on rewards.
        hindsight: gives some of the rows other goals.
    """

    def __init__(
        self,
        ring: ReplayRing,
        batch_size: int,
        returns: Returns,
        hindsight: Hindsight | None = None,
    ) -> None:
        self._ring, self._returns, self._n = ring, returns, returns.n
        self._hindsight = hindsight
        host, device = torch.empty(4, batch_size, dtype=torch.int64), ring.device
        self._host, self._index = host, host.numpy()
        self._there = host.to(device)  # the same memory where the device is the CPU
        self._slots, self._slots_there = self._index[SLOT:].reshape(-1), self._there[SLOT:].view(-1)
        # Obs and next_obs are gathered at once: one half of the memory for the rows, one for where they lead to.
        packed = Selection(ring.packed, 2 * batch_size)
        separate = {name: Selection(column, 2 * batch_size) for name, column in ring.separate.items()}
        self._selections = [packed, *separate.values()]
        parts = ring.packed.parts(packed.tensor) | {name: one.tensor for name, one in separate.items()}
        self._reward = parts["reward"][:batch_size]
        # What a one-step return needs is gathered side by side, and multiplied in one call.
        self._pair = packed.tensor[:batch_size, ring.packed.span("reward", "bootstrap")]
        self._factors = torch.tensor([returns.reward_scale, returns.gamma], device=device)
        self._scaled = torch.empty(batch_size, 2, device=device)
        self._batch = Batch(
            obs={key: parts[f"obs.{key}"][:batch_size] for key in ring.spec.obs},
            action=parts["action"][:batch_size],
            reward=self._scaled[:, 0],
            discount=self._scaled[:, 1],
            next_obs={key: parts[f"obs.{key}"][batch_size:] for key in ring.spec.obs},
            importance_weight=torch.ones(batch_size, device=device),
            row=self._there[POSITION],
            weights_version=self._there[MADE_BY],
            made_by=self._index[MADE_BY],
            extras={name: parts[f"extras.{name}"][:batch_size] for name in ring.extras},
        )

    def gather(self, rows: Array, importance_weight: torch.Tensor | None = None) -> Batch:
        """The transitions that begin at `rows`.

        Args:
            rows: int64 [B], positions of sampleable rows.
            importance_weight: float32 [B] on the ring's device; None = all are 1, in every call.

        Returns:
            A batch on the ring's device, to be used before the next call, which overwrites it. Most arrays are views,
            contiguous only along their last axes.
        """
        ring, index = self._ring, self._index
        if importance_weight is not None:
            self._batch.importance_weight.copy_(importance_weight)
        index[POSITION] = rows
        slots = np.remainder(rows, ring.capacity, out=index[SLOT])
        links = ring.links_of(slots)
        index[MADE_BY] = links[:, VERSION]
        walk = [slots, (slots + links[:, HOP]) % ring.capacity]
        more = None if self._n == 1 else self._walk_on(walk)
        index[AFTER] = walk[1] if more is None else pick_from(walk, more + 1)
        if self._there is not self._host:
            self._there.copy_(self._host)
        for selection in self._selections:
            selection.fill(self._slots, self._slots_there)
        if more is None:
            torch.mul(self._pair, self._factors, out=self._scaled)
        else:
            self._sum_up(walk, more)
        if self._hindsight is not None:
            self._hindsight.relabel(self._batch, index[POSITION])
        return self._batch

    def _walk_on(self, walk: list[Array]) -> Array:
        """Extend a walk (slots int64 [B] of the first rows, and of those after them) to n steps.

        Behind the end of a return it goes anywhere; what lies there must not be used.

        Returns:
            How many steps each return takes after its first, int64 [B].
        """
        ring = self._ring
        while len(walk) <= self._n:
            walk.append((walk[-1] + ring.links_of(walk[-1])[:, HOP]) % ring.capacity)
        going = ring.valid_slots.take(np.stack(walk[1 : self._n]))
        more: Array = np.logical_and.accumulate(going).sum(0)
        return more

    def _sum_up(self, walk: list[Array], more: Array) -> None:
        """Write reward and discount of returns that take `more` (int64 [B]) steps after the first."""
        n, taken = self._n, self._send(more)
        power = _powers(self._returns.gamma, n, self._ring.device)
        rewards = self._scalars("reward", np.concatenate(walk[1:n])).view(n - 1, -1)
        going = torch.arange(n - 1, device=taken.device)[:, None] < taken
        later = torch.where(going, power[1:n, None] * rewards, 0.0).sum(0)
        torch.mul(self._reward + later, self._returns.reward_scale, out=self._batch.reward)
        # discount = γ^k · (1 − terminated_{t+k−1})
        bootstrap = self._scalars("bootstrap", pick_from(walk, more))
        torch.mul(power[1:].index_select(0, taken), bootstrap, out=self._batch.discount)

    def _scalars(self, name: str, slots: Array) -> torch.Tensor:
        """One packed scalar of scattered slots: float32 [R]."""
        packed = self._ring.packed
        return packed.part(packed.tensor, name).index_select(0, self._send(slots))

    def _send(self, array: Array) -> torch.Tensor:
        """The array on the ring's device."""
        return torch.from_numpy(array).to(self._ring.device)


def gather(ring: ReplayRing, rows: torch.Tensor, returns: Returns) -> Batch:
    """One batch, in memory of its own, of rows int64 [B] on any device; see Gatherer."""
    return Gatherer(ring, len(rows), returns).gather(rows.cpu().numpy())


@lru_cache(maxsize=8)
def _powers(gamma: float, n: int, device: torch.device) -> torch.Tensor:
    """γ^0 .. γ^n, float32 [n + 1], each rounded once."""
    return torch.tensor([gamma**i for i in range(n + 1)], dtype=torch.float32, device=device)
