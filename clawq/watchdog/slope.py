"""A robust slope: Theil and Sen's, the median of the slopes of all pairs of points.

A jump (a cache that is filled once, a garbage collection) moves a least-squares line; the median hardly notices it.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

#: Of more points than about this the medians of equal stretches are taken: pairs grow with the square, and single ones
#: of what goes up and down would tell of trends that there are not.
_MOST = 60


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Median slope of (x, y) points, y per x; 0 if there are less than two different x."""
    size = max(1, len(points) // _MOST)
    stretches = [points[at : at + size] for at in range(0, len(points), size)]
    kept = [(median(x for x, _ in part), median(y for _, y in part)) for part in stretches]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(kept, 2) if x2 != x1]
    return median(slopes) if slopes else 0.0


__all__ = ["theil_sen"]
