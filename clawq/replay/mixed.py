"""Batches out of two lanes: what the actors of the run make, and demonstrations (Ball et al. 2023, RLPD, §4.1).

Each batch is a fixed share of either: its first rows are the run's own, the others are demonstrations, drawn uniformly
with replacement. Priorities, importance weights other than 1 and hindsight are for the first lane only; n-step returns
are the same in both.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch

from clawq.core import Batch
from clawq.replay.batches import Batches


class Draws(Protocol):
    """Gives one batch for each update: `Batches`, or two of them."""

    def next(self, progress: float = 0.0) -> Batch: ...
    def rewind(self) -> None: ...
    def learned(self, batch: Batch, td_error: Any) -> None: ...


class Mixed:
    """Two lanes; see the module's text.

    Args:
        own: of the run's experience.
        demonstrations: of the demonstrations.
    """

    def __init__(self, own: Batches, demonstrations: Batches) -> None:
        self._own, self._demonstrations = own, demonstrations
        self._last: Batch | None = None

    def next(self, progress: float = 0.0) -> Batch:
        """The next batch, in memory of its own but for what `learned` needs; `progress` as in Batches."""
        self._last = self._own.next(progress)
        return joined(self._last, self._demonstrations.next(progress))

    def rewind(self) -> None:
        """Forget the batches ahead, as if they had never been drawn."""
        self._own.rewind()
        self._demonstrations.rewind()

    def learned(self, batch: Batch, td_error: Any) -> None:
        """Tell the run's sampler of the TD errors float [B] of the newest batch, without those of demonstrations."""
        assert self._last is not None
        self._own.learned(self._last, td_error[: len(self._last.row)])


def joined(one: Batch, other: Batch) -> Batch:
    """The rows of two batches, one after the other; copies."""
    return Batch(**{field.name: _join(getattr(one, field.name), getattr(other, field.name)) for field in fields(Batch)})


def _join(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {key: torch.cat((one[key], other[key])) for key in one}
    if isinstance(one, np.ndarray):
        return np.concatenate((one, other))
    return None if one is None else torch.cat((one, other))


__all__ = ["Draws", "Mixed", "joined"]
