"""A sum tree over the ring's slots, vectorised: draw slots in proportion to their numbers, and change numbers.

Numbers, sums of groups of neighbours, and the running total of these sums. A draw looks its group up in the running
total, and its slot in the running total of that group: whole batches in a handful of array operations, where a binary
tree would need one round of them for each of its twenty levels. Sums are always made anew from the numbers below, so
that no error adds up.

It lies on the host, like the ring's links: rows are picked there, whatever the device.
"""

from typing import Any

import numpy as np

from clawq.types import Array, FloatArray

#: Slots of one group. A draw of B slots from N costs about N / GROUP + B · GROUP.
GROUP = 16
#: Rows [R, GROUP] times this are their running totals; several times faster than cumsum along short rows.
_TOTALS = np.triu(np.ones((GROUP, GROUP)))
_TOTALS_32 = _TOTALS.astype(np.float32)
_ONES = np.ones(GROUP, np.float32)


class SumTree:
    """Non-negative float32 numbers for the slots 0 .. size − 1, all 0 at first.

    Args:
        size: number of slots.
    """

    def __init__(self, size: int) -> None:
        groups = -(-size // GROUP**2) * GROUP
        self._numbers = np.zeros(groups * GROUP, np.float32)
        self._grouped = self._numbers.reshape(groups, GROUP)
        self._sums = np.zeros(groups)
        #: 0 and the running total of the sums; made when it is asked for.
        self._running = np.zeros(groups + 1)
        self._before = np.zeros(groups // GROUP)
        self._current = True

    def set(self, slots: Array, numbers: Any) -> None:
        """Change the numbers of slots int64 [R] to `numbers` [R] or one number; of a slot named twice one counts."""
        self._numbers[slots] = numbers
        groups = slots // GROUP
        self._sums[groups] = self._grouped.take(groups, axis=0) @ _ONES
        self._current = False

    def raise_to(self, exponent: float) -> None:
        """Raise every number to a positive power."""
        np.power(self._numbers, np.float32(exponent), out=self._numbers)
        self._sums[:] = self._grouped @ _ONES
        self._current = False

    def get(self, slots: Array) -> FloatArray:
        """Numbers of slots int64 [R]: float32 [R]."""
        return self._numbers.take(slots)

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
        group = running[1:].searchsorted(ascending, side="right")
        within = self._grouped.take(group, axis=0) @ _TOTALS_32
        rest = (ascending - running.take(group)).astype(np.float32)
        rest = np.minimum(rest, np.nextafter(within[:, -1], np.float32(0.0)))
        # How many numbers of the group end at or before the mark; as bytes they are summed fastest.
        passed = np.einsum("ij->i", (within <= rest[:, None]).view(np.uint8))
        found = np.empty(len(marks), np.int64)
        found[order] = group * GROUP + passed
        return found

    def check_valid(self) -> tuple[bool, str]:
        """Do sums and numbers agree? For tests and post-mortems."""
        if (self._numbers < 0).any():
            return False, "a number is negative"
        if not np.allclose(self._sums, self._grouped.sum(1, dtype=np.float64), rtol=1e-6, atol=0.0):
            return False, "a group's sum is not that of its numbers"
        return True, ""

    def _totals(self) -> Array:
        if not self._current:
            # The running totals of rows of sums, each moved up by what came before it: the same additions as one after
            # another, so the whole never goes down.
            rows = self._sums.reshape(-1, GROUP) @ _TOTALS
            np.cumsum(rows[:-1, -1], out=self._before[1:])
            np.add(rows, self._before[:, None], out=self._running[1:].reshape(rows.shape))
            self._current = True
        return self._running
