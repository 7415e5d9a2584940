"""The regulator: how much may lie unread, and how many actors collect, from what the learner takes. Pure.

The quantity that is regulated is the queueing delay: bytes made and not yet inserted (in the streams, staged, held back
by the rate limiter), divided by the rate at which the learner inserts. Its set point is `QUEUE_S`; with a staleness
target less, if need be, so that a fragment is inserted before the weights that made it are `target` versions old:

    set point    D = min(QUEUE_S, target · seconds per version − age before sending)       at least LEAST_S
    all queues   Q = D · rate                     (Little's law)
    window       w = Q / (actors + 1)             the learner's own queue counts as one more
    actors       as many as Q has fragments, at least 1

Below `COARSE_FRAGMENTS` a window is set to whole fragments: a slow learner's queue is a few of them.

So the feedback of a queue that is full is left to the window itself, which is exact and immediate (an actor stops at
it, a byte too many is never made); what moves smoothly is only the window. That makes it calm: nothing integrates an
error, so nothing winds up, and a queue reaches its set point from below, or by draining as fast as the learner takes.

The learner is never starved. While it takes everything at once (`blocked` is small), its rate is that of the actors and
says nothing about what it could take: the window is kept at several fragments and actors are given back, a share at a
time. Only while it is blocked most of the time may the window shrink to one fragment, and actors be fewer. There is
always one actor and a window of one fragment: nothing can stand still for ever.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

#: Queueing delay that is aimed at, and the least that a staleness target may ask for, seconds. The first outlasts the
#: pauses of a learner (publishing, a checkpoint), the second the way from an actor to the learner and back.
QUEUE_S, LEAST_S = 1.0, 0.2
#: How long weights take to reach an actor, at the worst, seconds.
FETCH_S = 0.35
#: The learner counts as saturated above this share of blocked time, as hungry below the other.
SATURATED, HUNGRY = 0.5, 0.2
#: A queue below this share of its set point calls for more actors; only above the other may there be fewer.
SHORT, FULL = 0.5, 0.8
#: Fragments in the window while the learner is not saturated, and seconds of what its actor makes while it is hungry:
#: several times the way there and back.
ROOMY_FRAGMENTS, ROOMY_S = 4, 0.5
#: Time constants of the window and of the number of actors, seconds.
WINDOW_TAU_S, ACTORS_TAU_S = 0.7, 3.0
#: Rates are taken over at least this time, seconds.
RATE_S = 1.0
#: Numbers on the board are below this.
_LARGEST = 2.0**63
#: Windows below so many fragments are set to whole ones, and moved only when they are off by more than the other
#: number.
COARSE_FRAGMENTS, OFF_FRAGMENTS = 6, 0.65


@dataclass(frozen=True, slots=True)
class Flow:
    """What is seen of a run.

    Attributes:
        unread_bytes: made and not yet inserted.
        bytes_per_s: inserted by the learner.
        blocked: share of the time, 0..1, in which the learner had more than it could insert.
        fragment_bytes: mean size of a fragment; 0 = none has come.
        version_s: seconds between weights versions; 0 = not known.
    """

    unread_bytes: float
    bytes_per_s: float
    blocked: float
    fragment_bytes: float
    version_s: float = 0.0

    @property
    def delay_s(self) -> float:
        """Queueing delay."""
        return self.unread_bytes / self.bytes_per_s if self.bytes_per_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a configuration asks for.

    Attributes:
        window_bytes: largest window.
        max_actors: most actors.
        fragment_s: an actor sends this often.
        target: policy lag at insertion that actors are paced to; None = none.
    """

    window_bytes: int
    max_actors: int
    fragment_s: float
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """What is decided.

    Attributes:
        window_bytes: unread bytes of one slot at which its actor waits.
        actors: how many may collect.
    """

    window_bytes: int
    actors: int


class Regulator:
    """Decides a run's pace, look by look."""

    def __init__(self) -> None:
        self._window: float | None = None
        #: Fragments that each slot may hold; None = the window is so large that single ones do not count.
        self._held: int | None = None
        self._actors: float | None = None
        self._last_s = 0.0

    def decide(self, flow: Flow, wishes: Wishes, slots: int, now_s: float) -> Pace | None:
        """The pace from now on; None before anything came.

        Args:
            flow: what is seen.
            wishes: what the configuration asks for.
            slots: places for actors.
            now_s: monotonic seconds, of the decision before too.
        """
        passed_s, self._last_s = max(0.0, now_s - self._last_s), now_s
        most = max(1, min(slots, wishes.max_actors))
        if flow.fragment_bytes <= 0:
            return None
        if self._actors is None:
            self._actors = float(most)
        total = set_point_s(flow, wishes) * flow.bytes_per_s
        self._actors = _moved(self._actors, self._actors_wanted(flow, total, most), passed_s, ACTORS_TAU_S)
        self._actors = min(max(1.0, self._actors), float(most))
        # No more than there are can be asked to make room: rounding up a half would leave a slot out.
        actors = max(1, min(most, math.ceil(self._actors - 0.25)))
        # Between two reads the learner's hands may be empty while the streams are not.
        queued = flow.unread_bytes >= SHORT * total
        if flow.blocked <= HUNGRY and not queued:
            # The queue is empty. The window only bounds what it can become when the learner turns slow.
            share, least = ROOMY_S * flow.bytes_per_s / actors, ROOMY_FRAGMENTS * flow.fragment_bytes
        else:
            share, least = total / (actors + 1), flow.fragment_bytes
            least *= 1 if flow.blocked >= SATURATED or queued else ROOMY_FRAGMENTS
        wanted = min(max(share, least), float(wishes.window_bytes))
        self._window = wanted if self._window is None else _moved(self._window, wanted, passed_s, WINDOW_TAU_S)
        # While nobody is missing, workers that join are welcome at once.
        window = self._in_fragments(self._window, flow.fragment_bytes)
        return Pace(max(1, round(window)), actors if actors < most else wishes.max_actors)

    def _in_fragments(self, window: float, fragment_bytes: float) -> float:
        """The window that lets each slot hold the whole fragments that come nearest.

        An actor stops when it has reached its window, so a slot holds a window rounded up: a little above a whole
        number all slots at once hold one fragment more, and with few fragments that is a large part of the queue.
        """
        wanted = window / fragment_bytes
        if wanted >= COARSE_FRAGMENTS:
            self._held = None
            return window
        if self._held is None or abs(wanted - self._held) > OFF_FRAGMENTS:
            self._held = max(1, round(wanted))
        # Half a fragment below: fragments are not all of one size.
        return (self._held - 0.5) * fragment_bytes

    def _actors_wanted(self, flow: Flow, total: float, most: int) -> float:
        assert self._actors is not None
        if flow.blocked <= HUNGRY or flow.unread_bytes < SHORT * total:
            return float(most)
        if flow.blocked >= SATURATED and flow.unread_bytes >= FULL * total:
            return min(self._actors, max(1.0, total / flow.fragment_bytes - 1.0))
        return self._actors


def set_point_s(flow: Flow, wishes: Wishes) -> float:
    """The queueing delay that is aimed at, seconds."""
    if wishes.target is None or flow.version_s <= 0:
        return QUEUE_S
    # A fragment is as old as itself when it is sent, and another one may wait in the outbox.
    before_s = 2 * wishes.fragment_s + FETCH_S
    return min(QUEUE_S, max(LEAST_S, wishes.target * flow.version_s - before_s))


class FlowMeter:
    """Makes a Flow of the growing counters that the learner shows on the board (`flow/*`)."""

    def __init__(self) -> None:
        #: (learner's time, bytes inserted, blocked seconds), oldest first.
        self._points: deque[tuple[float, float, float]] = deque()

    def observe(self, board: Mapping[str, float | str]) -> Flow | None:
        """The flow over the last second or so; None while too little is known."""
        try:
            at_s, taken, blocked_s, unread, size, version_s = (float(board[f"flow/{name}"]) for name in FLOW_NAMES)
        except (KeyError, TypeError, ValueError):
            return None
        # The board is for anybody to write: what is no count must not become a pace.
        if not all(0 <= number < _LARGEST for number in (at_s, taken, blocked_s, unread, size, version_s)):
            return None
        # Another learner process: its counters begin anew. (On the same host its clock goes on.)
        if self._points and (at_s < self._points[-1][0] or taken < self._points[-1][1]):
            self._points.clear()
        if not self._points or at_s > self._points[-1][0]:
            self._points.append((at_s, taken, blocked_s))
        while len(self._points) > 2 and at_s - self._points[1][0] >= RATE_S:
            self._points.popleft()
        first_s, first_taken, first_blocked_s = self._points[0]
        span_s = at_s - first_s
        if span_s < RATE_S / 2:
            return None
        blocked = min(1.0, max(0.0, (blocked_s - first_blocked_s) / span_s))
        return Flow(unread, max(0.0, taken - first_taken) / span_s, blocked, size, version_s)


#: Names on the board, below `flow/`: learner's time, bytes inserted so far, seconds blocked so far, bytes waiting, mean
#: bytes of a fragment, seconds between versions.
FLOW_NAMES = ("at_s", "taken_bytes", "blocked_s", "waiting_bytes", "fragment_bytes", "version_s")


def _moved(value: float, towards: float, passed_s: float, tau_s: float) -> float:
    """First-order lag."""
    return value + (towards - value) * (1.0 - math.exp(-passed_s / tau_s))


__all__ = ["FLOW_NAMES", "Flow", "FlowMeter", "Pace", "Regulator", "Wishes", "set_point_s"]
