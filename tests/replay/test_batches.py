"""Batches drawn ahead are those that would be drawn one by one."""

from itertools import count

import numpy as np
import pytest
import torch

from clawq.core import Batch
from clawq.replay.batches import Batches
from clawq.replay.nstep import Gatherer, gather
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.testing.experience import SPEC, Chances, TrueSlot

SIZE, GAMMA, SCALE = 16, 0.97, 3.3


def numbers(batch: Batch) -> list[torch.Tensor]:
    scalars = [batch.action, batch.reward, batch.discount, batch.importance_weight, batch.row, batch.weights_version]
    return [one.clone() for one in (*scalars, *batch.obs.values(), *batch.next_obs.values())]


def new_ring() -> tuple[ReplayRing, TrueSlot]:
    slot = TrueSlot("s", 3, np.random.default_rng(0), count(1), chances=Chances(end=0.2, invalid=0.2))
    ring = ReplayRing(SPEC, 150)
    for _ in range(5):
        ring.insert(slot.fragment(5)[0])
    return ring, slot


def new_batches(ring: ReplayRing, n: int, most: int | None) -> tuple[Batches, UniformSampler]:
    sampler = UniformSampler(ring, torch.Generator().manual_seed(1))
    return Batches(ring, sampler, SIZE, lambda: Gatherer(ring, SIZE, Returns(n, GAMMA, SCALE)), most), sampler


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("most", [None, 1, 3, 4])
def test_drawn_ahead_or_one_by_one_batches_and_states_are_the_same(n: int, most: int | None) -> None:
    ring, slot = new_ring()
    batches, sampler = new_batches(ring, n, most)
    plain = UniformSampler(ring, torch.Generator().manual_seed(1))
    schedule = np.random.default_rng(2)
    for number in range(200):
        batch = batches.next()
        expected = gather(ring, torch.from_numpy(plain.positions(SIZE)), Returns(n, GAMMA, SCALE))
        for one, other in zip(numbers(batch), numbers(expected), strict=True):
            assert torch.equal(one, other)
        if schedule.random() < 0.15:
            ring.insert(slot.fragment(5)[0])
        if schedule.random() < 0.05:
            ring.void("s", 1, 0, number // 8, 0)
        if schedule.random() < 0.1:
            batches.rewind()
            assert torch.equal(sampler.state_dict()["generator"], plain.state_dict()["generator"])


def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for() -> None:
    ring, slot = new_ring()
    batches, _ = new_batches(ring, 1, 4)
    for _ in range(20):
        batch = batches.next()
        before = numbers(batch)
        ring.insert(slot.fragment(5)[0])
        assert all(map(torch.equal, before, numbers(batch)))


def test_nothing_to_sample_is_an_error_at_once() -> None:
    batches, _ = new_batches(ReplayRing(SPEC, 150), 1, 4)
    with pytest.raises(ValueError, match="nothing can be sampled"):
        batches.next()
