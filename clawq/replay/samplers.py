"""Samplers pick rows; they do not know what the rows hold.

`UniformSampler` draws positions among all live rows and keeps those that can be sampled (rejection, vectorised): with
replacement, each sampleable row with the same probability, in O(batch) whatever the size of the ring. It reads the
ring's host mirror of `valid`, so a GPU is never waited for, and the same generator state gives the same rows on every
device.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from clawq.replay.ring import ReplayRing
from clawq.types import Array

#: Below this share of sampleable rows the sampler lists them instead of drawing until it hits one.
LEAST_ACCEPTED = 1 / 32


class UniformSampler:
    """Uniform over the rows that can be sampled, with replacement.

    Args:
        ring: what is sampled from.
        generator: a CPU generator; the sampler's only source of randomness.
    """

    def __init__(self, ring: ReplayRing, generator: torch.Generator) -> None:
        self._ring, self._generator = ring, generator
        self._draws = torch.empty(0, dtype=torch.int64)
        self._drawn: Array = self._draws.numpy()

    def rows(self, batch_size: int) -> torch.Tensor:
        """`positions` as a tensor on the CPU."""
        return torch.from_numpy(self.positions(batch_size))

    def positions(self, batch_size: int) -> Array:
        """Positions of `batch_size` rows, int64 [B].

        Raises ValueError while nothing can be sampled: ask the rate limiter and `ring.size` first.
        """
        ring = self._ring
        if ring.size == 0:
            raise ValueError("nothing can be sampled: the replay ring holds no valid env step")
        accepted = ring.size / (ring.head - ring.oldest)
        if accepted < LEAST_ACCEPTED:
            rows = ring.sampleable_rows()
            return rows.take(self._draw(0, len(rows), batch_size))
        found: list[Array] = []
        missing = batch_size
        while missing > 0:
            # A few more than needed on average: a second round is rare.
            drawn = self._draw(ring.oldest, ring.head, int(missing / accepted * 1.1) + 8)
            found.append(drawn.compress(ring.valid_slots.take(drawn % ring.capacity))[:missing])
            missing -= len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _draw(self, low: int, high: int, count: int) -> Array:
        """int64 [count], uniform in [low, high); overwritten by the next call."""
        if len(self._drawn) != count:
            self._draws = torch.empty(count, dtype=torch.int64)
            self._drawn = self._draws.numpy()
        self._draws.random_(low, high, generator=self._generator)
        return self._drawn

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._generator.set_state(state["generator"])
