"""Complaints: what is told when a learner waits for long, and for what.

Workers may come and go, and updates may be slow, so a long wait does not end a run: it is told, on the board and as an
event, with what to do about it where that is known.
"""

import time

from clawq.errors import RateLimitTimeout, RoundTimeout
from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.replay.rate_limiter import Patience, Side

#: Without a fragment for so long, the run counts as waiting for experience, seconds.
STARVED_S = 3.0
#: A run without a worker says so after this time, and again now and then, seconds.
LONELY_S, LONELY_INTERVAL_S = 5.0, 60.0


class Complaints:
    """Follows the waits of one learner's loop.

    Args:
        parts: of the learner.
        notices: for people.
    """

    def __init__(self, parts: Parts, notices: Notices) -> None:
        self._parts, self._notices = parts, notices
        self._committed_s = time.monotonic()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing has waited yet; the limit of patience is the configuration's of now."""
        timeout_s = self._parts.config.rate_limit.timeout_s
        self._patience = Patience(self._parts.limiter, timeout_s, time.monotonic)

    def committed(self, fragments: int) -> None:
        """So many fragments went into the ring; with none, inserting may be waiting for samples."""
        if fragments or not self._parts.intake.blocked:
            self._patience.moved("insert")
        else:
            self._stuck("insert")
        if fragments and self._parts.limiter.filling:
            self._patience.moved("sample")
        if fragments:
            self._committed_s = time.monotonic()

    def updated(self) -> None:
        """An update was made."""
        self._patience.moved("sample")

    def waiting(self) -> str:
        """Nothing can be done now: complain of what is due, and name the wait; empty if it is a short one."""
        parts = self._parts
        if parts.intake.fragments == 0:
            self._lonely(time.monotonic())
            return "waiting for actors"
        if not parts.tempo.free:
            self._lonely(time.monotonic())
            return "filling the ring" if parts.limiter.filling else "waiting for a round"
        if parts.limiter.filling:
            self._stuck("sample")
            return "filling the ring"
        if time.monotonic() - self._committed_s > STARVED_S:
            self._stuck("sample")
            self._lonely(time.monotonic())
            return "waiting for experience"
        return ""

    def round_timed_out(self, error: RoundTimeout) -> None:
        """A round went on without somebody after a long wait."""
        facts = {"version": error.version, "waited_s": round(error.waited_s, 1), "missing": error.missing}
        self._parts.link.notify("round_timeout", **facts)
        self._notices.tell(str(error))

    def _lonely(self, now_s: float) -> None:
        """Without a worker nothing will ever come: say what to do about it."""
        if self._parts.link.figures().get("workers") == 0.0 and now_s - self._committed_s > LONELY_S:
            self._notices.tell_now_and_then(
                "lonely",
                "waiting: no worker serves this run; start one with `clawq worker start` on any machine that reaches "
                "this Redis",
                LONELY_INTERVAL_S,
            )

    def _stuck(self, side: Side) -> None:
        try:
            self._patience.blocked(side)
        except RateLimitTimeout as error:
            self._notices.tell(str(error))
            low, high = error.bounds
            facts = {"side": side, "error": error.error, "low": low, "high": high, "waited_s": error.waited_s}
            self._parts.link.notify("rate_limit_timeout", **facts)
