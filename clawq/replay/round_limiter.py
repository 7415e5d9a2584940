"""The rate limiter of rounds: after each round exactly the updates that its env steps call for, and none before.

    samples = (inserts − min_size_to_sample) · samples_per_insert, rounded down to whole batches

What a round leaves over (less than one batch) is carried to the next. Inserting is never refused here: the rounds
decide when fragments are committed.
"""

import math

from clawq.replay.rate_limiter import RateLimiter


class RoundLimiter(RateLimiter):
    """A RateLimiter whose lower bound is its centre.

    Args:
        samples_per_insert: transitions sampled for each env step inserted, > 0.
        min_size_to_sample: env steps in the ring before the first batch.
        batch_size: transitions of one batch.
        from_first: the env steps that fill the ring call for samples too, since each is to be learned from (on-policy).

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self, samples_per_insert: float, min_size_to_sample: int, batch_size: int, from_first: bool = False
    ) -> None:
        super().__init__(samples_per_insert, min_size_to_sample, None, batch_size, 1)
        self._early = min_size_to_sample if from_first else 0

    @property
    def bounds(self) -> tuple[float, float]:
        """Least error allowed; there is no largest one."""
        return sum(super().bounds) / 2 - self._early * self._ratio / self._unit, math.inf

    def can_insert(self, steps: int) -> bool:
        """Always."""
        return True

    def can_sample(self, transitions: int) -> bool:
        """May `transitions` be sampled now?"""
        return not self.filling and self._drift + self._early * self._ratio >= transitions * self._unit


__all__ = ["RoundLimiter"]
