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
        A batch on the ring's device; importance weights are 1.
    """
    rows = rows.to(ring.device)
    slots = rows % ring.capacity
    last, reward, discount = _walk(ring, rows, slots, n, gamma)
    if reward_scale != 1.0:
        reward = reward * reward_scale
    column = ring.columns
    batch = len(rows)
    after = (last + column["hop"].tensor.index_select(0, last % ring.capacity)) % ring.capacity
    # One gather for obs and next_obs of a key; the two halves are contiguous views.
    both = torch.cat((slots, after))
    seen = {key: one.tensor.index_select(0, both) for key, one in ring.obs.items()}
    return Batch(
        obs={key: pair[:batch] for key, pair in seen.items()},
        action=column["action"].tensor.index_select(0, slots),
        reward=reward,
        discount=discount,
        next_obs={key: pair[batch:] for key, pair in seen.items()},
        importance_weight=torch.ones(batch, device=ring.device),
        row=rows,
        weights_version=column["weights_version"].tensor.index_select(0, slots).long(),
        extras={name: one.tensor.index_select(0, slots) for name, one in ring.extras.items()},
    )


def _walk(
    ring: ReplayRing, rows: torch.Tensor, slots: torch.Tensor, n: int, gamma: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last row of each return (int64 [B]), the summed reward and the discount (float32 [B])."""
    column = ring.columns
    reward = column["reward"].tensor.index_select(0, slots)
    if n == 1:
        ended = column["terminated"].tensor.index_select(0, slots)
        return rows, reward, torch.where(ended, 0.0, gamma)
    power = _powers(gamma, n, ring.device)
    valid, hop = column["valid"].tensor, column["hop"].tensor
    last, going = rows, torch.ones_like(rows, dtype=torch.bool)
    taken = torch.ones_like(rows)
    for i in range(1, n):
        # The step after `last`; an env that has stopped stays where it is.
        successor = last + hop.index_select(0, last % ring.capacity)
        at = successor % ring.capacity
        going = going & valid.index_select(0, at)
        last = torch.where(going, successor, last)
        # reward += γ^i · r_{t+i}
        reward = reward + torch.where(going, power[i] * column["reward"].tensor.index_select(0, at), 0.0)
        taken = taken + going
    ended = column["terminated"].tensor.index_select(0, last % ring.capacity)
    # discount = γ^k · (1 − terminated)
    return last, reward, torch.where(ended, 0.0, power.index_select(0, taken))


@lru_cache(maxsize=8)
def _powers(gamma: float, n: int, device: torch.device) -> torch.Tensor:
    """γ^0 .. γ^n, float32 [n + 1], each rounded once."""
    return torch.tensor([gamma**i for i in range(n + 1)], dtype=torch.float32, device=device)
