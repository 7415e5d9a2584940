"""Whether a series that was sampled over a long run is flat: pure functions, for `ops/bench/soak.py`.

The first quarter is warm-up and is not looked at. Two robust figures judge the rest: the median of the last quarter
against that of the second one, and Theil and Sen's slope over all three, for the time between these two quarters. What
either of them tells counts. Both shrug off outliers and what goes up and down within a quarter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from clawq.watchdog.slope import theil_sen

#: What a flat series may change by.
TOLERANCE = 0.05
#: Fewer samples than this in a quarter say nothing.
LEAST = 3


@dataclass(frozen=True, slots=True)
class Series:
    """What was sampled.

    Attributes:
        name: of the series.
        unit: of the values.
        grain: a change up to this is none, whatever its share: one page of memory, one descriptor.
        bound: it may grow, but not beyond this; None = it must be flat.
        bounded_by: what bounds it, in words.
        falls: for what should be large (a throughput): falling is the fault, and growing none.
        told: it is shown, and decides nothing.
    """

    name: str
    unit: str = ""
    grain: float = 0.0
    bound: float | None = None
    bounded_by: str = ""
    falls: bool = False
    told: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a series.

    Attributes:
        series: which.
        early: median of the second quarter.
        late: median of the last quarter.
        most: largest value after the warm-up.
        change: late ÷ early − 1.
        trend: the slope's share of `early`, over the time between the middles of these quarters.
        slope_per_h: the slope.
        word: `flat`, `grows`, `falls`, `below its bound`, `above its bound`, or `too few samples`.
        fault: whether it should not be so.
    """

    series: Series
    early: float
    late: float
    most: float
    change: float
    trend: float
    slope_per_h: float
    word: str
    fault: bool

    @property
    def line(self) -> str:
        """For people."""
        about = f"; bounded by {self.series.bounded_by}" if self.series.bound is not None else ""
        mark = "NOT FLAT" if self.fault else "told only" if self.series.told else "ok"
        return (
            f"{self.series.name:34} {self.early:12.4g} {self.late:12.4g} {self.change:+8.1%} {self.trend:+8.1%} "
            f"{self.slope_per_h:+12.4g}  {mark}: {self.word}{about}"
        )


HEADLINE = f"{'series':34} {'2nd quarter':>12} {'last quarter':>12} {'change':>8} {'trend':>8} {'per hour':>12}"


def judge(series: Series, points: Sequence[tuple[float, float]], tolerance: float = TOLERANCE) -> Verdict:
    """The verdict on (seconds, value) points; those of the whole run, warm-up too."""
    begin_s, end_s = (points[0][0], points[-1][0]) if points else (0.0, 0.0)
    quarter_s = (end_s - begin_s) / 4
    warm = [(at_s, value) for at_s, value in points if at_s >= begin_s + quarter_s]
    early = [value for at_s, value in warm if at_s < begin_s + 2 * quarter_s]
    late = [value for at_s, value in warm if at_s >= end_s - quarter_s]
    if min(len(early), len(late)) < LEAST:
        return Verdict(series, math.nan, math.nan, math.nan, 0.0, 0.0, 0.0, "too few samples", not series.told)
    first, last, slope = median(early), median(late), theil_sen(warm)
    moved = slope * 2 * quarter_s
    most = max(value for _, value in warm)
    word = _word(series, first, last - first, moved, tolerance)
    if series.bound is not None:
        word = "above its bound" if most > series.bound else word if word == "flat" else "below its bound"
    wrong = {"above its bound"} | (set() if series.bound is not None else {"falls" if series.falls else "grows"})
    return Verdict(
        series,
        first,
        last,
        most,
        _share(last - first, first),
        _share(moved, first),
        slope * 3600,
        word,
        word in wrong and not series.told,
    )


def _word(series: Series, first: float, stepped: float, moved: float, tolerance: float) -> str:
    allowed = max(series.grain, tolerance * abs(first))
    if min(stepped, moved) < -allowed and max(stepped, moved) <= allowed:
        return "falls"
    return "grows" if max(stepped, moved) > allowed else "flat"


def _share(part: float, whole: float) -> float:
    return part / abs(whole) if whole else (math.inf if part > 0 else -math.inf if part < 0 else 0.0)


def names_of_faults(verdicts: Sequence[Verdict]) -> list[str]:
    """The series that should not be as they are."""
    return [verdict.series.name for verdict in verdicts if verdict.fault]


__all__ = ["HEADLINE", "LEAST", "TOLERANCE", "Series", "Verdict", "judge", "names_of_faults"]
