"""Notices: what people should know about a run, in the log at once and on the board for a while.

Failures of actors and evaluations are all counted; they are told at most every few seconds, so that a broken simulator
on a hundred machines does not drown everything else.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from clawq.spawning.failure import SIMULATOR

log = logging.getLogger(__name__)

#: How long a notice stays on the board, seconds.
SHOWN_S = 30.0
#: Failures of one kind are told at most this often, seconds.
FAILURE_INTERVAL_S = 10.0
#: Waits of actors that are shorter are not told, seconds.
LEAST_WAIT_S = 0.5
#: More actors do not go with one worker; an event comes over the wire.
MOST_ACTORS = 1000
#: Reasons for which actors are recycled, beside simulators that fail.
RECYCLED = ("memory", "fragments")


class Notices:
    """Keeps the newest notice.

    Args:
        clock: monotonic seconds.

    Attributes:
        failures: how often what failed, `actor` and `evaluation`.
        recycled: actors that gave way to new ones, by the reason.
        broken_off: episodes that were under way in those, and in actors that failed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.failures = {"actor": 0, "evaluation": 0}
        self.recycled: Counter[str] = Counter()
        self.broken_off = 0
        self._clock = clock
        self._newest, self._newest_s = "", -math.inf
        self._told_s: dict[str, float] = {}

    def tell(self, text: str) -> None:
        """Tell it now."""
        log.warning("%s", text)
        self._newest, self._newest_s = text.splitlines()[0] if text else "", self._clock()

    def tell_now_and_then(self, topic: str, text: str, interval_s: float) -> None:
        """Tell it, unless something of the same topic was told within the interval."""
        now_s = self._clock()
        if now_s - self._told_s.get(topic, -math.inf) >= interval_s:
            self._told_s[topic] = now_s
            self.tell(text)

    def failed(self, what: str, facts: Mapping[str, Any]) -> str:
        """Count a failure (`actor` or `evaluation`) from its event's facts; returns what went wrong, in full."""
        self.failures[what] += 1
        self._broke_off(facts)
        if what == "actor" and facts.get("reason") == SIMULATOR:
            self.recycled[SIMULATOR] += 1
        count, error = self.failures[what], str(facts.get("error") or "it gave no reason")
        where = f" on {facts['worker']}" if facts.get("worker") else ""
        times = f" ({count} failures so far)" if count > 1 else ""
        self.tell_now_and_then(what, f"an {what}{where} failed{times}: {error.splitlines()[0]}", FAILURE_INTERVAL_S)
        return error

    def reaped(self, facts: Mapping[str, Any]) -> None:
        """Tell, from a watchdog's event, whom it ended and why, with its last words; count actors that went with it."""
        who = f"{facts.get('role')} {facts.get('place')}".strip()
        words = str(facts.get("error") or "").strip().splitlines()[-3:]
        said = f"\n--- end of its log ---\n{chr(10).join(words)}" if words else ""
        where = f"; see {facts['report']} there" if facts.get("report") else ""
        # What those had not sent is gone; nobody else tells of them.
        actors = facts.get("actors")
        self.failures["actor"] += min(actors, MOST_ACTORS) if type(actors) is int and actors > 0 else 0
        self.tell(f"the watchdog ended {who} (pid {facts.get('pid')}): {facts.get('why')}{where}{said}")

    def recycled_one(self, facts: Mapping[str, Any]) -> None:
        """Count an actor that was recycled, from its event's facts."""
        why = str(facts.get("why"))
        self.recycled[why if why in RECYCLED else "other"] += 1
        self._broke_off(facts)
        if why == "memory":
            text = f"an actor on {facts.get('worker')} held {facts.get('memory_mb')} MB and was recycled"
            self.tell_now_and_then("recycled", text, FAILURE_INTERVAL_S)

    def _broke_off(self, facts: Mapping[str, Any]) -> None:
        broken_off = facts.get("broken_off")
        self.broken_off += broken_off if type(broken_off) is int and broken_off > 0 else 0

    def waited(self, facts: Mapping[str, Any]) -> None:
        """Tell, from a lease's report, for how long its actor could not send because Redis was full."""
        waited = facts.get("waited_s")
        full_s = waited.get("full") if isinstance(waited, dict) else None
        if isinstance(full_s, int | float) and full_s >= LEAST_WAIT_S:
            text = f"an actor on {facts.get('worker')} waited {full_s:.0f} s: the data Redis was out of memory (OOM)"
            self.tell_now_and_then("full", text, FAILURE_INTERVAL_S)

    @property
    def recent(self) -> str:
        """The newest notice while it is recent, else nothing."""
        return self._newest if self._clock() - self._newest_s < SHOWN_S else ""
