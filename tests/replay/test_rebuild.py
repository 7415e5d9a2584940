"""A ring made again from its layout, its traces and the fragments is the ring that was, to the last bit."""

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from learners import assert_identical

from clawq.core import Entry
from clawq.errors import CheckpointInvalid
from clawq.replay.layout import Layout
from clawq.replay.prioritized import PrioritizedSampler
from clawq.replay.rebuild import Rebuild
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.replay.traces import Traces
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot, Truth, ids_of
from clawq.transport.codec import decode, encode
from clawq.types import Fragment, Voided

EXAMINER = Examiner(decode, FragmentCheck(SPEC, RUN))
CAPACITY = 150


class World:
    """Actors, what they sent, and a ring that took it."""

    def __init__(self, seed: int, slots: int) -> None:
        self.rng = np.random.default_rng(seed)
        ids = count(1)
        self.slots = [
            TrueSlot(f"w-{k}", 2, self.rng, ids, next_step=bool(k % 2), chances=Chances(0.15, 0.1))
            for k in range(slots)
        ]
        self.ring = ReplayRing(SPEC, CAPACITY)
        self.truth = Truth()
        self.entries: list[Entry] = []

    def make(self) -> Fragment:
        slot = self.slots[self.rng.integers(len(self.slots))]
        if self.rng.random() < 0.05:
            slot.begin_epoch()
        voided: tuple[Voided, ...] = ()
        if slot.seq and self.rng.random() < 0.2:
            voided = (Voided(int(self.rng.integers(2)), max(1, slot.seq - int(self.rng.integers(3))), 1),)
        made, told = slot.fragment(int(self.rng.integers(1, 7)), int(self.rng.integers(9)), voided)
        self.truth.insert(made, told)
        meta = made.meta
        self.entries.append(Entry(meta.slot, meta.epoch, meta.seq, bytes(encode(made))))
        return made

    def insert(self, fragments: int) -> None:
        for _ in range(fragments):
            self.ring.insert(self.make())
            # As at a checkpoint: what is remembered for the next one must not show in it.
            self.ring.layout()
            if self.rng.random() < 0.1:
                rows = self.ring.sampleable_rows()
                self.ring.mask(np.unique(self.rng.choice(rows, min(3, len(rows)))) % CAPACITY)

    def saved(self) -> tuple[Layout, Traces]:
        """Through a checkpoint and back."""
        layout = self.ring.layout()
        traces = Traces.of(self.ring, layout)
        return Layout.of_state(layout.state_dict()), Traces.of_state(traces.state_dict())


def owned(ring: ReplayRing) -> Any:
    """Positions of all rows that belong to a fragment (what is before them are obs that nothing leads to)."""
    placed = ring.layout().placed
    return np.arange(max(ring.oldest, placed[0].start if placed else ring.head), ring.head)


def assert_same(one: ReplayRing, other: ReplayRing) -> None:
    assert one.state == other.state
    assert (one.oldest, one.newest) == (other.oldest, other.newest)
    slots = owned(one) % one.capacity
    for ours, theirs in zip(one.columns, other.columns, strict=True):
        np.testing.assert_array_equal(ours.numpy()[slots], theirs.numpy()[slots])
    first, second = one.layout(), other.layout()
    # Names too: of a ring that goes on since long ago as of one that was just made again.
    assert_identical(first.state_dict(), second.state_dict())
    for ours_, theirs_ in zip(first.placed, second.placed, strict=True):
        assert sorted(ours_.last_obs) == sorted(theirs_.last_obs)


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_comes_back_to_the_last_bit_and_goes_on_alike(seed: int) -> None:
    world = World(seed, slots=1 + seed % 4)
    world.insert(int(world.rng.integers(5, 120)))
    ring = ReplayRing(SPEC, CAPACITY)
    rebuild = Rebuild(ring, *world.saved())
    # In any order, with entries that are not in the ring any more among them.
    world.rng.shuffle(world.entries)
    assert rebuild.put_back(world.entries, EXAMINER) == len(world.ring.layout().placed)
    assert rebuild.finish() == []
    assert ring.check_valid() == (True, "")
    assert_same(world.ring, ring)
    first, second = (UniformSampler(one, torch.Generator().manual_seed(1)).draw(64).rows for one in (world.ring, ring))
    np.testing.assert_array_equal(first, second)
    for _ in range(40):
        made = world.make()
        assert world.ring.insert(made) == ring.insert(made)
        assert_same(world.ring, ring)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_missing_is_counted_and_never_shows_as_wrong_rows(seed: int) -> None:
    world = World(seed, slots=1 + seed % 3)
    world.insert(60)
    layout, traces = world.saved()
    ring = ReplayRing(SPEC, CAPACITY)
    rebuild = Rebuild(ring, layout, traces)
    lost = {(one.slot, one.epoch, one.seq) for one in layout.placed if world.rng.random() < 0.3}
    kept = [one for one in world.entries if (one.slot, one.epoch, one.seq) not in lost]
    # One is there, but damaged.
    index = int(world.rng.integers(len(kept)))
    kept[index] = replace(kept[index], payload=kept[index].payload[:-1] + b"x")
    rebuild.put_back(kept, EXAMINER)
    missing = rebuild.finish()
    assert {(one.slot, one.epoch, one.seq) for one in missing} >= lost
    assert ring.check_valid() == (True, "")
    assert ring.size <= layout.size - sum(one.steps for one in missing)
    world.ring = ring
    for _ in range(30):
        ring.insert(world.make())
        assert ring.check_valid() == (True, "")
        rows = torch.from_numpy(ring.sampleable_rows())
        for obs in ids_of({key: one.numpy() for key, one in ring.obs_at(rows).items()}):
            assert world.truth.steps[int(obs)].valid
        hop = torch.from_numpy(ring.links_of(rows.numpy() % CAPACITY)[:, 0]).long()
        after = ids_of({key: one.numpy() for key, one in ring.obs_at(rows + hop).items()})
        before = ids_of({key: one.numpy() for key, one in ring.obs_at(rows).items()})
        assert [world.truth.steps[int(obs)].next_obs for obs in before] == after.tolist()


@pytest.mark.parametrize("capacity", [60, 400])
def test_another_capacity_keeps_what_fits(capacity: int) -> None:
    world = World(3, slots=3)
    world.insert(70)
    ring = ReplayRing(SPEC, capacity)
    rebuild = Rebuild(ring, *world.saved())
    rebuild.put_back(world.entries, EXAMINER)
    assert rebuild.finish() == []
    assert ring.check_valid() == (True, "")
    both = np.arange(max(ring.oldest, world.ring.oldest), ring.head)
    np.testing.assert_array_equal(ring.valid_slots[both % capacity], world.ring.valid_slots[both % CAPACITY])
    rows = ring.sampleable_rows()
    shown = [one.obs_at(torch.from_numpy(rows)) for one in (ring, world.ring)]
    for key in SPEC.obs:
        assert torch.equal(shown[0][key], shown[1][key])
    for _ in range(40):
        ring.insert(world.make())
        assert ring.check_valid() == (True, "")


def test_priorities_come_back_to_the_last_bit() -> None:
    worlds = [World(5, slots=2), World(5, slots=2)]
    samplers = []
    for world in worlds:
        samplers.append(PrioritizedSampler(world.ring, torch.Generator().manual_seed(3)))
        world.insert(30)
    rng = np.random.default_rng(0)

    def learn(sampler: PrioritizedSampler, error: Any) -> Any:
        draw = sampler.draw(16, 0.3)
        sampler.learned(draw.rows, torch.from_numpy(error))
        return draw.rows

    for _ in range(20):
        error = rng.normal(size=16)
        np.testing.assert_array_equal(learn(samplers[0], error), learn(samplers[1], error))
    world = worlds[0]
    ring = ReplayRing(SPEC, CAPACITY)
    sampler = PrioritizedSampler(ring, torch.Generator())
    rebuild = Rebuild(ring, *world.saved())
    rebuild.put_back(world.entries, EXAMINER)
    rebuild.finish()
    sampler.load_state_dict(samplers[0].state_dict())
    assert sampler.check_valid() == (True, "")
    for _ in range(20):
        error = rng.normal(size=16)
        np.testing.assert_array_equal(learn(samplers[1], error), learn(sampler, error))
        made = worlds[1].make()
        worlds[1].ring.insert(made)
        ring.insert(made)


def test_priorities_of_a_ring_of_another_capacity_go_with_their_rows() -> None:
    world = World(5, slots=2)
    first = PrioritizedSampler(world.ring, torch.Generator().manual_seed(3))
    world.insert(50)
    for _ in range(20):
        draw = first.draw(16, 0.3)
        first.learned(draw.rows, torch.rand(16))
    ring = ReplayRing(SPEC, 90)
    second = PrioritizedSampler(ring, torch.Generator())
    rebuild = Rebuild(ring, *world.saved())
    rebuild.put_back(world.entries, EXAMINER)
    rebuild.finish()
    second.load_state_dict(first.state_dict())
    assert second.check_valid() == (True, "")
    rows = ring.sampleable_rows()
    np.testing.assert_array_equal(second._tree.get(rows % 90), first._tree.get(rows % CAPACITY))


@pytest.mark.parametrize("spoil", [{"valid": b"nothing"}, {"capacity": "x"}, {"hops": None}])
def test_traces_that_cannot_be_read_are_refused(spoil: dict[str, Any]) -> None:
    world = World(0, slots=1)
    world.insert(3)
    state = Traces.of(world.ring, world.ring.layout()).state_dict() | spoil
    with pytest.raises(CheckpointInvalid, match="traces of the replay ring cannot be read"):
        Traces.of_state(state)


def test_an_empty_ring_comes_back_empty() -> None:
    world = World(0, slots=1)
    ring = ReplayRing(SPEC, CAPACITY)
    rebuild = Rebuild(ring, *world.saved())
    assert rebuild.put_back([], EXAMINER) == 0
    assert rebuild.finish() == []
    assert ring.size == ring.head == 0
