"""n-step returns (Sutton & Barto 2018, §7.1) as index arithmetic over the ring.

For a step row t the return takes rewards r_t, γ·r_{t+1}, ... of at most n steps of the same episode:

    reward   = Σ_{i<k} γ^i · r_{t+i}
    discount = γ^k · (1 − terminated_{t+k−1})
    next_obs = the obs that came after step t+k−1

with k ≤ n the steps really taken: the walk ends at a boundary, before a row that is not valid, and at the newest row
of its env. A time limit (truncated) bootstraps from final_obs like any other last step; only `terminated` sets the
discount to zero. Final and tail rows are never valid, so one test, "is the successor valid?", ends the walk in all
these cases.
"""

from functools import lru_cache

import torch

from clawq.core import Batch
from clawq.replay.ring import ReplayRing


def gather(ring: ReplayRing, rows: torch.Tensor, n: int, gamma: float, reward_scale: float = 1.0) -> Batch:
    """The n-step transitions that begin at `rows`.

    Args:
        ring: the ring.
        rows: int64 [B], positions of sampleable rows, on any device.
        n: most steps of a return, ≥ 1.
        gamma: discount of one env step.
        reward_scale: factor on every reward.

    Returns:
        A batch on the ring's device; importance weights are 1. Its arrays are views of one packed gather, contiguous
        only along their last axes.
    """
    rows = rows.to(ring.device)
    slots, batch = rows % ring.capacity, len(rows)
    links = ring.links.select(slots)
    last, later, discounts = _walk(ring, slots, links[:, 0], n, gamma)
    # One gather for obs and next_obs; the two halves are views.
    both = torch.cat((slots, _onward(ring, last, links[:, 0] if n == 1 else None)))
    packed = ring.packed.select(both)
    now, after = packed[:batch], packed[batch:]
    return Batch(
        obs=ring.obs_of(now, slots),
        action=ring.packed.part(now, "action"),
        reward=(ring.packed.part(now, "reward") + later) * reward_scale,
        # discount = γ^k · (1 − terminated_{t+k−1})
        discount=discounts * (ring.packed.part(now, "bootstrap") if n == 1 else _lane(ring, "bootstrap", last)),
        next_obs=ring.obs_of(after, both[batch:]),
        importance_weight=torch.ones(batch, device=ring.device),
        row=rows,
        weights_version=links[:, 1].long(),
        extras=ring.extras_of(now, slots),
    )


def _walk(
    ring: ReplayRing, slots: torch.Tensor, hop: torch.Tensor, n: int, gamma: float
) -> tuple[torch.Tensor, torch.Tensor | float, torch.Tensor | float]:
    """Walk at most n − 1 steps on.

    Args:
        ring: the ring.
        slots: int64 [B], of the first steps.
        hop: int32 [B], their hops.
        n: most steps of a return.
        gamma: discount.

    Returns:
        Slots of the last steps (int64 [B]); the discounted rewards after the first (float32 [B]); γ^k (float32 [B]).
    """
    if n == 1:
        return slots, 0.0, gamma
    chain = [slots, _onward(ring, slots, hop)]
    while len(chain) < n:
        chain.append(_onward(ring, chain[-1]))
    # Behind the end of a return the chain goes anywhere; what it finds there is masked.
    steps = torch.stack(chain)
    going = ring.valid.select(steps[1:].view(-1)).view(n - 1, -1).cumprod(0)
    power = _powers(gamma, n, ring.device)
    rewards = _lane(ring, "reward", steps[1:].view(-1)).view(n - 1, -1)
    later = torch.where(going > 0, power[1:n, None] * rewards, 0.0).sum(0)
    more = going.sum(0)
    return steps.gather(0, more[None])[0], later, power[1:].index_select(0, more)


def _onward(ring: ReplayRing, slots: torch.Tensor, hop: torch.Tensor | None = None) -> torch.Tensor:
    """Slots (int64 [B]) of the rows that these lead to; `hop` if it is known already."""
    if hop is None:
        hop = ring.links.tensor[:, 0].index_select(0, slots)
    return (slots + hop) % ring.capacity


def _lane(ring: ReplayRing, name: str, slots: torch.Tensor) -> torch.Tensor:
    """One packed scalar of scattered slots: float32 [R]."""
    return ring.packed.part(ring.packed.tensor, name).index_select(0, slots)


@lru_cache(maxsize=8)
def _powers(gamma: float, n: int, device: torch.device) -> torch.Tensor:
    """γ^0 .. γ^n, float32 [n + 1], each rounded once."""
    return torch.tensor([gamma**i for i in range(n + 1)], dtype=torch.float32, device=device)
