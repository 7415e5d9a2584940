"""The batches of a learner, one for each update, drawn a few at a time.

After an update nothing of the sampling code is left in the caches: a batch that is drawn alone takes the time of four
that are drawn in a row. So batches are drawn ahead of their updates, but only as long as that makes no difference:
once the ring changes, those ahead are forgotten and the sampler goes back to where it would have been. The rows and
numbers of every batch are what they would be if each was drawn just before its update. Where an update changes what is
drawn next (priorities), batches are drawn one by one.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from clawq.core import Batch
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import Sampler
from clawq.types import Array

#: Batches drawn in a row at the most, and the memory that they may take: of large ones copying counts, not the calls.
MOST_IN_A_ROW, MOST_BYTES = 4, 1_000_000


class Gathers(Protocol):
    """Makes a batch of rows."""

    def gather(self, rows: Array, importance_weight: torch.Tensor | None = None) -> Batch:
        """Of rows int64 [B] and importance weights float32 [B] (None = all are 1, in every call)."""
        ...


class Batches:
    """Draws from a ring.

    Args:
        ring: what is drawn from.
        sampler: picks the rows.
        batch_size: B.
        gatherer: makes what gathers a batch into memory of its own; called for each batch that may be drawn ahead.
        most: batches drawn in a row; None = as many as pay.
    """

    def __init__(
        self,
        ring: ReplayRing,
        sampler: Sampler,
        batch_size: int,
        gatherer: Callable[[], Gathers],
        most: int | None = None,
    ) -> None:
        self._ring, self._sampler, self._batch_size = ring, sampler, batch_size
        if not sampler.steady:
            most = 1
        elif most is None:
            most = max(1, min(MOST_IN_A_ROW, MOST_BYTES // (2 * batch_size * ring.bytes_per_row)))
        self._gatherers = [gatherer() for _ in range(most)]
        #: Batches that are drawn, each with the sampler's state before it.
        self._ahead: deque[tuple[Mapping[str, Any], Batch]] = deque()
        self._in_a_row = 1
        self._changes = ring.changes

    def next(self, progress: float = 0.0) -> Batch:
        """The next batch; to be used before the next call, after which its memory is used again.

        Args:
            progress: spent share of the budget, 0..1.

        Raises ValueError while nothing can be sampled: ask the rate limiter and `ring.size` first.
        """
        if self._ring.changes != self._changes:
            self.rewind()
            # Where it changes before every update, nothing is drawn in vain.
            self._changes, self._in_a_row = self._ring.changes, 1
        if self._ahead:
            return self._ahead.popleft()[1]
        batch = self._draw(self._gatherers[0], progress)
        for gatherer in self._gatherers[1 : self._in_a_row]:
            self._ahead.append((self._sampler.state_dict(), self._draw(gatherer, progress)))
        self._in_a_row = min(2 * self._in_a_row, len(self._gatherers))
        return batch

    def rewind(self) -> None:
        """Forget the batches ahead, as if they had never been drawn; before the sampler's state is asked for."""
        if self._ahead:
            self._sampler.load_state_dict(self._ahead[0][0])
            self._ahead.clear()

    def learned(self, batch: Batch, td_error: Any) -> None:
        """Tell the sampler that an update was made from that batch, with TD errors float [B]."""
        self._sampler.learned(batch.row.cpu().numpy(), td_error)

    def _draw(self, gatherer: Gathers, progress: float) -> Batch:
        draw = self._sampler.draw(self._batch_size, progress)
        return gatherer.gather(draw.rows, draw.importance_weight)
