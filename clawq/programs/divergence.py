"""When learning has gone wrong, by its numbers. Pure.

Two things count:

    not finite    a loss, gradient norm or other number of an update is nan or infinite (such updates are skipped)
    diverged      the median of a metric over the last WINDOW updates is more than `factor` times its highest earlier
                  level: the largest median over LEVEL updates in a row, of those before the window. Or its size is
                  above `bound`, if one is given.

Medians, so that one wild batch is no divergence; the highest level, so that a loss that fell and comes back is none.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

#: Updates over which the metric is judged, and over which its level is.
WINDOW, LEVEL = 20, 100
#: How many times its earlier level a metric may have.
FACTOR = 100.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as divergence.

    Attributes:
        metric: name, as in `train/<name>`; None = the first that is called a loss.
        factor: see the module.
        bound: largest size of the metric; None = any.
    """

    metric: str | None = None
    factor: float = FACTOR
    bound: float | None = None


class Watch:
    """Follows the numbers of a learner's updates."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._older: list[float] = []
        self._level = 0.0

    def observe(self, metrics: Mapping[str, float], skipped: bool) -> str | None:
        """What is wrong with this update, in words; None if nothing is.

        Args:
            metrics: of the update (of the last one that was made, if this one was skipped).
            skipped: it was not finite.

        Raises KeyError if the wanted metric is none of the algorithm's.
        """
        if skipped:
            return "an update was not finite"
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        if odd:
            return f"{odd[0]} is {metrics[odd[0]]}"
        name = self._limits.metric or next((name for name in metrics if "loss" in name), None)
        return None if name is None else self._judge(name, abs(metrics[name]))

    def _judge(self, name: str, size: float) -> str | None:
        if self._limits.bound is not None and size > self._limits.bound:
            return f"{name} is {size:.4g}, above {self._limits.bound:g}"
        if len(self._recent) == WINDOW:
            self._older.append(self._recent[0])
        self._recent.append(size)
        if len(self._older) == LEVEL:
            self._level = max(self._level, statistics.median(self._older))
            self._older.clear()
        if self._level <= 0.0 or len(self._recent) < WINDOW:
            return None
        now = statistics.median(self._recent)
        if now <= self._limits.factor * self._level:
            return None
        return (
            f"the median of {name} over {WINDOW} updates is {now:.4g}; its highest level before was {self._level:.4g}"
        )
