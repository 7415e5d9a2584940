"""Prioritised replay: the numbers of the paper, and priorities that follow the ring."""

from itertools import count

import numpy as np
import pytest
import torch

from clawq.errors import ConfigError
from clawq.replay.prioritized import PrioritizedSampler, Schedule
from clawq.replay.ring import ReplayRing
from clawq.testing.experience import SPEC, Chances, TrueSlot
from clawq.types import Array

EPSILON, ALPHA = 1e-6, Schedule(0.6, 0.6)


def new_slot(envs: int = 3, end: float = 0.0, invalid: float = 0.0) -> TrueSlot:
    return TrueSlot("s", envs, np.random.default_rng(0), count(1), chances=Chances(end=end, invalid=invalid))


def sampler_of(ring: ReplayRing, alpha: Schedule = ALPHA) -> PrioritizedSampler:
    return PrioritizedSampler(ring, torch.Generator().manual_seed(0), alpha, epsilon=EPSILON)


def three_rows(alpha: Schedule = ALPHA) -> PrioritizedSampler:
    """A sampler over a ring of three rows."""
    ring = ReplayRing(SPEC, 50)
    sampler = sampler_of(ring, alpha)
    ring.insert(new_slot().fragment(1)[0])
    assert ring.sampleable_rows().tolist() == [0, 1, 2]
    return sampler


def give(sampler: PrioritizedSampler, *priorities: float) -> None:
    """Let the first rows have these priorities (signs are of the TD errors)."""
    error = [np.sign(priority) * (abs(priority) - EPSILON) for priority in priorities]
    sampler.learned(np.arange(len(priorities)), torch.tensor(error, dtype=torch.float64))


def drawn(sampler: PrioritizedSampler, draws: int, progress: float = 0.0) -> tuple[Array, dict[int, float]]:
    """How often each of three rows came, and its importance weight."""
    draw = sampler.draw(draws, progress)
    assert draw.importance_weight is not None
    weights = dict(zip(draw.rows.tolist(), draw.importance_weight.tolist(), strict=True))
    return np.bincount(draw.rows, minlength=3), weights


def fits(times: Array, shares: Array) -> bool:
    """χ² within 5 sigma of its mean."""
    expected = times.sum() * np.asarray(shares)
    chi2, freedom = float(((times - expected) ** 2 / expected).sum()), len(times) - 1
    return bool(chi2 < freedom + 5 * (2 * freedom) ** 0.5)


def shares_of(*numbers: float) -> Array:
    shares: Array = np.divide(numbers, np.sum(numbers))
    return shares


@pytest.mark.parametrize("signs", [(1, 1, 1), (-1, 1, -1)])
def test_C32_the_golden_table(signs: tuple[int, int, int]) -> None:
    # priorities 1, 2, 4; alpha 0.6; beta 0.4
    sampler = three_rows()
    give(sampler, *(sign * priority for sign, priority in zip(signs, (1.0, 2.0, 4.0), strict=True)))
    times, weights = drawn(sampler, 100_000)
    assert fits(times, shares_of(1.0, 2.0**0.6, 4.0**0.6))
    # (N · P_i)^−β over the largest: (p_1 / p_i)^(α·β)
    assert weights == pytest.approx({0: 1.0, 1: 2.0**-0.24, 2: 4.0**-0.24}, rel=1e-6)
    assert max(weights.values()) == 1.0


def test_C32_in_a_ring_that_has_wrapped_rows_come_as_often_as_their_priorities_say() -> None:
    rng = np.random.default_rng(7)
    ring, slot = ReplayRing(SPEC, 1000), new_slot(end=0.1, invalid=0.1)
    sampler = sampler_of(ring)
    for _ in range(200):
        ring.insert(slot.fragment(5)[0])
    rows = ring.sampleable_rows()
    priorities = rng.uniform(0.1, 5.0, len(rows))
    sampler.learned(rows, torch.from_numpy(priorities - EPSILON))
    draw = sampler.draw(100_000)
    times = np.array([np.count_nonzero(draw.rows == row) for row in rows])
    assert times.sum() == 100_000
    assert fits(times, shares_of(*priorities**0.6))
    assert draw.importance_weight is not None
    of_row = dict(zip(rows.tolist(), priorities, strict=True))
    expected = np.array([of_row[row] for row in draw.rows.tolist()]) ** -0.24
    np.testing.assert_allclose(draw.importance_weight, expected / expected.max(), rtol=1e-4)


def test_C32_a_row_without_error_still_comes_and_its_priority_is_epsilon() -> None:
    sampler = three_rows()
    sampler.learned(np.array([0, 1, 2]), torch.tensor([0.0, -3.0, 3.0]))
    assert sampler._tree.get(np.arange(3)).tolist() == pytest.approx(
        [EPSILON**0.6, (3 + EPSILON) ** 0.6, (3 + EPSILON) ** 0.6], rel=1e-6
    )


def test_C32_alpha_is_applied_once_however_often_a_priority_is_given() -> None:
    sampler = three_rows()
    for _ in range(3):
        give(sampler, 1.0, 2.0, 4.0)
    assert sampler._tree.get(np.arange(3)).tolist() == pytest.approx([1.0, 2.0**0.6, 4.0**0.6], rel=1e-6)


def test_C32_new_rows_have_the_largest_priority_ever_seen() -> None:
    ring, slot = ReplayRing(SPEC, 50), new_slot()
    sampler = sampler_of(ring)
    ring.insert(slot.fragment(1)[0])
    assert sampler._tree.get(np.arange(3)).tolist() == [1.0, 1.0, 1.0]
    give(sampler, 1.0, 7.0, 2.0)
    give(sampler, 0.5, 0.5, 0.5)
    ring.insert(slot.fragment(1)[0])
    new = ring.sampleable_rows()[-3:]
    assert sampler._tree.get(new).tolist() == pytest.approx([7.0**0.6] * 3, rel=1e-6)


def test_C32_beta_goes_to_1_with_the_budget() -> None:
    sampler = three_rows()
    give(sampler, 1.0, 2.0, 4.0)
    _, half = drawn(sampler, 1000, 0.5)
    _, end = drawn(sampler, 1000, 1.0)
    assert half == pytest.approx({0: 1.0, 1: 2.0 ** (-0.6 * 0.7), 2: 4.0 ** (-0.6 * 0.7)}, rel=1e-6)
    assert end == pytest.approx({0: 1.0, 1: 2.0**-0.6, 2: 4.0**-0.6}, rel=1e-6)


def test_alpha_moves_with_the_budget_for_old_and_new_priorities() -> None:
    sampler = three_rows(Schedule(0.2, 1.0))
    give(sampler, 1.0, 2.0, 4.0)
    assert fits(drawn(sampler, 100_000, 0.0)[0], shares_of(1.0, 2.0**0.2, 4.0**0.2))
    assert fits(drawn(sampler, 100_000, 1.0)[0], shares_of(1.0, 2.0, 4.0))
    give(sampler, 3.0)
    assert fits(drawn(sampler, 100_000, 1.0)[0], shares_of(3.0, 2.0, 4.0))


def test_priorities_follow_the_ring_through_every_change_and_late_ones_are_ignored_and_counted() -> None:
    rng = np.random.default_rng(5)
    ring, slot = ReplayRing(SPEC, 150), new_slot(end=0.2, invalid=0.2)
    sampler = sampler_of(ring)
    late = 0
    held: list[Array] = []
    for number in range(300):
        ring.insert(slot.fragment(int(rng.integers(1, 6)))[0])
        if rng.random() < 0.2:
            ring.void("s", 1, int(rng.integers(3)), max(1, number - 3), 0)
        assert sampler.check_valid() == (True, "")
        if ring.size:
            rows = sampler.draw(16).rows
            assert set(rows.tolist()) <= set(ring.sampleable_rows().tolist())
            held.append(rows)
        if len(held) > 8:
            rows = held.pop(int(rng.integers(len(held))))
            late += len(set(np.flatnonzero(~np.isin(rows, ring.sampleable_rows())).tolist()))
            sampler.learned(rows, torch.from_numpy(rng.normal(size=len(rows))))
            assert sampler.late == late
            assert sampler.check_valid() == (True, "")
    assert late > 0


def test_the_same_generator_state_and_priorities_give_the_same_rows() -> None:
    one, other = three_rows(), three_rows()
    give(one, 1.0, 2.0, 4.0)
    give(other, 1.0, 2.0, 4.0)
    one.draw(100)
    other.load_state_dict(one.state_dict())
    assert one.draw(50).rows.tolist() == other.draw(50).rows.tolist()


def test_the_largest_priority_is_in_the_state_and_a_state_of_uniform_sampling_is_taken() -> None:
    sampler, other = three_rows(), three_rows()
    give(sampler, 9.0, 1.0, 1.0)
    other.load_state_dict(sampler.state_dict())
    assert other.state_dict()["largest"] == pytest.approx(9.0)
    other.load_state_dict({"generator": torch.Generator().get_state()})
    assert other.state_dict()["largest"] == 1.0


def test_nothing_to_sample_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="nothing can be sampled"):
        sampler_of(ReplayRing(SPEC, 50)).draw(1)


def test_alpha_0_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="sampler: uniform"):
        sampler_of(ReplayRing(SPEC, 50), Schedule(0.5, 0.0))


def test_a_ring_that_holds_something_already_cannot_be_watched() -> None:
    ring = ReplayRing(SPEC, 50)
    ring.insert(new_slot().fragment(1)[0])
    with pytest.raises(ValueError, match="from its beginning"):
        sampler_of(ring)
