"""Prioritised replay (Schaul et al. 2016, arXiv:1511.05952): rows that surprised the critic are sampled more often.

    p_i = |δ_i| + ε          P(i) = p_i^α / Σ_k p_k^α          w_i = (N · P(i))^(−β) / max_j w_j

δ is the temporal-difference error of a row when it was last learned from. A new row has the largest priority ever
seen, so that every row is soon learned from once. The weights w are normalised over the batch: over the whole ring, one
row with a tiny priority would make all others' weights tiny too. α and β may change along the run.

Priorities that come for a row which was overwritten or voided meanwhile are ignored, and counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clawq.errors import ConfigError
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import Draw
from clawq.replay.sum_tree import SumTree
from clawq.types import Array, BoolArray, Metrics

#: α is applied anew to all priorities when it has moved by so much.
ALPHA_STEP = 0.01


@dataclass(frozen=True, slots=True)
class Schedule:
    """A number that moves along a line while the budget is spent."""

    start: float
    end: float

    def at(self, progress: float) -> float:
        """Its value at `progress` 0..1."""
        return self.start + (self.end - self.start) * min(max(progress, 0.0), 1.0)


#: As in the paper, for its proportional variant.
ALPHA, BETA = Schedule(0.6, 0.6), Schedule(0.4, 1.0)


class PrioritizedSampler:
    """Samples in proportion to priority; implements samplers.Sampler.

    Args:
        ring: what is sampled from; tells us what it writes and voids.
        generator: a CPU generator; the sampler's only source of randomness.
        alpha: how much priorities count, in (0, 1].
        beta: how much of the bias is corrected, 0..1.
        epsilon: priority of a row without error, > 0.

    Attributes:
        late: priorities that came too late.
    """

    steady = False
    wants_td_error = True

    def __init__(
        self,
        ring: ReplayRing,
        generator: torch.Generator,
        alpha: Schedule = ALPHA,
        beta: Schedule = BETA,
        epsilon: float = 1e-6,
    ) -> None:
        if min(alpha.start, alpha.end) <= 0.0:
            raise ConfigError(
                "replay", ["prioritized.alpha: must be above 0; without priorities choose sampler: uniform"]
            )
        self._ring, self._generator = ring, generator
        self._alphas, self._betas, self._epsilon = alpha, beta, epsilon
        self._alpha = alpha.start
        self._tree = SumTree(ring.capacity)
        self._largest = 1.0
        self.late = 0
        ring.watch(self)

    # --- sampling -----------------------------------------------------------------------------------------------

    def ready(self, batch_size: int) -> bool:
        """Rows may come several times: one is enough."""
        return self._ring.size > 0

    def draw(self, batch_size: int, progress: float = 0.0) -> Draw:
        """Positions and importance weights of `batch_size` rows.

        Args:
            batch_size: B.
            progress: spent share of the budget, 0..1.

        Raises:
            ValueError: nothing can be sampled.
        """
        ring, tree = self._ring, self._tree
        if ring.size == 0:
            raise ValueError("nothing can be sampled: the replay ring holds no valid env step")
        self._apply_alpha(self._alphas.at(progress))
        total = tree.total
        share: Array = torch.rand(batch_size, dtype=torch.float64, generator=self._generator).numpy()
        slots = tree.find(share * total)
        # (N · P)^−β; the factor N^−β is the same for all and gone after the division by the largest.
        weights = (tree.get(slots) / total) ** -self._betas.at(progress)
        weights /= weights.max()
        rows = ring.oldest + (slots - ring.oldest) % ring.capacity
        return Draw(rows, torch.from_numpy(weights.astype(np.float32)).to(ring.device))

    def learned(self, rows: Array, td_error: torch.Tensor) -> None:
        """Rows int64 [B] were learned from, with TD errors float [B] (their sign does not matter)."""
        ring = self._ring
        slots = rows % ring.capacity
        priority = np.abs(td_error.detach().cpu().numpy().astype(np.float64)) + self._epsilon
        there = (rows >= ring.oldest) & ring.valid_slots.take(slots)
        if not there.all():
            self.late += int(np.count_nonzero(~there))
            slots, priority = slots[there], priority[there]
        if len(slots):
            self._largest = max(self._largest, float(priority.max()))
            self._tree.set(slots, priority**self._alpha)

    def metrics(self) -> Metrics:
        """How many priorities came too late."""
        return {"late_priorities": self.late}

    def retune(self, alpha: Schedule, beta: Schedule, epsilon: float) -> None:
        """Take other schedules from the next draw on; priorities that are there are raised to the new α then."""
        self._alphas, self._betas, self._epsilon = alpha, beta, epsilon

    # --- what the ring tells ------------------------------------------------------------------------------------

    def written(self, slots: Array, valid: BoolArray) -> None:
        """Slots int64 [R] hold new rows; those that are valid (bool [R]) can be sampled."""
        self._tree.set(slots, np.where(valid, self._largest**self._alpha, 0.0))

    def voided(self, slots: Array) -> None:
        """The rows in slots int64 [R] cannot be sampled any more."""
        self._tree.set(slots, 0.0)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Generator, priorities, and where their rows lie; copies."""
        return {
            "generator": self._generator.get_state(),
            "largest": self._largest,
            "late": self.late,
            "alpha": self._alpha,
            "tree": self._tree.state_dict(),
            "live": [self._ring.oldest, self._ring.head, self._ring.capacity],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the ring must have its rows again. Priorities go with their rows."""
        self._generator.set_state(state["generator"])
        # A run that was sampled uniformly until now has none of the rest: then every row is new.
        self._largest, self.late = float(state.get("largest", 1.0)), int(state.get("late", 0))
        if "tree" not in state:
            self._restart()
            return
        self._alpha = float(state["alpha"])
        oldest, head, capacity = state["live"]
        if capacity == self._ring.capacity:
            self._tree.load_state_dict(state["tree"])
        else:
            rows = np.arange(max(oldest, self._ring.oldest), head)
            saved: Array = state["tree"][0].numpy().reshape(-1)
            self._tree.set(rows % self._ring.capacity, saved.take(rows % capacity))
        # What could not be brought back into the ring has no priority.
        gone = np.flatnonzero((self._tree.get(np.arange(self._ring.capacity)) > 0) & ~self._ring.valid_slots)
        if len(gone):
            self._tree.set(gone, 0.0)

    def _restart(self) -> None:
        """Take all rows for new."""
        slots = np.arange(self._ring.capacity)
        self._tree.set(slots, np.where(self._ring.valid_slots, self._largest**self._alpha, 0.0))

    def check_valid(self) -> tuple[bool, str]:
        """Do the priorities fit the ring? For tests and post-mortems."""
        if not np.array_equal(self._tree.get(np.arange(self._ring.capacity)) > 0, self._ring.valid_slots):
            return False, "a row has a priority and cannot be sampled, or the other way round"
        return self._tree.check_valid()

    def _apply_alpha(self, alpha: float) -> None:
        if abs(alpha - self._alpha) >= ALPHA_STEP:
            self._tree.raise_to(alpha / self._alpha)
            self._alpha = alpha
