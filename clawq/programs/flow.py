"""The flow of experience into the learner, as growing counters for the coordinator's regulator (`flow/*` on the board).

Counters, not rates: whoever reads them takes differences over the time that suits him, and a reader that comes late or
misses one has lost nothing. The names are those of `clawq.control.regulator.FLOW_NAMES`.
"""

from collections import deque

from clawq.programs.intake import Intake
from clawq.programs.link import Link
from clawq.replay.consumer import Consumer
from clawq.types import Metrics

#: How often the counters are shown, seconds.
SHOW_INTERVAL_S = 0.25
#: Below this share of blocked time nothing queues; staging then holds so many windows, and so many seconds of the flow.
HUNGRY, STAGED_WINDOWS, STAGED_S = 0.2, 4, 0.5
#: Versions over which the time between two is taken.
VERSIONS_AVERAGED = 6


class FlowGauge:
    """Follows one learner's intake; its loop tells the time.

    Args:
        intake: what inserts.
        consumer: what stages; its bound follows the window.
        link: what knows the streams and the window.
    """

    def __init__(self, intake: Intake, consumer: Consumer, link: Link) -> None:
        self._intake, self._consumer, self._link = intake, consumer, link
        self._blocked_s = self._looked_s = self._shown_s = 0.0
        self._before = 0.0, 0
        self._published_s: deque[float] = deque(maxlen=VERSIONS_AVERAGED)

    def look(self, now_s: float) -> None:
        """Once in every turn of the loop, after committing."""
        if self._looked_s and self._intake.waiting:
            self._blocked_s += now_s - self._looked_s
        self._looked_s = now_s
        if now_s - self._shown_s >= SHOW_INTERVAL_S:
            self._fit_staging(now_s)
            self._shown_s = now_s
            self._link.show({f"flow/{name}": value for name, value in self.read(now_s).items()})

    def _fit_staging(self, now_s: float) -> None:
        """Staging is one more queue like a slot's; while nothing queues, it only has to outlast an update."""
        passed_s, (blocked_s, taken) = now_s - self._shown_s, self._before
        self._before = self._blocked_s, self._intake.payload_bytes
        window, rate = self._link.window_bytes, (self._intake.payload_bytes - taken) / passed_s
        unread = self._link.figures().get("unread_bytes", 0.0)
        if self._blocked_s - blocked_s < HUNGRY * passed_s and unread <= STAGED_S * rate:
            window = max(STAGED_WINDOWS * window, int(STAGED_S * rate))
        self._consumer.hold(window)

    def published(self, now_s: float) -> None:
        """Weights were published."""
        self._published_s.append(now_s)

    def read(self, now_s: float) -> Metrics:
        """The counters now."""
        intake = self._intake
        unread = self._link.figures().get("unread_bytes", 0.0)
        return {
            "at_s": now_s,
            "taken_bytes": float(intake.payload_bytes),
            "blocked_s": self._blocked_s,
            "waiting_bytes": unread + intake.held_bytes,
            "fragment_bytes": intake.payload_bytes / max(1, intake.fragments),
            "version_s": self._version_s(now_s),
        }

    def _version_s(self, now_s: float) -> float:
        times = self._published_s
        if len(times) < 2:
            return 0.0
        mean_s = (times[-1] - times[0]) / (len(times) - 1)
        # A learner that has become slow shows it before its next version.
        return max(mean_s, now_s - times[-1])
