"""Consume-once: what was drawn, and in which order, against a list that is kept beside the ring."""

from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.replay.fifo import FifoSampler
from clawq.replay.rate_limiter import RateLimiter
from clawq.replay.ring import ReplayRing
from clawq.testing.experience import SPEC, Chances, TrueSlot, ids_of
from clawq.types import Array, Fragment


def new(capacity: int = 150, shuffle: bool = False, slots: int = 1) -> tuple[ReplayRing, FifoSampler, list[TrueSlot]]:
    ring = ReplayRing(SPEC, capacity)
    sampler = FifoSampler(ring, torch.Generator().manual_seed(0), shuffle)
    ids, rng = count(1), np.random.default_rng(0)
    return ring, sampler, [TrueSlot(name, 3, rng, ids, chances=Chances(0.2, 0.2)) for name in "abc"[:slots]]


def ids_at(ring: ReplayRing, rows: Array) -> list[int]:
    found: list[int] = ids_of({key: one.numpy() for key, one in ring.obs_at(torch.from_numpy(rows)).items()}).tolist()
    return found


def valid_ids(fragment: Fragment) -> list[int]:
    """Ids of the obs of the valid steps, time first, then env."""
    shown: list[int] = fragment.obs["state"][:-1][fragment.valid][:, 0].astype(int).tolist()
    return shown


ops = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "insert", "draw", "draw", "void"]), st.integers(0, 2**16)),
    max_size=60,
)


@given(ops, st.integers(60, 200), st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_row_comes_once_oldest_first_and_what_is_overwritten_or_voided_before_is_counted(
    program: list[tuple[str, int]], capacity: int, shuffle: bool
) -> None:
    ring, sampler, slots = new(capacity, shuffle, slots=3)
    waiting: list[int] = []
    made = drawn = 0
    for name, number in program:
        slot = slots[number % 3]
        if name == "insert":
            fragment = slot.fragment(1 + number % 4)[0]
            ring.insert(fragment)
            waiting += valid_ids(fragment)
            made += len(valid_ids(fragment))
        elif name == "void":
            ring.void(slot.name, 1, number % 3, max(1, slot.seq - number % 4), number % 2)
        live = set(ids_at(ring, ring.sampleable_rows()))
        waiting = [one for one in waiting if one in live]
        if name == "draw":
            size = 1 + number % 12
            assert sampler.ready(size) == (len(waiting) >= size)
            if not sampler.ready(size):
                with pytest.raises(ValueError, match="wait"):
                    sampler.draw(size)
                continue
            got = ids_at(ring, sampler.draw(size).rows)
            drawn += size
            if shuffle:
                assert len(set(got)) == size
                assert set(got) <= set(waiting)
            else:
                assert got == waiting[:size]
            waiting = [one for one in waiting if one not in set(got)]
        assert sampler.waiting == len(waiting)
        assert sampler.wasted == made - drawn - len(waiting)


def test_shuffling_draws_from_all_that_wait_alike() -> None:
    times: dict[int, int] = {}
    generator = torch.Generator().manual_seed(0)
    ring = ReplayRing(SPEC, 60)
    sampler = FifoSampler(ring, generator, shuffle=True)
    ring.insert(TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0)).fragment(4)[0])
    everything = sampler.state_dict()
    for _ in range(2000):
        sampler.load_state_dict({**everything, "generator": generator.get_state()})
        for row in sampler.draw(3).rows.tolist():
            times[row] = times.get(row, 0) + 1
    share = 2000 * 3 / 8
    assert len(times) == 8
    assert sum((number - share) ** 2 / share for number in times.values()) < 7 + 5 * 14**0.5


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_a_sampler_that_goes_on_from_a_state_draws_what_it_would_have_drawn(shuffle: bool, missing: bool) -> None:
    ring, sampler, [slot] = new(400, shuffle)
    other_ring, other, _ = new(400, shuffle)
    for _ in range(12):
        fragment = slot.fragment(4)[0]
        ring.insert(fragment)
        other_ring.insert(fragment)
    first = [one for _ in range(5) for one in ids_at(ring, sampler.draw(8).rows)]
    state = sampler.state_dict()
    lost = 0
    if missing:
        # What could not be brought back, some of which was drawn before
        gone = ring.sampleable_rows()[30:60]
        lost = int(np.count_nonzero(~np.isin(ids_at(ring, gone), first)))
        other_ring.mask(gone % 400)
    waiting = sampler.waiting
    other.load_state_dict(state)
    assert other.waiting == waiting - lost
    assert other.wasted == lost
    expected = [one for _ in range(3) for one in ids_at(ring, sampler.draw(8).rows)]
    drawn = [one for _ in range(3) for one in ids_at(other_ring, other.draw(8).rows)]
    assert not set(drawn) & set(first)
    if not missing:
        assert drawn == expected


def test_a_run_that_was_sampled_otherwise_begins_with_what_is_new() -> None:
    ring, sampler, [slot] = new()
    ring.insert(slot.fragment(4)[0])
    sampler.load_state_dict({"generator": torch.Generator().get_state()})
    assert (sampler.waiting, sampler.wasted) == (0, 0)
    fresh = slot.fragment(4)[0]
    ring.insert(fresh)
    assert ids_at(ring, sampler.draw(2).rows) == valid_ids(fresh)[:2]


def test_with_one_sample_for_each_insert_nothing_is_wasted_and_voided_rows_block_nobody() -> None:
    batch, envs, rng = 16, 3, np.random.default_rng(1)
    limiter = RateLimiter(1.0, batch, 40.0, batch, 4 * envs)
    ring = ReplayRing(SPEC, 200)
    sampler = FifoSampler(ring, torch.Generator(), lost=limiter.excuse)
    slot = TrueSlot("s", envs, rng, count(1), chances=Chances(0.1, 0.1))
    voided = blocked = 0
    for turn in range(500):
        fragment = slot.fragment(4)[0]
        steps = int(fragment.valid.sum())
        while not limiter.can_insert(steps):
            # The inserting side waits: then the sampling side can move
            blocked += 1
            assert limiter.can_sample(batch)
            assert sampler.ready(batch)
            sampler.draw(batch)
            limiter.sampled(batch)
        ring.insert(fragment)
        limiter.inserted(steps)
        if turn % 5 == 0:
            voided += ring.void("s", 1, turn % envs, max(1, slot.seq - 2), 0)
    assert blocked > 200
    # Voided rows were lost before they were drawn, or had been drawn; nothing was overwritten.
    assert 0 < sampler.wasted <= voided
    assert limiter.inserts == limiter.samples + sampler.wasted + sampler.waiting
