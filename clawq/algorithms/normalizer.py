"""Running mean and variance of observations (DESIGN §6).

The learner updates the statistics once for each valid env step that it inserts, never on sampled batches, in float64
with Chan's pairwise update (Chan, Golub, LeVeque 1979, "Updating formulae and a pairwise algorithm for computing
sample variances"). They travel to the actors inside the weights, and are frozen there.

The count is the number of valid env steps seen, whatever the number of updates, publishes or restarts. A valid step
that is not finite is left out and counted in `refused`: one such step would spoil the mean for good.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clawq.errors import CheckpointInvalid

#: Added to the variance, so that a column that never changed divides by 1e-4.
EPSILON = 1e-8


def mean_and_scale(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """float64 statistics [S] -> float32 mean and 1/std [S]: the one definition that learner and actors share."""
    return mean.float(), (var + EPSILON).rsqrt().float()


class RunningNorm:
    """Mean and variance per column, and the normalisation by them.

    Attributes:
        mean: float64 [S].
        var: float64 [S], population variance; 1 until there are rows.
        count: valid env steps seen.
        refused: valid env steps left out because they were not finite.
        clip: bound of normalised values, in standard deviations.
    """

    def __init__(self, size: int, clip: float, device: torch.device) -> None:
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.var = torch.ones(size, dtype=torch.float64, device=device)
        self.count = 0
        self.refused = 0
        self.clip = clip
        self._shift, self._scale = mean_and_scale(self.mean, self.var)

    def update(self, views: Tensor, valid: Tensor) -> None:
        """Take in R env steps, each in V views: float32 [R, V, S].

        Steps whose `valid` (bool [R]) is False are no experience and count for nothing.
        """
        steps = views[valid].double()
        if not math.isfinite(float(steps.sum())):  # one sum finds out; looking at each step is for the rare case
            finite = steps.isfinite().flatten(1).all(1)
            self.refused += int((~finite).sum())
            steps = steps[finite]
        added = steps.shape[0]
        if not added:
            return
        kept = steps.flatten(0, 1)
        # Two passes: as exact as torch.var_mean in float64, and several times faster down the columns.
        mean = kept.mean(0)
        var = kept.sub_(mean).square_().mean(0)
        total = self.count + added
        if self.count:
            share, delta = added / total, mean - self.mean
            var = self.var * (1.0 - share) + var * share + delta.square() * (share * (1.0 - share))
            mean = self.mean + delta * share
        self.mean, self.var, self.count = mean, var, total
        self._shift, self._scale = mean_and_scale(mean, var)

    def normalize(self, rows: Tensor, out: Tensor) -> Tensor:
        """(rows − mean) / std, clipped, written to `out`; both float32 [B, S] (they may be the same tensor)."""
        return torch.sub(rows, self._shift, out=out).mul_(self._scale).clamp_(-self.clip, self.clip)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the statistics, on the CPU."""
        return {
            "mean": self.mean.to("cpu", copy=True),
            "var": self.var.to("cpu", copy=True),
            "count": self.count,
            "refused": self.refused,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointInvalid if the state is of another width."""
        if state["mean"].shape != self.mean.shape or state["var"].shape != self.var.shape:
            raise CheckpointInvalid(
                f"normaliser: the checkpoint has {state['mean'].shape[0]} columns, this run has {self.mean.shape[0]}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; raises CheckpointInvalid if the width differs."""
        self.check_state(state)
        self.mean = state["mean"].to(self.mean.device, torch.float64, copy=True)
        self.var = state["var"].to(self.var.device, torch.float64, copy=True)
        self.count, self.refused = int(state["count"]), int(state["refused"])
        self._shift, self._scale = mean_and_scale(self.mean, self.var)
