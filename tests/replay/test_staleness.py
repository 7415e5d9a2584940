"""The staleness contract: who is admitted, what is masked, what is weighed less, and what is counted of it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from clawq.errors import ConfigError
from clawq.replay.batches import Batches
from clawq.replay.nstep import Gatherer, gather
from clawq.replay.prioritized import PrioritizedSampler
from clawq.replay.rate_limiter import RateLimiter, Unlimited
from clawq.replay.returns import Returns
from clawq.replay.ring import VERSION, ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.replay.sequences import SequenceGatherer, Sequences
from clawq.replay.staleness import Ageing, StalenessRule
from clawq.testing.experience import SPEC, Chances, TrueSlot

STEPS, ENVS = 5, 4


def returns(n: int = 1) -> Returns:
    return Returns(n, 0.9)


@pytest.mark.parametrize(
    ("hard", "fragment", "learner", "admitted"),
    [
        pytest.param(None, 0, 10**6, True, id="any_lag"),
        pytest.param(3, 7, 10, True, id="at_the_limit"),
        pytest.param(3, 6, 10, False, id="one_over"),
        pytest.param(3, 12, 10, True, id="newer_than_a_resumed_learner"),
        pytest.param(3, 0, 3, True, id="untrained_but_near"),
        pytest.param(3, 0, 4, False, id="untrained_and_far"),
        pytest.param(0, 4, 4, True, id="of_this_very_version"),
        pytest.param(0, 3, 4, False, id="of_the_version_before"),
    ],
)
def test_fragments_are_admitted_up_to_the_lag(hard: int | None, fragment: int, learner: int, admitted: bool) -> None:
    assert StalenessRule(hard=hard).admit(fragment, learner) is admitted


def test_a_rule_that_reweights_admits_everything() -> None:
    rule = StalenessRule(hard=1, on_stale="reweight")
    assert rule.admit(0, 10**6)
    assert rule.oldest(10**6) is None


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [({"hard": -1}, "hard: -1"), ({"target": 0}, "target: 0"), ({"decay": 1.0}, "decay: 1.0; must be between 0 and 1")],
)
def test_impossible_numbers_are_refused(numbers: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        StalenessRule(**numbers)  # type: ignore[arg-type]


def ring_of(versions: Sequence[int], chances: Chances | None = None) -> ReplayRing:
    """A ring with one fragment of each of these versions, of one slot, in their order."""
    ring = ReplayRing(SPEC, 1000)
    return filled(ring, versions, chances)


def filled(ring: ReplayRing, versions: Sequence[int], chances: Chances | None = None) -> ReplayRing:
    slot = TrueSlot("s", ENVS, np.random.default_rng(3), count(1), chances=chances or Chances(0.1, 0.1))
    for version in versions:
        ring.insert(slot.fragment(STEPS, version)[0])
        assert_valid(ring)
    return ring


def assert_valid(ring: ReplayRing) -> None:
    ok, why = ring.check_valid()
    assert ok, why


def versions_in(ring: ReplayRing) -> set[int]:
    """Versions of the rows that can be sampled."""
    return set(ring.all_links[np.flatnonzero(ring.valid_slots), VERSION].tolist())


def test_rows_that_grow_older_than_hard_are_masked_and_counted_and_no_others() -> None:
    ring = ring_of([1, 2, 5, 3, 6])
    before = ring.size
    ageing = Ageing(ring, Unlimited(1), StalenessRule(hard=3))
    assert ageing.advance(4) == 0
    assert versions_in(ring) == {1, 2, 3, 5, 6}
    masked = ageing.advance(6)
    assert_valid(ring)
    assert versions_in(ring) == {3, 5, 6}
    assert masked == before - ring.size == ageing.expired > 0
    assert ageing.advance(6) == 0
    ageing.advance(9)
    assert_valid(ring)
    assert versions_in(ring) == {6}
    assert ageing.expired == before - ring.size == ageing.metrics()["expired_rows"]


def test_masked_rows_are_never_drawn_whatever_the_sampler() -> None:
    for prioritized in (False, True):
        ring = ReplayRing(SPEC, 1000)
        generator = torch.Generator().manual_seed(0)
        sampler = PrioritizedSampler(ring, generator) if prioritized else UniformSampler(ring, generator)
        filled(ring, range(1, 9))
        ageing = Ageing(ring, Unlimited(1), StalenessRule(hard=2))
        batches = Batches(ring, sampler, 64, partial(Gatherer, ring, 64, returns()))
        batches.next()
        ageing.advance(8)
        for _ in range(20):
            batch = batches.next()
            assert batch.made_by is not None
            assert batch.made_by.min() >= 6
            assert (batch.weights_version.numpy() == batch.made_by).all()
        if isinstance(sampler, PrioritizedSampler):
            assert sampler.check_valid() == (True, "")


def test_a_return_that_ran_over_a_masked_row_ends_before_it_and_is_still_exact() -> None:
    ring = ring_of([2, 1], chances=Chances(0.0, 0.0))
    first = ring.sampleable_rows()[: STEPS * ENVS]
    Ageing(ring, Unlimited(1), StalenessRule(hard=1)).advance(3)
    batch = gather(ring, torch.from_numpy(first[-ENVS:]), returns(3))
    np.testing.assert_allclose(batch.discount.numpy(), 0.9, rtol=1e-6)


def test_a_ring_in_which_everything_grew_old_is_filled_anew_instead_of_both_sides_waiting() -> None:
    limiter = RateLimiter(1.0, 10, 40, batch_size=16, largest_insert=20)
    ring = ring_of([1, 1])
    limiter.inserted(ring.size)
    while limiter.can_insert(20):
        limiter.inserted(20)
    ageing = Ageing(ring, limiter, StalenessRule(hard=1))
    ageing.advance(3)
    assert ring.size == 0
    assert limiter.can_insert(20)
    assert not limiter.can_sample(16)
    limiter.inserted(20)
    assert limiter.can_sample(16)
    assert limiter.check_valid() == (True, "")


def test_reweighting_multiplies_the_importance_weight_once_for_each_version_beyond_hard() -> None:
    ring = ring_of([1, 4, 6, 8])
    ageing = Ageing(ring, Unlimited(1), StalenessRule(hard=2, on_stale="reweight", decay=0.5))
    assert ageing.advance(8) == 0
    batch = gather(ring, torch.from_numpy(ring.sampleable_rows()), returns())
    given = torch.linspace(0.5, 1.0, len(batch.made_by))
    weighed = ageing.weigh(replace(batch, importance_weight=given), 8)
    factor = {1: 0.5**5, 4: 0.5**2, 6: 1.0, 8: 1.0}
    expected = given.numpy() * np.array([factor[version] for version in batch.made_by.tolist()])
    np.testing.assert_allclose(weighed.importance_weight.numpy(), expected, rtol=1e-6)
    # The gatherer uses its memory again: nothing may be multiplied in place.
    assert (batch.importance_weight == 1).all()
    metrics = ageing.metrics()
    assert metrics["stale_share"] == pytest.approx(np.mean(batch.made_by < 6))
    assert metrics["lag_at_use/max"] == 7
    assert metrics["lag_at_use/mean"] == pytest.approx(np.mean(8 - batch.made_by))


def test_lag_is_measured_when_the_gradient_uses_it_not_when_the_row_came() -> None:
    ring = ring_of([4])
    ageing = Ageing(ring, Unlimited(1), StalenessRule())
    batch = gather(ring, torch.from_numpy(ring.sampleable_rows()), returns())
    assert ageing.weigh(batch, 5) is batch
    assert ageing.metrics()["lag_at_use/max"] == 1
    ageing.weigh(batch, 25)
    assert ageing.metrics()["lag_at_use/mean"] == 11
    assert ageing.metrics()["stale_share"] == 0


def test_lag_at_use_is_that_of_the_steps_of_sequences_that_are_learned_from() -> None:
    ring = ring_of([1, 4, 8], chances=Chances(0.0, 0.0))
    ageing = Ageing(ring, Unlimited(1), StalenessRule(hard=5))
    # From the last but one step of version 1 on: one step of that to warm up, one more, and a whole fragment of 4.
    first = ring.sampleable_rows()[(STEPS - 2) * ENVS : (STEPS - 1) * ENVS]
    batch = SequenceGatherer(ring, Sequences(2 + STEPS, 1, 0.9)).gather(first)
    assert ageing.weigh(batch, 8) is batch
    metrics = ageing.metrics()
    assert metrics["lag_at_use/mean"] == pytest.approx((7 + STEPS * 4) / (1 + STEPS))
    assert metrics["lag_at_use/max"] == 7
    assert metrics["stale_share"] == pytest.approx(1 / (1 + STEPS))


def test_another_rule_is_followed_at_once() -> None:
    ring = ring_of(range(1, 9))
    ageing = Ageing(ring, Unlimited(1), StalenessRule())
    assert ageing.advance(8) == 0
    ageing.rule = StalenessRule(hard=1)
    assert versions_in(ring) == {7, 8}
