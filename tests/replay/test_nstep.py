"""n-step returns against a table worked out by hand, and against a slow transcription of the formula."""

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from clawq.replay.nstep import gather
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.testing.experience import SPEC, Chances, TrueSlot, ids_of, obs_of

GAMMA = 0.5


def trace_ring(split: tuple[int, ...], terminates: bool = True) -> ReplayRing:
    """Seven steps of one env, rewards 1, 2, 4 ... 64: terminated at step 3, truncated at step 6 (steps from 1).

    Without `terminates` step 3 ends by time too: discounts then show γ^k of those returns as well.

    Obs: 10 11 12 (13) | 20 21 22 (23) | 30 31 ...; in brackets the final obs. `split` gives the fragments' lengths.
    """
    shown = [10, 11, 12, 20, 21, 22, 30, 31]
    final = {2: 13, 5: 23}
    terminated, truncated = np.zeros(7, np.bool_), np.zeros(7, np.bool_)
    terminated[2], truncated[2], truncated[5] = terminates, not terminates, True
    slot = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    ring = ReplayRing(SPEC, 64)
    at = 0
    for steps in split:
        part = slice(at, at + steps)
        ring.insert(
            replace(
                slot.fragment(steps)[0],
                obs=obs_of(np.array(shown[at : at + steps + 1])[:, None]),
                reward=(2.0 ** np.arange(7))[part, None].astype(np.float32),
                terminated=terminated[part, None],
                truncated=truncated[part, None],
                final_obs=obs_of(np.array([obs for t, obs in final.items() if at <= t < at + steps], np.int64)),
            )
        )
        at += steps
        assert ring.check_valid() == (True, "")
    return ring


#: n -> obs -> (return, steps taken k, γ^k, discount, bootstrap obs), with γ = 1/2: terms of a return are 2^t/2^i.
TABLE = {
    1: {
        10: (1, 1, 1 / 2, 1 / 2, 11), 11: (2, 1, 1 / 2, 1 / 2, 12), 12: (4, 1, 1 / 2, 0, 13),
        20: (8, 1, 1 / 2, 1 / 2, 21), 21: (16, 1, 1 / 2, 1 / 2, 22), 22: (32, 1, 1 / 2, 1 / 2, 23),
        30: (64, 1, 1 / 2, 1 / 2, 31),
    },
    3: {
        10: (1 + 1 + 1, 3, 1 / 8, 0, 13), 11: (2 + 2, 2, 1 / 4, 0, 13), 12: (4, 1, 1 / 2, 0, 13),
        20: (8 + 8 + 8, 3, 1 / 8, 1 / 8, 23), 21: (16 + 16, 2, 1 / 4, 1 / 4, 23), 22: (32, 1, 1 / 2, 1 / 2, 23),
        30: (64, 1, 1 / 2, 1 / 2, 31),
    },
    5: {
        10: (1 + 1 + 1, 3, 1 / 8, 0, 13), 11: (2 + 2, 2, 1 / 4, 0, 13), 12: (4, 1, 1 / 2, 0, 13),
        20: (8 + 8 + 8, 3, 1 / 8, 1 / 8, 23), 21: (16 + 16, 2, 1 / 4, 1 / 4, 23), 22: (32, 1, 1 / 2, 1 / 2, 23),
        30: (64, 1, 1 / 2, 1 / 2, 31),
    },
    10: {
        10: (1 + 1 + 1, 3, 1 / 8, 0, 13), 11: (2 + 2, 2, 1 / 4, 0, 13), 12: (4, 1, 1 / 2, 0, 13),
        20: (8 + 8 + 8, 3, 1 / 8, 1 / 8, 23), 21: (16 + 16, 2, 1 / 4, 1 / 4, 23), 22: (32, 1, 1 / 2, 1 / 2, 23),
        30: (64, 1, 1 / 2, 1 / 2, 31),
    },
}  # fmt: skip
SPLITS = [(7,), (3, 4), (2, 4, 1), (1,) * 7]


def gathered(ring: ReplayRing, n: int) -> dict[int, tuple[float, float, int]]:
    """obs -> (return, discount, bootstrap obs) of all rows."""
    batch = gather(ring, torch.from_numpy(ring.sampleable_rows()), Returns(n, GAMMA))
    shown, after = (ids_of({key: one.numpy() for key, one in obs.items()}) for obs in (batch.obs, batch.next_obs))
    found = zip(batch.reward.tolist(), batch.discount.tolist(), after.tolist(), strict=True)
    return dict(zip(shown.tolist(), found, strict=True))


@pytest.mark.parametrize("n", [1, 3, 5, 10])
@pytest.mark.parametrize("split", SPLITS)
def test_C34_a_trace_with_both_kinds_of_ends_agrees_with_the_table(n: int, split: tuple[int, ...]) -> None:
    table = TABLE[n]
    assert gathered(trace_ring(split), n) == {obs: (row[0], row[3], row[4]) for obs, row in table.items()}
    # Where nothing terminates, a discount is γ^k: it shows how many steps were taken.
    effective = gathered(trace_ring(split, terminates=False), n)
    assert effective == {obs: (row[0], row[2], row[4]) for obs, row in table.items()}
    assert {obs: -math.log2(row[1]) for obs, row in effective.items()} == {obs: row[1] for obs, row in table.items()}


def test_C34_the_newest_step_is_cut_short_and_grows_when_its_successor_comes() -> None:
    for split, discount in (((4,), 0.5), ((4, 1), 0.25), ((4, 2), 0.125)):
        ring = trace_ring(split)
        rows = torch.from_numpy(ring.sampleable_rows())
        batch = gather(ring, rows, Returns(3, GAMMA))
        ids = ids_of({key: one.numpy() for key, one in batch.obs.items()}).tolist()
        assert float(batch.discount[ids.index(20)]) == discount


def test_the_reward_scale_is_a_factor_on_the_return_and_on_nothing_else() -> None:
    ring = trace_ring((7,))
    rows = torch.from_numpy(ring.sampleable_rows())
    for n in (1, 3):
        plain, scaled = gather(ring, rows, Returns(n, GAMMA)), gather(ring, rows, Returns(n, GAMMA, reward_scale=4.0))
        assert torch.equal(scaled.reward, 4 * plain.reward)
        assert torch.equal(scaled.discount, plain.discount)


def test_a_return_stops_before_a_row_that_is_not_valid() -> None:
    ring = trace_ring((7,))
    ring.void("s", 1, env=0, seq=1, t=4)  # obs 21 and all after it
    batch = gather(ring, torch.tensor([3]), Returns(5, GAMMA))
    assert (float(batch.reward[0]), float(batch.discount[0])) == (8, 0.5)
    assert ids_of({key: one.numpy() for key, one in batch.next_obs.items()}).tolist() == [21]


def test_a_return_does_not_leap_over_a_row_that_is_not_valid() -> None:
    fragment = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0)).fragment(4)[0]
    ring = ReplayRing(SPEC, 64)
    ring.insert(
        replace(fragment, reward=np.ones((4, 1), np.float32), valid=np.array([[True], [False], [True], [True]]))
    )
    batch = gather(ring, torch.tensor([0, 2]), Returns(4, GAMMA))
    assert batch.reward.tolist() == [1, 1.5]
    assert batch.discount.tolist() == [0.5, 0.25]


def test_the_same_row_may_be_asked_for_several_times_and_dtypes_are_those_of_core_batch() -> None:
    ring = trace_ring((7,))
    batch = gather(ring, torch.tensor([1, 1, 6]), Returns(2, GAMMA))
    assert batch.row.tolist() == [1, 1, 6]
    assert batch.reward[0] == batch.reward[1]
    assert batch.importance_weight.tolist() == [1, 1, 1]
    dtypes = (batch.action.dtype, batch.reward.dtype, batch.discount.dtype, batch.importance_weight.dtype)
    assert set(dtypes) == {torch.float32}
    assert (batch.row.dtype, batch.weights_version.dtype) == (torch.int64, torch.int64)
    assert {key: one.dtype for key, one in batch.obs.items()} == {
        "state": torch.float32,
        "grid": torch.float32,
        "picture": torch.uint8,
    }


def test_a_nan_behind_the_end_of_a_return_does_not_get_in() -> None:
    slot = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    fragment = slot.fragment(4)[0]
    valid = np.array([[True], [True], [False], [False]])
    reward = np.array([[1.0], [1.0], [np.nan], [np.inf]], np.float32)
    ring = ReplayRing(SPEC, 64)
    ring.insert(replace(fragment, valid=valid, reward=reward))
    assert gather(ring, torch.tensor([0, 1]), Returns(4, GAMMA)).reward.tolist() == [1.5, 1.0]
