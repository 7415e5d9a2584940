"""Gauges: rates over a short window, for the status screen and the metric writers."""

from collections import deque


class Rate:
    """Events per second of a growing counter, over the last `window_s` seconds."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def observe(self, now_s: float, count: float) -> float:
        """Note the counter's value and return its rate."""
        self._points.append((now_s, count))
        while len(self._points) > 2 and now_s - self._points[0][0] > self._window_s:
            self._points.popleft()
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
