"""Hindsight against a slow transcription: goals of the same episode, rewards and ends as the environment gives them."""

from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from clawq.core import Batch
from clawq.replay.hindsight import Hindsight, Strategy
from clawq.replay.nstep import Gatherer
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.specs import ArraySpec
from clawq.testing.experience import SPEC, Chances, TrueSlot, TrueStep, Truth, ids_of
from clawq.types import BoolArray, FloatArray, Fragment

#: `state` is achieved (its first number is the obs' id); `wanted` is desired.
GOAL_SPEC = replace(SPEC, obs={**SPEC.obs, "wanted": ArraySpec((3,))}, goal_keys=("state", "wanted"))
GAMMA, SCALE = 0.9, 2.0


class Goals:
    """0 for the goal itself, else -1; reaching it ends the episode, or not."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def reward(self, achieved: FloatArray, desired: FloatArray) -> FloatArray:
        missed: FloatArray = (achieved[:, 0] != desired[:, 0]).astype(np.float32)
        return -missed

    def terminated(self, achieved: FloatArray, desired: FloatArray) -> BoolArray:
        reached: BoolArray = achieved[:, 0] == desired[:, 0]
        return reached & self._ends


class Place:
    """A ring, the truth about it, and hindsight over it."""

    def __init__(self, strategy: Strategy, n: int, ends: bool, capacity: int = 4000, next_step: bool = False) -> None:
        self.ring, self.truth = ReplayRing(GOAL_SPEC, capacity), Truth()
        self.n, self.ends, self.strategy = n, ends, strategy
        rng = np.random.default_rng(3)
        self.slot = TrueSlot("s", 3, rng, count(1), next_step=next_step, chances=Chances(end=0.15, invalid=0.05))
        self.generator = torch.Generator().manual_seed(0)

    def fill(self, fragments: int) -> None:
        for number in range(fragments):
            fragment, told = self.slot.fragment(1 + number % 5)
            self.truth.insert(fragment, told)
            self.ring.insert(with_goals(fragment))
            assert self.ring.check_valid() == (True, "")

    def gather(self, rows: np.ndarray, k: int) -> Batch:
        hindsight = Hindsight(
            self.ring, Goals(self.ends), self.strategy, k, Returns(self.n, GAMMA, SCALE), generator=self.generator
        )
        return Gatherer(self.ring, len(rows), Returns(self.n, GAMMA, SCALE), hindsight).gather(rows)

    def plain(self, rows: np.ndarray) -> Batch:
        return Gatherer(self.ring, len(rows), Returns(self.n, GAMMA, SCALE)).gather(rows)

    def live_ids(self) -> set[int]:
        """Obs ids of the rows that the ring holds and that can be sampled."""
        return set(ids(self.ring.obs_at(torch.from_numpy(self.ring.sampleable_rows()))))


def with_goals(fragment: Fragment) -> Fragment:
    """Add a desired goal that is never achieved."""
    obs = {**fragment.obs, "wanted": np.zeros_like(fragment.obs["state"])}
    final_obs = {**fragment.final_obs, "wanted": np.zeros_like(fragment.final_obs["state"])}
    return replace(fragment, obs=obs, final_obs=final_obs)


def ids(obs: Any) -> list[int]:
    """Ids of obs; AssertionError if keys of a row do not belong together (the goal aside)."""
    found: list[int] = ids_of({key: one.numpy() for key, one in obs.items() if key != "wanted"}).tolist()
    return found


def onward(step: TrueStep) -> list[TrueStep]:
    """The steps of an episode from this one on, as far as they are valid."""
    steps = [step]
    while (after := steps[-1].following) is not None and after.valid:
        steps.append(after)
    return steps


def backward(truth: Truth, step: TrueStep, live: set[int]) -> list[TrueStep]:
    """The steps of an episode before this one, newest first, as far as they are valid and in the ring."""
    before = {after.obs: one for one in truth.steps.values() if (after := one.following) is not None and one.valid}
    steps: list[TrueStep] = []
    while (last := before.get((steps[-1] if steps else step).obs)) is not None and last.obs in live:
        steps.append(last)
    return steps


def allowed(place: Place, step: TrueStep, live: set[int]) -> list[int]:
    """Ids of the goals that may be taken for a step."""
    reached = [one.next_obs for one in onward(step)]
    if place.strategy == "final":
        return reached[-1:]
    if place.strategy == "future":
        return reached
    return [one.next_obs for one in backward(place.truth, step, live)] + reached


def expected(place: Place, step: TrueStep, goal: int) -> tuple[float, float, int]:
    """(return, discount, bootstrap obs) of the n-step transition under that goal."""
    total = 0.0
    for taken, one in enumerate(onward(step)[: place.n]):
        total += GAMMA**taken * -(one.next_obs != goal)
        if place.ends and one.next_obs == goal:
            return SCALE * total, 0.0, one.next_obs
    return SCALE * total, GAMMA ** (taken + 1), one.next_obs


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("next_step", [False, True])
def test_C36_relabelled_rows_are_what_the_environment_would_have_given(
    strategy: Strategy, n: int, ends: bool, next_step: bool
) -> None:
    place = Place(strategy, n, ends, next_step=next_step)
    place.fill(60)
    rows = np.random.default_rng(1).permutation(np.repeat(place.ring.sampleable_rows(), 3))
    batch, plain, live = place.gather(rows, k=4), place.plain(rows), place.live_ids()
    changed = round(len(rows) * 4 / 5)
    goals = batch.obs["wanted"][:, 0].long().tolist()
    for row, (obs, after) in enumerate(zip(ids(batch.obs), ids(batch.next_obs), strict=True)):
        if row >= changed:
            assert goals[row] == 0
            continue
        step = place.truth.steps[obs]
        assert goals[row] in allowed(place, step, live)
        reward, discount, bootstrap = expected(place, step, goals[row])
        assert (float(batch.reward[row]), float(batch.discount[row])) == pytest.approx((reward, discount), rel=1e-6)
        assert after == bootstrap
    assert torch.equal(batch.next_obs["wanted"], batch.obs["wanted"])
    # The others are as they were
    for one, other in ((batch.reward, plain.reward), (batch.discount, plain.discount)):
        assert torch.equal(one[changed:], other[changed:])
    # Goals of a step itself and goals further on were both taken.
    shown = ids(batch.obs)[:changed]
    own = sum(goal == place.truth.steps[obs].next_obs for goal, obs in zip(goals, shown, strict=False))
    assert 0 < own < changed


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_every_goal_of_the_episode_comes_equally_often(strategy: Strategy) -> None:
    place = Place(strategy, 1, False)
    place.fill(60)
    live = place.live_ids()
    rows = place.ring.sampleable_rows()
    shown = ids(place.ring.obs_at(torch.from_numpy(rows)))
    row = max(range(len(rows)), key=lambda row: min(len(onward(place.truth.steps[shown[row]])), 5) * row)
    possible = allowed(place, place.truth.steps[shown[row]], live)
    assert len(possible) >= 5
    batch = place.gather(np.full(20_000, rows[row]), k=10**9)
    times = Counter(batch.obs["wanted"][:, 0].long().tolist())
    assert set(times) == set(possible)
    share = 20_000 / len(possible)
    chi2, freedom = sum((number - share) ** 2 / share for number in times.values()), len(possible) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_in_a_ring_that_overwrites_and_voids_goals_are_of_live_rows_only(strategy: Strategy) -> None:
    place = Place(strategy, 3, True, capacity=120)
    for _ in range(80):
        place.fill(1)
        if place.slot.rng.random() < 0.2:
            fragment, told = place.slot.fragment(3)
            place.truth.insert(fragment, told)
            place.ring.insert(with_goals(fragment))
            place.ring.void("s", 1, 1, fragment.meta.seq, 1)
            for row in told[1:]:
                row[1].valid = False
        rows = place.ring.sampleable_rows()
        batch, live = place.gather(rows, k=10**9), place.live_ids()
        for obs, goal in zip(ids(batch.obs), batch.obs["wanted"][:, 0].long().tolist(), strict=True):
            assert goal in allowed(place, place.truth.steps[obs], live)


def test_the_same_generator_state_gives_the_same_goals() -> None:
    place = Place("future", 1, False)
    place.fill(20)
    state, rows = place.generator.get_state(), place.ring.sampleable_rows()
    first = place.gather(rows, k=4).obs["wanted"].clone()
    place.generator.set_state(state)
    assert torch.equal(place.gather(rows, k=4).obs["wanted"], first)
    assert not torch.equal(place.gather(rows, k=4).obs["wanted"], first)
