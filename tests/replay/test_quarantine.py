"""Quarantine rules: what they cover, what is refused, and that no sampler gives a masked row."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clawq.errors import UserError
from clawq.replay.fifo import FifoSampler
from clawq.replay.nstep import gather
from clawq.replay.prioritized import PrioritizedSampler
from clawq.replay.quarantine import Rule
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import Sampler, UniformSampler
from clawq.replay.sequences import SequenceGatherer, Sequences
from clawq.testing.experience import SPEC, Chances, TrueSlot, Truth, ids_of

#: Two workers, three slots, two epochs, four fragments each, a second apart.
ORIGINS = [
    SimpleNamespace(worker=f"w{slot[0]}", slot=slot, epoch=epoch, seq=seq, created_ms=1000 * (4 * epoch + seq))
    for slot in ("a0", "a1", "b0")
    for epoch in (1, 2)
    for seq in (1, 2, 3, 4)
]


@pytest.mark.parametrize(
    ("facts", "covered"),
    [
        ({"worker": "wa"}, lambda one: one.slot in ("a0", "a1")),
        ({"slot": "a1"}, lambda one: one.slot == "a1"),
        ({"slot": "a1", "epoch": 2}, lambda one: one.slot == "a1" and one.epoch == 2),
        ({"slot": "a1", "epoch": 2, "first_seq": 2, "last_seq": 3},
         lambda one: (one.slot, one.epoch) == ("a1", 2) and 1 < one.seq < 4),
        ({"slot": "a1", "epoch": 2, "last_seq": 3}, lambda one: (one.slot, one.epoch) == ("a1", 2) and one.seq <= 3),
        ({"since_ms": 7000, "until_ms": 9000}, lambda one: one.created_ms in (7000, 8000)),
        ({"worker": "wb", "since_ms": 9000}, lambda one: one.slot == "b0" and one.epoch == 2),
        ({"worker": "wa", "lifted": {"a0": "1-3"}}, lambda one: one.slot == "a0" and one.epoch == 1 and one.seq <= 3),
        ({"until_ms": 6000, "lifted": {"a0": "2-1", "b0": "1-9"}},
         lambda one: one.slot != "a1" and one.epoch == 1 and one.seq == 1),
        ({"worker": "nobody"}, lambda one: False),
    ],
)  # fmt: skip
def test_a_rule_covers_what_all_that_it_names_have_in_common(facts: dict[str, Any], covered: Any) -> None:
    rule = Rule.of_facts(facts)
    assert [rule.covers(one) for one in ORIGINS] == [covered(one) for one in ORIGINS]
    assert Rule.of_facts(rule.facts()) == rule


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, "name a worker, a slot, or a time"),
        ({"reason": "I do not like it"}, "name a worker, a slot, or a time"),
        ({"worker": ""}, "must not be empty"),
        ({"worker": "w" * 301}, "worker must be a text of at most 300"),
        ({"worker": 5}, "worker must be a text"),
        ({"slot": "a", "reason": "r" * 201}, "reason must be a text of at most 200"),
        ({"worker": "w", "epoch": 3}, "an epoch needs its slot"),
        ({"slot": "a", "first_seq": 3}, "name slot and epoch"),
        ({"slot": "a", "epoch": 1, "first_seq": 3, "last_seq": 2}, "from 3 is after to 2"),
        ({"since_ms": 5, "until_ms": 5}, "since is not before until"),
        ({"since_ms": -1}, "since_ms must be a whole number"),
        ({"since_ms": 1.5}, "since_ms must be a whole number"),
        ({"slot": "a", "epoch": True}, "epoch must be a whole number"),
        ({"slot": "a", "lifted": {"a": "x"}}, "lifted must be ids"),
        ({"slot": "a", "colour": "red"}, "colour unknown; a rule has id, worker"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(facts: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Rule.of_facts(facts)


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "fifo", "sequence"])
def test_masked_fragments_are_never_given_by_any_sampler_nor_reached_by_a_return(kind: str) -> None:
    ids, rng = count(1), np.random.default_rng(0)
    slots = [TrueSlot(name, 2, rng, ids, chances=Chances(0.1, 0.05)) for name in "ab"]
    ring, truth, generator = ReplayRing(SPEC, 300), Truth(), torch.Generator().manual_seed(0)
    sampler: Sampler = UniformSampler(ring, generator)
    if kind == "prioritized":
        sampler = PrioritizedSampler(ring, generator)
    elif kind == "fifo":
        sampler = FifoSampler(ring, generator)
    bad: set[int] = set()
    for turn in range(60):
        worker = "bad" if turn % 2 else "good"
        fragment, told = slots[turn % 2].fragment(3)
        truth.insert(fragment, told)
        ring.insert(replace(fragment, meta=replace(fragment.meta, worker=worker, created_ms=turn)))
        # Some of the fragments of one worker
        if worker == "bad" and turn % 3 == 0:
            bad |= {step.obs for row in told for step in row}
    rule = Rule.of_facts({"worker": "bad", "since_ms": 0})
    before = ring.size
    live = {placed.created_ms for placed in ring.placed}
    fragments, rows = ring.mask_fragments(lambda one: rule.covers(one) and one.created_ms % 3 == 0)
    assert fragments == len([turn for turn in live if turn % 2 and turn % 3 == 0]) > 3
    assert rows == before - ring.size > 0
    for step in truth.steps.values():
        step.valid &= step.obs not in bad
    for _ in range(30):
        if not sampler.ready(8):
            assert kind == "fifo"
            break
        rows_drawn = sampler.draw(8, 0.0).rows
        if kind == "sequence":
            sequences = SequenceGatherer(ring, Sequences(6, 0, 0.9)).gather(rows_drawn)
            shown = sequences.obs["state"][..., 0][sequences.mask].long().tolist()
        else:
            shown = ids_of(
                {key: one.numpy() for key, one in ring.obs_at(torch.from_numpy(rows_drawn)).items()}
            ).tolist()
        assert not set(shown) & bad
        batch = gather(ring, torch.from_numpy(rows_drawn), Returns(5, 0.9))
        first = ids_of({key: one.numpy() for key, one in batch.obs.items()}).tolist()
        np.testing.assert_allclose(
            batch.reward, [truth.transition(one, 5, 0.9)[0] for one in first], rtol=1e-5, atol=1e-5
        )
        if sampler.wants_td_error:
            sampler.learned(rows_drawn, torch.ones(8))
    assert ring.mask_fragments(lambda one: rule.covers(one) and one.created_ms % 3 == 0) == (fragments, 0)
