"""A sum tree over the ring's slots, vectorised: draw slots in proportion to their numbers, and change numbers.

Levels of sums of 16 neighbours lie over the numbers, until one is short enough for a running total of all of it. A draw
looks its place up there, and goes down by the running totals of one group for each level: whole batches in a handful of
array operations for each of a few levels, where a binary tree would have twenty. Sums are always made anew from what is
below them, so that no error adds up.

It lies on the host, like the ring's links: rows are picked there, whatever the device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from clawq.types import Array, FloatArray

#: Neighbours in one sum, and the length from which on a level gets another one over it.
GROUP, LONG = 16, 8192
#: Rows [R, GROUP] times this are their running totals; several times faster than cumsum along short rows.
_TOTALS = {np.dtype(kind): np.triu(np.ones((GROUP, GROUP), kind)) for kind in (np.float32, np.float64)}


class SumTree:
    """Non-negative float32 numbers for the slots 0 .. size − 1, all 0 at first.

    Args:
        size: number of slots.
    """

    def __init__(self, size: int) -> None:
        #: The numbers [R, GROUP], and over them sums, each level as rows of GROUP.
        self._levels: list[Array] = [_rows(size, np.dtype(np.float32))]
        while self._levels[-1].size > LONG:
            self._levels.append(_rows(len(self._levels[-1]), np.dtype(np.float64)))
        #: 0 and the running total of the top level; made when it is asked for.
        self._running = np.zeros(self._levels[-1].size + 1)
        self._current = True

    def set(self, slots: Array, numbers: Any) -> None:
        """Change the numbers of slots int64 [R] to `numbers` [R] or one number; of a slot named twice one counts."""
        self._levels[0].reshape(-1)[slots] = numbers
        for below, sums in zip(self._levels, self._levels[1:], strict=False):
            slots = slots // GROUP
            sums.reshape(-1)[slots] = _sum(below.take(slots, axis=0))
        self._current = False

    def raise_to(self, exponent: float) -> None:
        """Raise every number to a positive power."""
        np.power(self._levels[0], np.float32(exponent), out=self._levels[0])
        for below, sums in zip(self._levels, self._levels[1:], strict=False):
            sums.reshape(-1)[: len(below)] = _sum(below)
        self._current = False

    def state_dict(self) -> list[torch.Tensor]:
        """The numbers and all sums (made again, they could differ in their last bits); copies."""
        return [torch.from_numpy(level.copy()) for level in self._levels]

    def load_state_dict(self, state: Sequence[torch.Tensor]) -> None:
        """Go on where `state_dict` was taken, of a tree of the same size."""
        for level, saved in zip(self._levels, state, strict=True):
            level[...] = saved.numpy()
        self._current = False

    def get(self, slots: Array) -> FloatArray:
        """Numbers of slots int64 [R]: float32 [R]."""
        return self._levels[0].take(slots)

    @property
    def total(self) -> float:
        """Sum of all numbers."""
        return float(self._totals()[-1])

    def find(self, marks: Array) -> Array:
        """The slots in whose stretch of [0, total) each mark (float64 [B]) falls: int64 [B].

        The stretch of a slot is as long as its number, so marks that are uniform give slots in proportion to their
        numbers. A slot whose number is 0 is never given (unless all are 0).
        """
        running = self._totals()
        # In ascending order neighbours are looked up one after another, which the caches repay many times over.
        order = np.argsort(marks)
        # Rounding may lift a mark to the end of its stretch, where nothing or somebody else would be found.
        ascending = np.minimum(marks.take(order), np.nextafter(running[-1], 0.0))
        place = running[1:].searchsorted(ascending, side="right")
        rest = ascending - running.take(place)
        for level in reversed(self._levels[:-1]):
            within = level.take(place, axis=0) @ _TOTALS[level.dtype]
            rest = np.minimum(rest.astype(level.dtype), np.nextafter(within[:, -1], level.dtype.type(0.0)))
            # How many of the group end at or before the mark; as bytes they are summed fastest.
            passed = np.einsum("ij->i", (within <= rest[:, None]).view(np.uint8))
            place = place * GROUP + passed
            if level is not self._levels[0]:
                begin = within[np.arange(len(passed)), passed] - level.take(place)
                rest = np.maximum(rest - begin, 0.0)
        found = np.empty(len(marks), np.int64)
        found[order] = place
        return found

    def check_valid(self) -> tuple[bool, str]:
        """Do sums and numbers agree? For tests and post-mortems."""
        if (self._levels[0] < 0).any():
            return False, "a number is negative"
        for below, sums in zip(self._levels, self._levels[1:], strict=False):
            expected = below.sum(1, dtype=np.float64)
            if not np.allclose(sums.reshape(-1)[: len(below)], expected, rtol=1e-6, atol=0.0):
                return False, "a group's sum is not that of its numbers"
        return True, ""

    def _totals(self) -> Array:
        if not self._current:
            np.cumsum(self._levels[-1], out=self._running[1:])
            self._current = True
        return self._running


def _rows(size: int, kind: "np.dtype[Any]") -> Array:
    """Zeros for `size` numbers, as rows of GROUP."""
    return np.zeros((-(-size // GROUP), GROUP), kind)


def _sum(rows: Array) -> Array:
    """Sums of rows [R, GROUP]; faster than `sum` along short rows."""
    sums: Array = rows @ np.ones(GROUP, rows.dtype)
    return sums
