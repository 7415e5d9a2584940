"""The regulator, on a simulated run: it settles after steps of the learner's speed, starves nobody, and never stops.

What is regulated is the amount that is made and not yet inserted (in bytes: its set point is the delay's times the
learner's rate). Settled: within 20 % of the set point, or as near as whole fragments allow. Overshoot: how far it goes
past the new set point once it has reached it.
"""

import math
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest

from clawq.control.regulator import (
    FLOW_NAMES,
    HUNGRY,
    QUEUE_S,
    SATURATED,
    Flow,
    FlowMeter,
    Pace,
    Regulator,
    Wishes,
    set_point_s,
)

DT_S = 0.01
#: As in the real thing: the learner shows its counters, the coordinator looks, the link passes on, actors look.
SHOW_S, LOOK_S, HAND_OVER_S, POLL_S, LEASE_S = 0.25, 0.25, 0.2, 0.05, 5.0


@dataclass
class Slot:
    """One actor: makes a fragment every `period_s` while it has a lease and is not held back."""

    made_s: float = 0.0
    unread: float = 0.0
    seen_unread: float = 0.0
    active: bool = True
    lease_ends_s: float = 0.0


@dataclass
class Simulation:
    """Slots, streams, a staging queue and a learner, with the delays of the real system."""

    slots: int
    fragment: float
    period_s: float
    wishes: Wishes
    way_s: float = 0.05
    staged: float = 0.0
    taken: float = 0.0
    fragments: float = 0.0
    blocked_s: float = 0.0
    produced: float = 0.0
    now_s: float = 0.0
    seed: int = 0
    history: list[tuple[float, float, float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.actors = [Slot(made_s=float(-rng.uniform(0, self.period_s))) for _ in range(self.slots)]
        for slot in self.actors:
            slot.lease_ends_s = float(rng.uniform(0, LEASE_S))
        self.meter, self.regulator = FlowMeter(), Regulator()
        self.pace = Pace(self.wishes.window_bytes, self.wishes.max_actors)
        self.window = float(self.wishes.window_bytes)
        self._handed: list[tuple[float, float]] = []
        self._board: dict[str, float | str] = {}
        self._debt, self._turn = 0.0, 0
        self._hold, self._before, self._shown_s = self.window, (0.0, 0.0), 0.0

    def run(self, seconds: float, bytes_per_s: float) -> None:
        """Go on for so long with a learner that can take so much."""
        for _ in range(round(seconds / DT_S)):
            self.now_s += DT_S
            self._act()
            self._learn(bytes_per_s)
            self._control()
            self.history.append((self.now_s, self.queue, self.taken, self.produced, self.pace.actors))

    @property
    def queue(self) -> float:
        return self.staged + sum(slot.unread for slot in self.actors)

    def _every(self, period_s: float) -> bool:
        return math.floor(self.now_s / period_s) != math.floor((self.now_s - DT_S) / period_s)

    def _act(self) -> None:
        if self._every(POLL_S + self.way_s):
            for slot in self.actors:
                slot.seen_unread = slot.unread
        for slot in self.actors:
            if self.now_s >= slot.lease_ends_s:
                others = sum(other.active for other in self.actors if other is not slot)
                slot.active = others < self.pace.actors
                slot.lease_ends_s = self.now_s + (LEASE_S if slot.active else LOOK_S)
            if not slot.active or slot.seen_unread >= self.window:
                slot.made_s = max(slot.made_s, self.now_s - self.period_s + DT_S)
            elif self.now_s - slot.made_s >= self.period_s:
                slot.made_s = self.now_s
                slot.unread += self.fragment
                slot.seen_unread += self.fragment
                self.produced += self.fragment

    def _learn(self, bytes_per_s: float) -> None:
        # The consumer stages up to the window; one fragment is always let in.
        while self.queue > self.staged and (not self.staged or self.staged + self.fragment <= self._hold):
            self._turn += 1
            slot = self.actors[self._turn % self.slots]
            if slot.unread > 0:
                slot.unread -= self.fragment
                self.staged += self.fragment
        self._debt = min(self._debt, self.fragment) + bytes_per_s * DT_S
        while self.staged > 0 and self._debt >= self.fragment:
            self._debt -= self.fragment
            self.staged -= self.fragment
            self.taken += self.fragment
            self.fragments += 1
        if self.staged:
            self.blocked_s += DT_S

    def _control(self) -> None:
        if self._shows():
            self._show()
        if self._every(LOOK_S):
            flow = self.meter.observe(self._board)
            if flow is not None:
                self.pace = self.regulator.decide(flow, self.wishes, self.slots, self.now_s) or self.pace
                self._handed.append((self.now_s + HAND_OVER_S, self.pace.window_bytes))
        while self._handed and self._handed[0][0] <= self.now_s:
            self.window = self._handed.pop(0)[1]

    def _shows(self) -> bool:
        """Whether the learner shows its counters now."""
        return self._every(SHOW_S)

    def _show(self) -> None:
        """As clawq.programs.flow does."""
        passed_s = self.now_s - self._shown_s
        hungry = self.blocked_s - self._before[0] < 0.2 * passed_s
        rate = (self.taken - self._before[1]) / passed_s
        self._hold = max(4 * self.window, 0.5 * rate) if hungry else self.window
        self._before, self._shown_s = (self.blocked_s, self.taken), self.now_s
        size = self.taken / self.fragments if self.fragments else 0.0
        values = (self.now_s, self.taken, self.blocked_s, self.queue, size, 1.0)
        self._board = {f"flow/{name}": value for name, value in zip(FLOW_NAMES, values, strict=True)}

    def column(self, index: int, since_s: float, until_s: float = math.inf) -> np.ndarray:
        return np.array([row[index] for row in self.history if since_s <= row[0] < until_s])

    def rate(self, index: int, since_s: float, until_s: float) -> float:
        """Bytes per second of a growing counter."""
        values = self.column(index, since_s, until_s)
        return float(values[-1] - values[0]) / (until_s - since_s)


def make(
    slots: int, fragment: float = 20_000.0, period_s: float = 0.1, way_s: float = 0.05, window: int = 20_000_000
) -> Simulation:
    return Simulation(slots, fragment, period_s, Wishes(window, 1000, period_s), way_s)


class Turns(Simulation):
    """A learner as the real one is: it commits between two updates only, and during an update shows nothing.

    The rate limiter lets inserts run ahead of samples, and samples of inserts, by `AHEAD` fragments.
    """

    AHEAD = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.window = 10 * self.fragment
        self.pace = Pace(int(self.window), self.wishes.max_actors)
        self.pending = self.error = self.busy_until_s = 0.0
        self.turned_s: float | None = None
        self.waiting = self.turned = False

    def go(self, seconds: float, fragments_per_s: float, updates_per_s: float) -> None:
        """Go on for so long with updates of that length, each of which uses its share of the fragments up."""
        self.update_s, self.used = 1 / updates_per_s, fragments_per_s / updates_per_s
        self.run(seconds, 0.0)

    @property
    def queue(self) -> float:
        return super().queue + self.pending

    def _learn(self, bytes_per_s: float) -> None:
        while self.queue > self.staged + self.pending and (
            not self.staged or self.staged + self.fragment <= self._hold
        ):
            self._turn += 1
            slot = self.actors[self._turn % self.slots]
            if slot.unread > 0:
                slot.unread -= self.fragment
                self.staged += self.fragment
        if self.now_s < self.busy_until_s - DT_S / 10:
            return
        for _ in range(4):
            if not self.pending:
                self.pending = min(self.staged, 4 * self.fragment)
                self.staged -= self.pending
            if not self.pending or self.error + 1 > self.AHEAD:
                break
            self.pending -= self.fragment
            self.taken += self.fragment
            self.fragments += 1
            self.error += 1
        self.waiting = self.pending > 0 or self.staged > 0
        if self.turned_s is not None and self.waiting:
            self.blocked_s += self.now_s - self.turned_s
        self.turned_s, self.turned = self.now_s, True
        if self.error - self.used >= -self.AHEAD:
            self.error -= self.used
            self.busy_until_s = self.now_s + self.update_s

    def _shows(self) -> bool:
        shows = self.turned and self.now_s - self._shown_s >= SHOW_S - DT_S / 10
        self.turned = False
        return shows

    def smoothed(self, since_s: float, until_s: float) -> np.ndarray:
        """Mean of the queue over the last second, in fragments."""
        return np.convolve(self.column(1, since_s - 1.0, until_s), np.full(100, 0.01), "valid") / self.fragment


@pytest.mark.parametrize(("slots", "fragments_per_s"), [(2, 18.0), (4, 36.0), (4, 13.0), (8, 36.0)])
def test_a_learner_that_inserts_few_fragments_between_long_updates_settles_too(
    slots: int, fragments_per_s: float
) -> None:
    # Given a learner that has been at 5 updates/s for a while
    sim = Turns(slots, 20_000.0, 0.05, Wishes(20_000_000, 1000, 0.05))
    sim.go(25, fragments_per_s / 4, 5)
    # When it goes up to 20, and down to 5 again
    for updates_per_s in (20, 5):
        began_s, goal = sim.now_s, QUEUE_S * fragments_per_s * updates_per_s / 20
        sim.go(25, fragments_per_s * updates_per_s / 20, updates_per_s)
        # Then within 10 s it stays within 20 % of the set point, or as near as a fragment for each slot allows
        settled = sim.smoothed(began_s + 10, sim.now_s)
        assert np.abs(settled - goal).max() <= max(0.2 * goal, slots)
        # and has not gone past it by more than that, give or take one fragment
        queue = sim.smoothed(began_s, sim.now_s)
        rising = queue[0] < goal
        reached = int(np.argmax(queue >= goal if rising else queue <= goal))
        past = queue[reached:] - goal if rising else goal - queue[reached:]
        assert past.max() <= 0.2 * goal + 1
        # The learner takes all that it can
        assert sim.rate(2, began_s + 10, sim.now_s) / sim.fragment == pytest.approx(goal, rel=0.06)


GRID = list(product([2, 8, 32], [0.25, 0.5, 2.0, 4.0], [0.02, 0.2]))


@pytest.mark.parametrize(("slots", "step", "way_s"), GRID)
def test_after_a_step_of_the_learners_speed_it_settles_within_10_s_with_less_than_20_percent_overshoot(
    slots: int, step: float, way_s: float
) -> None:
    # Given actors that could make several times what the learner takes, and a ring that was filled as fast as they can
    sim = make(slots, fragment=2_000.0, period_s=0.05, way_s=way_s)
    could = slots * sim.fragment / sim.period_s
    after = could / 8 * max(1.0, step)
    before = after / step
    sim.run(3, 2 * could)
    sim.run(25, before)
    grain = (slots + 1) * sim.fragment
    assert abs(float(np.mean(sim.column(1, 20))) - QUEUE_S * before) <= 0.2 * QUEUE_S * before + grain
    began_s = sim.now_s
    sim.run(25, after)
    goal = QUEUE_S * after
    allowed = 0.2 * goal + grain
    settled = sim.column(1, began_s + 10)
    assert np.abs(settled - goal).max() <= allowed
    # Once there it does not go past it
    queue = sim.column(1, began_s)
    reached = int(np.argmax(queue >= goal if after > before else queue <= goal))
    past = queue[reached:] - goal if after > before else goal - queue[reached:]
    assert past.max() <= allowed
    # Actors make what the learner takes, and the learner takes all that it can
    made, taken = (sim.rate(index, began_s + 10, began_s + 25) for index in (3, 2))
    assert made == pytest.approx(taken, rel=0.05)
    assert taken == pytest.approx(after, rel=0.05)


@pytest.mark.parametrize(("slots", "way_s", "period_s"), list(product([1, 4, 32], [0.02, 0.3], [0.05, 0.3, 2.0])))
def test_a_learner_that_takes_all_there_is_is_never_starved(slots: int, way_s: float, period_s: float) -> None:
    sim = make(slots, period_s=period_s, way_s=way_s)
    could = slots * sim.fragment / period_s
    sim.run(30, 3 * could)
    # What actors make when nothing holds them back
    assert sim.rate(3, 5, 30) == pytest.approx(could, rel=0.1)
    assert sim.pace.actors >= slots


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_from_a_learner_that_was_slow_for_long_everything_comes_back(slots: int) -> None:
    sim = make(slots)
    could = slots * sim.fragment / sim.period_s
    sim.run(3, 2 * could)
    sim.run(37, could / 20)
    assert sim.rate(2, 20, 40) == pytest.approx(could / 20, rel=0.1)
    sim.run(30, 2 * could)
    assert sim.rate(3, 55, 70) == pytest.approx(could, rel=0.1)


def test_with_more_actors_than_fragments_in_the_queue_some_are_given_up_and_the_learner_does_not_notice() -> None:
    sim = make(32)
    slow = 5 * sim.fragment
    sim.run(60, slow)
    assert 1 <= sim.pace.actors <= 6
    assert sim.rate(2, 30, 60) == pytest.approx(slow, rel=0.05)
    # The number is quiet: it does not hunt.
    assert len(set(sim.column(4, 40).tolist())) <= 2


def test_a_learner_that_takes_nothing_leaves_one_actor_and_one_fragment_and_it_goes_on_from_there() -> None:
    sim = make(8)
    sim.run(10, 1e6)
    sim.run(30, 0.0)
    assert sim.pace.actors == 1
    assert sim.pace.window_bytes >= 1
    before = sim.taken
    sim.run(10, 1e6)
    assert sim.taken - before > 5e6


def test_unread_is_bounded_by_the_largest_window_whatever_happens() -> None:
    sim = make(8, window=100_000)
    rng = np.random.default_rng(0)
    for _ in range(30):
        sim.run(1.0, float(rng.choice([0.0, 1e4, 1e5, 1e6, 1e8])))
    assert sim.column(1, 0).max() <= 9 * (100_000 + 2 * sim.fragment)


def test_the_same_numbers_give_the_same_decisions() -> None:
    first, second = make(4), make(4)
    for sim in (first, second):
        sim.run(5, 1e5)
        sim.run(5, 1e6)
    assert first.history == second.history


@pytest.mark.parametrize(
    ("target", "version_s", "expected"),
    [
        pytest.param(None, 1.0, QUEUE_S, id="no_target"),
        pytest.param(3, 0.0, QUEUE_S, id="no_version_yet"),
        pytest.param(10, 1.0, QUEUE_S, id="far_target"),
        pytest.param(2, 0.5, 2 * 0.5 - 0.35 - 0.2, id="near_target"),
        pytest.param(1, 0.1, 0.2, id="nearer_than_can_be"),
    ],
)
def test_the_set_point_follows_the_lag_target(target: int | None, version_s: float, expected: float) -> None:
    flow = Flow(0.0, 1e6, 1.0, 1e4, version_s)
    assert set_point_s(flow, Wishes(10**6, 10, 0.1, target)) == pytest.approx(expected)


def test_before_anything_came_nothing_is_decided() -> None:
    assert Regulator().decide(Flow(0, 0, 0, 0), Wishes(10**6, 7, 0.1), 3, 0.0) is None


def test_the_meter_takes_differences_and_begins_anew_with_another_learner() -> None:
    def board(at_s: float, taken: float, blocked_s: float) -> dict[str, float | str]:
        values = (at_s, taken, blocked_s, 50.0, 10.0, 1.5)
        return {f"flow/{name}": value for name, value in zip(FLOW_NAMES, values, strict=True)}

    meter = FlowMeter()
    assert meter.observe({}) is None
    assert meter.observe(board(100, 1000, 5)) is None
    assert meter.observe(board(101, 3000, 5.5)) == Flow(50.0, 2000.0, 0.5, 10.0, 1.5)
    assert meter.observe({"flow/at_s": "x"}) is None
    assert meter.observe(board(3, 0, 0)) is None
    assert meter.observe(board(4, 100, 1)) == Flow(50.0, 100.0, 1.0, 10.0, 1.5)
    # The board still has the last word of a killed learner when the next one of that host begins.
    assert meter.observe(board(9, 50, 0)) is None
    assert meter.observe(board(10, 350, 0)) == Flow(50.0, 300.0, 0.0, 10.0, 1.5)
    assert HUNGRY < SATURATED
