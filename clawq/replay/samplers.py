"""Samplers pick rows; they do not know what the rows hold.

`Sampler` is what a learner expects of one; `clawq.replay.prioritized` has another. `UniformSampler` draws positions
among all live rows and keeps those that can be sampled (rejection, vectorised): with replacement, each sampleable row
with the same probability, in O(batch) whatever the size of the ring. It reads `valid`, which is on the host, so that a
GPU is never waited for, and the same generator state gives the same rows on every device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from clawq.replay.ring import ReplayRing
from clawq.types import Array, Metrics

#: Below this share of sampleable rows the sampler lists them instead of drawing until it hits one.
LEAST_ACCEPTED = 1 / 32


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """B rows.

    Attributes:
        rows: int64 [B], positions, on the host.
        importance_weight: float32 [B] on the ring's device; None = all are 1.
    """

    rows: Array
    importance_weight: torch.Tensor | None = None


class Sampler(Protocol):
    """Picks the rows of each batch.

    Attributes:
        steady: what it draws depends on the ring and its generator alone, not on what was drawn or learned since.
        wants_td_error: `learned` must be told after every update.
    """

    @property
    def steady(self) -> bool: ...
    @property
    def wants_td_error(self) -> bool: ...
    def ready(self, batch_size: int) -> bool:
        """Can a batch of that size be drawn now?"""
        ...

    def draw(self, batch_size: int, progress: float) -> Draw:
        """Rows of one batch; `progress` is the spent share of the budget, 0..1.

        Raises ValueError while nothing can be sampled.
        """
        ...

    def learned(self, rows: Array, td_error: Any) -> None:
        """Rows int64 [B] were learned from with TD errors [B]."""
        ...

    def metrics(self) -> Metrics:
        """Numbers for people, by the names of clawq.metrics.CATALOGUE."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def check_valid(self) -> tuple[bool, str]:
        """Does what it knows fit the ring? (True, "") or (False, what is wrong)."""
        ...


class UniformSampler:
    """Uniform over the rows that can be sampled, with replacement.

    Args:
        ring: what is sampled from.
        generator: a CPU generator; the sampler's only source of randomness.
    """

    steady = True
    wants_td_error = False

    def __init__(self, ring: ReplayRing, generator: torch.Generator) -> None:
        self._ring, self._generator = ring, generator
        self._draws = torch.empty(0, dtype=torch.int64)
        self._drawn: Array = self._draws.numpy()

    def ready(self, batch_size: int) -> bool:
        """Rows may come several times: one is enough."""
        return self._ring.size > 0

    def draw(self, batch_size: int, progress: float = 0.0) -> Draw:
        """See Sampler; `progress` changes nothing here."""
        return Draw(self.positions(batch_size))

    def learned(self, rows: Array, td_error: Any) -> None:
        """Every row stays as likely as it was."""

    def metrics(self) -> Metrics:
        """Nothing."""
        return {}

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

    def check_valid(self) -> tuple[bool, str]:
        """Is the ring's count right, from which the draws needed are worked out? For tests and post-mortems."""
        valid = int(np.count_nonzero(self._ring.valid_slots))
        if valid != self._ring.size:
            return False, f"the ring says that {self._ring.size} rows can be sampled, and {valid} can"
        return True, ""
