"""Sequences against the linked lists of the truth: never a step that did not follow the one before it."""

from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.core import SequenceBatch
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.replay.sequences import SequenceGatherer, Sequences
from clawq.specs import ArraySpec
from clawq.testing.experience import SPEC, Chances, TrueSlot, TrueStep, Truth, ids_of
from clawq.types import Array, Voided

GAMMA, SCALE = 0.9, 2.0


def true_sequence(step: TrueStep, length: int) -> list[TrueStep]:
    """Up to `length` steps from this one on, as far as they followed one another and are valid."""
    steps = [step]
    while len(steps) < length and (after := steps[-1].following) is not None and after.valid:
        steps.append(after)
    return steps


def shown(obs: dict[str, torch.Tensor]) -> Array:
    """Ids of obs [L, B]."""
    flat = {key: one.flatten(0, 1).numpy() for key, one in obs.items()}
    return ids_of(flat).reshape(next(iter(obs.values())).shape[:2])


def assert_true(ring: ReplayRing, truth: Truth, length: int, burn_in: int) -> SequenceBatch:
    """The sequence from every row that can be sampled is the one that happened."""
    rows = ring.sampleable_rows()
    batch = SequenceGatherer(ring, Sequences(length, burn_in, GAMMA, SCALE)).gather(rows)
    before, after = shown(dict(batch.obs)), shown(dict(batch.next_obs))
    assert batch.row.tolist() == rows.tolist()
    assert before.shape == (length, len(rows))
    for column, first in enumerate(before[0].tolist()):
        steps = true_sequence(truth.steps[first], length)
        real = len(steps)
        assert int(batch.steps[column]) == real
        assert before[:real, column].tolist() == [one.obs for one in steps]
        assert after[:real, column].tolist() == [one.next_obs for one in steps]
        # Padding repeats the last obs, and all else is 0
        assert set(before[real:, column].tolist()) | set(after[real:, column].tolist()) <= {steps[-1].next_obs}
        padding = [0.0] * (length - real)
        np.testing.assert_allclose(batch.reward[:, column], [SCALE * one.reward for one in steps] + padding, rtol=1e-6)
        discounts = [GAMMA * (not one.terminated) for one in steps]
        np.testing.assert_allclose(batch.discount[:, column], discounts + padding, rtol=1e-6)
        np.testing.assert_array_equal(batch.action[:real, column], np.stack([one.action for one in steps]))
        assert not batch.action[real:, column].any()
        versions = [one.weights_version for one in steps]
        assert batch.weights_version[:, column].tolist() == [*versions, *[0] * (length - real)]
        assert batch.mask[:, column].tolist() == [burn_in <= step < real for step in range(length)]
    return batch


events = st.tuples(
    st.integers(0, 2), st.integers(1, 5), st.sampled_from(["", "", "", "lost", "epoch", "restart", "void", "mask"])
)


@given(st.integers(0, 2**16), st.booleans(), st.integers(80, 200), st.integers(1, 9), st.lists(events, max_size=40))
@settings(max_examples=30, deadline=None)
def test_a_sequence_is_what_happened_to_one_env_and_never_crosses_an_end_a_gap_or_an_actor(
    seed: int, next_step: bool, capacity: int, length: int, program: list[tuple[int, int, str]]
) -> None:
    ids, rng = count(1), np.random.default_rng(seed)
    slots = [TrueSlot(name, 2, rng, ids, next_step) for name in "abc"]
    ring, truth = ReplayRing(SPEC, capacity), Truth()
    for version, (number, steps, event) in enumerate(program):
        slot = slots[number]
        voided: tuple[Voided, ...] = ()
        if event == "lost":
            slot.fragment(steps)
        elif event == "epoch":
            slot.begin_epoch()
        elif event == "restart":
            slot.restart([0])
        elif event == "void" and slot.seq:
            voided = (Voided(1, max(1, slot.seq - 1), 1),)
        elif event == "mask" and ring.size:
            row = ring.sampleable_rows()[[version % ring.size]]
            [shown_id] = ids_of({key: one.numpy() for key, one in ring.obs_at(torch.from_numpy(row)).items()})
            truth.steps[int(shown_id)].valid = False
            ring.mask(row % capacity)
        fragment, told = slot.fragment(steps, version, voided)
        truth.insert(fragment, told)
        ring.insert(fragment)
        if ring.size and (version % 3 == 0 or version == len(program) - 1):
            assert_true(ring, truth, length, burn_in=version % length)


def test_a_sequence_goes_on_over_the_seams_of_interleaved_slots() -> None:
    ids, rng = count(1), np.random.default_rng(0)
    slots = [TrueSlot(name, 2, rng, ids, chances=Chances(0.0, 0.0)) for name in "ab"]
    ring, truth = ReplayRing(SPEC, 60), Truth()
    for turn in range(40):
        fragment, told = slots[turn % 2].fragment(2, turn)
        truth.insert(fragment, told)
        ring.insert(fragment)
    batch = assert_true(ring, truth, 8, 0)
    assert max(batch.steps.tolist()) == 8
    # Of four fragments, with those of the other slot between them
    longest = int(batch.steps.argmax())
    assert len(set(batch.weights_version[:, longest].tolist())) in (4, 5)


def test_starts_are_uniform_over_the_rows_that_can_be_sampled() -> None:
    slot = TrueSlot("s", 3, np.random.default_rng(0), count(1), chances=Chances(0.2, 0.2))
    ring = ReplayRing(SPEC, 60)
    for _ in range(10):
        ring.insert(slot.fragment(5)[0])
    rows = ring.sampleable_rows()
    gatherer = SequenceGatherer(ring, Sequences(3, 0, GAMMA))
    sampler = UniformSampler(ring, torch.Generator().manual_seed(0))
    times = Counter(gatherer.gather(sampler.draw(500 * len(rows)).rows).row.tolist())
    assert set(times) == set(rows.tolist())
    freedom = len(rows) - 1
    assert sum((number - 500) ** 2 / 500 for number in times.values()) < freedom + 5 * (2 * freedom) ** 0.5


def test_what_lies_behind_the_end_of_a_sequence_does_not_get_in() -> None:
    slot = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    ring = ReplayRing(SPEC, 20, extras={"log_prob": ArraySpec(())})
    fragment = slot.fragment(3)[0]
    fragment.extras["log_prob"] = np.ones((3, 1), np.float32)
    ring.packed.tensor.fill_(float("nan"))
    ring.insert(fragment)
    ring.packed.tensor[4:] = float("nan")
    batch = SequenceGatherer(ring, Sequences(6, 1, GAMMA)).gather(np.array([0, 2]))
    for one in (batch.action, batch.reward, batch.discount, batch.extras["log_prob"], *batch.obs.values()):
        assert bool(torch.isfinite(one.float()).all())
    assert batch.extras["log_prob"].sum(0).tolist() == [3, 1]
    assert batch.mask.sum(0).tolist() == [2, 0]
    assert batch.importance_weight.tolist() == [1, 1]


@pytest.mark.gpu
def test_sequences_on_a_gpu_are_those_on_the_cpu() -> None:
    slot = TrueSlot("s", 3, np.random.default_rng(0), count(1))
    rings = [ReplayRing(SPEC, 200, device) for device in ("cpu", "cuda")]
    for _ in range(20):
        fragment = slot.fragment(5)[0]
        for ring in rings:
            ring.insert(fragment)
    rows = rings[0].sampleable_rows()
    one, other = (SequenceGatherer(ring, Sequences(7, 2, GAMMA)).gather(rows) for ring in rings)
    for name in ("action", "reward", "discount", "mask", "steps", "weights_version", "row"):
        assert torch.equal(getattr(one, name), getattr(other, name).cpu())
    for key in SPEC.obs:
        assert torch.equal(one.obs[key], other.obs[key].cpu())
        assert torch.equal(one.next_obs[key], other.next_obs[key].cpu())
