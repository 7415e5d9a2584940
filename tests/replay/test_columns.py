"""Columns write what they are told to, around the end of the ring too."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawq.replay.columns import Column, Packed, pieces
from clawq.specs import ArraySpec

CPU = torch.device("cpu")


@given(st.integers(1, 20), st.data())
def test_pieces_cover_all_slots_in_order_and_are_two_at_most(capacity: int, choice: st.DataObject) -> None:
    at, rows = choice.draw(st.integers(0, capacity - 1)), choice.draw(st.integers(0, capacity))
    cut = list(pieces(at, rows, capacity))
    assert [slot for start, stop, _ in cut for slot in range(start, stop)] == [(at + i) % capacity for i in range(rows)]
    assert [done for _, _, done in cut] == [0, capacity - at][: len(cut)]
    assert len(cut) <= 2


@given(st.integers(1, 12), st.data())
def test_write_fill_put_and_block_agree_with_numpy(capacity: int, choice: st.DataObject) -> None:
    column = Column(capacity, ArraySpec((2,), "int32"), CPU)
    truth = np.zeros((capacity, 2), np.int32)
    for value in range(1, 6):
        at, rows = choice.draw(st.integers(0, capacity - 1)), choice.draw(st.integers(0, capacity))
        slots = (at + np.arange(rows)) % capacity
        new = np.arange(2 * rows, dtype=np.int32).reshape(rows, 2) + 100 * value
        kind = choice.draw(st.sampled_from(["write", "fill", "put", "lane", "block"]))
        if kind == "write":
            column.write(at, new)
            truth[slots] = new
        elif kind == "block":
            with column.block(at, rows) as block:
                block[...] = new
            truth[slots] = new
        elif kind == "fill":
            column.fill(at, rows, value)
            truth[slots] = value
        elif kind == "put":
            column.put(slots, value)
            truth[slots] = value
        else:
            column.put(slots, value, lane=1)
            truth[slots, 1] = value
        np.testing.assert_array_equal(column.tensor, truth)
        np.testing.assert_array_equal(column.numpy(), truth)


def test_parts_of_packed_rows_come_back_with_their_shapes() -> None:
    packed = Packed(5, {"a": ArraySpec((2, 3)), "b": ArraySpec(()), "c": ArraySpec((2,))}, CPU)
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=(4, *shape)).astype(np.float32) for shape in ((2, 3), (), (2,)))
    with packed.block(3, 4) as block:  # wraps
        for name, array in (("a", a), ("b", b), ("c", c)):
            packed.set_part(block, name, array)
    rows = packed.select(torch.tensor([3, 4, 0, 1]))
    for name, array in (("a", a), ("b", b), ("c", c)):
        np.testing.assert_array_equal(packed.part(rows, name), array)
    assert "a" in packed
    assert "d" not in packed


@pytest.mark.gpu
def test_a_ring_on_a_gpu_is_the_ring_on_the_cpu() -> None:
    from itertools import count

    from clawq.replay.nstep import gather
    from clawq.replay.returns import Returns
    from clawq.replay.ring import ReplayRing
    from clawq.replay.samplers import UniformSampler
    from clawq.testing.experience import SPEC, TrueSlot

    ids, rng = count(1), np.random.default_rng(0)
    slots = [TrueSlot(name, 3, rng, ids) for name in "ab"]
    rings = [ReplayRing(SPEC, 300, device) for device in ("cpu", "cuda")]
    for k in range(60):
        fragment = slots[k % 2].fragment(5)[0]
        for ring in rings:
            ring.insert(fragment)
            assert ring.check_valid() == (True, "")
    for ring in rings:
        ring.void("a", 1, 0, 58, 2)
        assert ring.check_valid() == (True, "")
    for n in (1, 3):
        batches = [
            gather(ring, torch.from_numpy(sampler.positions(64)), Returns(n, 0.9))
            for ring in rings
            for sampler in [UniformSampler(ring, torch.Generator().manual_seed(1))]
        ]
        for name in ("action", "reward", "discount", "row", "weights_version"):
            torch.testing.assert_close(getattr(batches[0], name), getattr(batches[1], name).cpu())
        for key in SPEC.obs:
            assert torch.equal(batches[0].obs[key], batches[1].obs[key].cpu())
            assert torch.equal(batches[0].next_obs[key], batches[1].next_obs[key].cpu())
