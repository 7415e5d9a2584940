"""Uniform sampling: every sampleable row alike, and nothing else."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.testing.experience import SPEC, Chances, TrueSlot


def filled(invalid: float, fragments: int = 12) -> ReplayRing:
    slot = TrueSlot("s", 3, np.random.default_rng(0), count(1), chances=Chances(end=0.2, invalid=invalid))
    ring = ReplayRing(SPEC, 150)
    for _ in range(fragments):
        ring.insert(slot.fragment(5)[0])
        assert ring.check_valid() == (True, "")
    return ring


def sampler(ring: ReplayRing, seed: int = 0) -> UniformSampler:
    return UniformSampler(ring, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("invalid", [0.0, 0.3, 0.97])
def test_each_sampleable_row_comes_equally_often_and_no_other_row_comes(invalid: float) -> None:
    # 0.97 leaves so few rows that the sampler lists them instead of rejecting.
    ring = filled(invalid)
    rows = ring.sampleable_rows()
    assert (len(rows) / 150 < 1 / 32) == (invalid == 0.97)
    each = -(-100_000 // len(rows))
    drawn = sampler(ring).positions(each * len(rows))
    assert drawn.dtype == np.int64
    found, times = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(found, rows)
    # χ² with k degrees of freedom: mean k, variance 2k; 5 sigma.
    chi2 = float(((times - each) ** 2 / each).sum())
    freedom = len(rows) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_exactly_as_many_rows_come_as_were_asked_for() -> None:
    ring = filled(0.5)
    for size in (1, 2, 7, 256):
        assert len(sampler(ring).positions(size)) == size


def test_rows_that_were_voided_come_no_more() -> None:
    ring = filled(0.0)
    ring.void("s", 1, 1, 1, 0)
    left = set(ring.sampleable_rows().tolist())
    assert set(sampler(ring).positions(5000).tolist()) == left


def test_the_same_generator_state_gives_the_same_rows() -> None:
    ring = filled(0.1)
    one = sampler(ring, 3)
    one.positions(10)
    state = one.state_dict()
    expected = one.positions(20)
    other = sampler(ring, 4)
    other.load_state_dict(state)
    assert np.array_equal(other.positions(20), expected)
    assert not np.array_equal(other.positions(20), expected)


def test_an_empty_ring_and_one_without_valid_rows_say_so_instead_of_looping() -> None:
    slot = TrueSlot("s", 3, np.random.default_rng(0), count(1))
    ring = ReplayRing(SPEC, 150)
    with pytest.raises(ValueError, match="no valid env step"):
        sampler(ring).positions(1)
    fragment = slot.fragment(5)[0]
    ring.insert(replace(fragment, valid=np.zeros_like(fragment.valid)))
    with pytest.raises(ValueError, match="no valid env step"):
        sampler(ring).positions(1)
