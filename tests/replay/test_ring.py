"""The ring against the truth: every transition that can be sampled is one that happened."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.errors import ConfigError, SpecMismatch
from clawq.replay.nstep import gather
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing, hops
from clawq.replay.rowsize import forecast_bytes
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.testing.experience import SPEC, Chances, TrueSlot, Truth, ids_of, obs_of
from clawq.types import Fragment, Voided

GAMMA = 0.9


def slots_of(seed: int, count_: int = 1, envs: int = 2, next_step: bool = False) -> list[TrueSlot]:
    ids = count(1)
    rng = np.random.default_rng(seed)
    return [TrueSlot(f"host-w-{k}", envs, rng, ids, next_step) for k in range(count_)]


def assert_valid(ring: ReplayRing) -> None:
    ok, why = ring.check_valid()
    assert ok, why


def sampled_ids(ring: ReplayRing) -> set[int]:
    rows = ring.sampleable_rows()
    assert len(rows) == ring.size
    ids = ids_of({key: one.numpy() for key, one in ring.obs_at(torch.from_numpy(rows)).items()})
    assert len(set(ids.tolist())) == len(ids)
    return set(ids.tolist())


def assert_true(ring: ReplayRing, truth: Truth, ns: Iterable[int] = (1, 3)) -> None:
    """All that can be sampled agrees with the truth, for each n."""
    rows = torch.from_numpy(ring.sampleable_rows())
    if len(rows) == 0:
        return
    for n in ns:
        batch = gather(ring, rows, Returns(n, GAMMA))
        ids = ids_of({key: one.numpy() for key, one in batch.obs.items()}).tolist()
        after = ids_of({key: one.numpy() for key, one in batch.next_obs.items()}).tolist()
        expected = [truth.transition(i, n, GAMMA) for i in ids]
        np.testing.assert_allclose(batch.reward, [one[0] for one in expected], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(batch.discount, [one[1] for one in expected], rtol=1e-6)
        assert after == [one[2] for one in expected]
        np.testing.assert_array_equal(batch.action, [truth.steps[i].action for i in ids])
        assert batch.weights_version.tolist() == [truth.steps[i].weights_version for i in ids]
        assert batch.row.tolist() == rows.tolist()


@dataclass(frozen=True)
class Op:
    """One thing that happens to a slot, then a fragment."""

    slot: int
    steps: int
    event: str  # "", "lost", "epoch", "restart", "void"


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, int, int, bool, int, list[Op]]:
    envs = draw(st.integers(1, 3))
    slots = draw(st.integers(1, 3))
    ops = st.builds(
        Op,
        slot=st.integers(0, slots - 1),
        steps=st.integers(1, 5),
        event=st.sampled_from(["", "", "", "", "lost", "epoch", "restart", "void"]),
    )
    capacity = draw(st.integers(80, 200))
    return draw(st.integers(0, 2**16)), slots, envs, draw(st.booleans()), capacity, draw(st.lists(ops, max_size=30))


@given(programs())
@settings(max_examples=80, deadline=None)
def test_every_transition_that_can_be_sampled_is_one_that_happened(
    program: tuple[int, int, int, bool, int, list[Op]],
) -> None:
    seed, slot_count, envs, next_step, capacity, ops = program
    slots = slots_of(seed, slot_count, envs, next_step)
    ring, truth = ReplayRing(SPEC, capacity), Truth()
    recent: list[tuple[int, list[int]]] = []
    for version, op in enumerate(ops):
        slot = slots[op.slot]
        voided: tuple[Voided, ...] = ()
        if op.event == "lost":
            slot.fragment(op.steps)
        elif op.event == "epoch":
            slot.begin_epoch()
        elif op.event == "restart":
            slot.restart([0])
        elif op.event == "void" and slot.seq:
            voided = (Voided(env=envs - 1, seq=max(1, slot.seq - 1), t=1),)
        fragment, told = slot.fragment(op.steps, version, voided)
        truth.insert(fragment, told)
        assert ring.insert(fragment) == fragment.valid.sum()
        assert_valid(ring)
        assert_true(ring, truth, ns=(1, 3, 5, 10))

        # What was inserted last, as much as fits by the dearest count, is all there.
        rows = (op.steps + 1) * envs + int(fragment.boundary.sum())
        recent.append((rows, [step.obs for row in told for step in row if step.valid]))
        held, room = sampled_ids(ring), capacity
        for rows, ids in reversed(recent):
            room -= rows
            if room < 0:
                break
            assert {i for i in ids if truth.steps[i].valid} <= held
    assert ring.inserted == sum(len(ids) for _, ids in recent)


def test_fragments_of_one_slot_leave_no_tail_rows_between_them() -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring = ReplayRing(SPEC, 100)
    for _ in range(5):
        ring.insert(slot.fragment(3)[0])
        assert_valid(ring)
    # 5 fragments of 3·2 steps, and 2 tail rows at the very end.
    assert ring.head == 5 * 6 + 2
    assert ring.size == 30


def test_n_step_returns_cross_the_seam_of_interleaved_slots() -> None:
    ids, rng, calm = count(1), np.random.default_rng(0), Chances(end=0.0, invalid=0.0)
    slots = [TrueSlot(name, 2, rng, ids, chances=calm) for name in "ab"]
    ring, truth = ReplayRing(SPEC, 200), Truth()
    for k in range(6):
        fragment, told = slots[k % 2].fragment(2)
        truth.insert(fragment, told)
        ring.insert(fragment)
        assert_valid(ring)
    first = gather(ring, torch.tensor([0]), Returns(6, GAMMA))
    # Six steps over three fragments of slot a, with those of b between them.
    assert float(first.discount[0]) == pytest.approx(GAMMA**6)
    assert_true(ring, truth, ns=(1, 4, 6))


@pytest.mark.parametrize("between", range(6, 30))
def test_a_fragment_that_overwrites_its_own_predecessor_links_nothing(between: int) -> None:
    # For some number of steps of slot b in between, the second fragment of a lies on the last rows of its first.
    ids, rng, calm = count(1), np.random.default_rng(0), Chances(end=0.0, invalid=0.0)
    a, b = (TrueSlot(name, 1, rng, ids, chances=calm) for name in "ab")
    ring, truth = ReplayRing(SPEC, 40), Truth()
    for slot, steps in ((b, 3), (a, 3), (b, between // 2), (b, between - between // 2), (a, 12)):
        fragment, told = slot.fragment(steps)
        truth.insert(fragment, told)
        ring.insert(fragment)
        assert_valid(ring)
        assert_true(ring, truth)


def test_a_restarted_env_is_not_joined_over_the_seam_but_the_others_are() -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring, truth = ReplayRing(SPEC, 100), Truth()
    for restarted in ([], [1]):
        slot.restart(restarted)
        fragment, told = slot.fragment(1)
        truth.insert(fragment, told)
        ring.insert(fragment)
        assert_valid(ring)
    discounts = gather(ring, torch.tensor([0, 1]), Returns(2, GAMMA)).discount
    np.testing.assert_allclose(discounts, [GAMMA**2, GAMMA], rtol=1e-6)
    assert_true(ring, truth, ns=(1, 2))


def test_a_fragment_lost_between_two_is_not_bridged_even_if_the_seq_hides_it() -> None:
    slot = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring = ReplayRing(SPEC, 100)
    first, _ = slot.fragment(1)
    lost, _ = slot.fragment(1)
    third, _ = slot.fragment(1)
    # An env whose obs never changes, and an actor that numbers only what it sends.
    still = {key: np.repeat(array[:1], 2, axis=0) for key, array in first.obs.items()}
    ring.insert(replace(first, obs=still))
    ring.insert(replace(third, obs=still, meta=replace(third.meta, seq=2)))
    assert_valid(ring)
    assert lost.meta.produced == 2
    assert float(gather(ring, torch.tensor([0]), Returns(2, GAMMA)).discount[0]) == pytest.approx(GAMMA)


def test_voided_rows_cannot_be_sampled_and_rows_of_other_envs_epochs_and_slots_can() -> None:
    slots = slots_of(3, count_=2, envs=2)
    ring = ReplayRing(SPEC, 400)
    for _ in range(3):
        for slot in slots:
            ring.insert(slot.fragment(4)[0])
    slots[0].begin_epoch()
    ring.insert(slots[0].fragment(4)[0])
    before = ring.size
    assert ring.void("host-w-0", 9, 1, 1, 0) == 0
    assert ring.void("nobody", 1, 1, 1, 0) == 0
    assert ring.void("host-w-0", 1, 7, 1, 0) == 0
    gone = ring.void("host-w-0", 1, 1, 2, 3)
    assert_valid(ring)
    assert 0 < gone <= 1 + 4
    assert ring.size == before - gone == ring.state.size
    assert ring.state.voided == gone
    assert ring.void("host-w-0", 1, 1, 2, 3) == 0


def test_void_reaches_only_what_the_ring_still_holds() -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring = ReplayRing(SPEC, 37)
    for _ in range(20):
        ring.insert(slot.fragment(4)[0])
        assert_valid(ring)
    # Step rows 125..159 live, the even ones of env 0; rows 120, 122, 124 are gone, and in their slots is env 1.
    assert ring.void("s", 1, 0, 1, 0) == 17
    assert ring.size == 35 - 17
    assert_valid(ring)


def test_a_notice_does_not_reach_the_fragment_that_carries_it() -> None:
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring = ReplayRing(SPEC, 60)
    ring.insert(slot.fragment(3)[0])
    ring.insert(slot.fragment(3, voided=(Voided(0, 2, 0),))[0])
    assert_valid(ring)
    assert (ring.size, ring.state.voided) == (12, 0)


def test_C31_an_observation_is_stored_once() -> None:
    hand = hand_spec()
    payload = (63 + 15 + 15) * 4 + 20 * 4 + 8
    assert ReplayRing(hand, 10).bytes_per_row <= 1.1 * payload
    assert forecast_bytes(hand, 1000) == 1000 * ReplayRing(hand, 10).bytes_per_row
    ring = ReplayRing(SPEC, 10)
    columns = [ring.packed, *ring.separate.values(), ring.links, ring.valid, ring.truncated]
    assert ring.state.size_bytes == sum(one.numpy().nbytes for one in columns)


def hand_spec() -> EnvSpec:
    return EnvSpec(
        "hands:HandReachDense-v3",
        {"observation": ArraySpec((63,)), "achieved_goal": ArraySpec((15,)), "desired_goal": ArraySpec((15,))},
        ActionSpec((-1.0,) * 20, (1.0,) * 20),
        ("observation", "desired_goal"),
        ("observation", "desired_goal"),
    )


def test_C41_a_time_limit_bootstraps_from_final_obs() -> None:
    # Reward 1, limit 10, γ .99: the target of the last step is 1 + γ·V(final_obs).
    def value(ids: object) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(ids, np.float64) * 0.5

    steps = 10
    obs_ids = np.array([[*range(1, 11), 100]]).T  # obs[10] is the first obs of the next episode
    ring = ReplayRing(SPEC, 100)
    slot = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    fragment = slot.fragment(steps)[0]
    truncated = np.zeros((steps, 1), np.bool_)
    truncated[-1] = True
    ring.insert(
        replace(
            fragment,
            obs=obs_of(obs_ids),
            reward=np.ones((steps, 1), np.float32),
            truncated=truncated,
            final_obs=obs_of(np.array([11])),
        )
    )
    assert_valid(ring)
    batch = gather(ring, torch.tensor([9]), Returns(1, 0.99))
    target = float(batch.reward[0]) + float(batch.discount[0]) * value(ids_of(numpy_of(batch.next_obs)))[0]
    assert target == pytest.approx(1 + 0.99 * value(11))
    assert target != pytest.approx(1)
    assert target != pytest.approx(1 + 0.99 * value(100))


def numpy_of(tensors: object) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    assert isinstance(tensors, dict)
    return {key: one.numpy() for key, one in tensors.items()}


def test_C42_both_ways_of_autoreset_give_the_same_transitions() -> None:
    def transitions(next_step: bool) -> list[tuple[int, int, float, float]]:
        """All (obs, next obs, reward, discount) of a toy env of 3-step episodes over 12 steps."""
        ring = ReplayRing(SPEC, 200)
        for fragment in toy_episodes(next_step):
            ring.insert(fragment)
            assert_valid(ring)
        batch = gather(ring, torch.from_numpy(ring.sampleable_rows()), Returns(1, GAMMA))
        before, after = ids_of(numpy_of(batch.obs)), ids_of(numpy_of(batch.next_obs))
        return sorted(zip(before.tolist(), after.tolist(), batch.reward.tolist(), batch.discount.tolist(), strict=True))

    same_step, own_step = transitions(False), transitions(True)
    assert len(same_step) == 12
    assert same_step == own_step


def toy_episodes(next_step: bool) -> list[Fragment]:
    """Four episodes of three steps with obs 10e, 10e+1, 10e+2 and last obs 10e+3, in fragments of two steps."""
    rows: list[tuple[int, bool, bool]] = []  # (obs, ends, valid)
    for episode in range(1, 5):
        rows += [(10 * episode, False, True), (10 * episode + 1, False, True), (10 * episode + 2, True, True)]
        if next_step:
            rows.append((10 * episode + 3, False, False))
    shown = [obs for obs, _, _ in rows] + [50]
    slot = TrueSlot("s", 1, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
    made = []
    for at in range(0, len(rows), 2):
        part = rows[at : at + 2]
        fragment = slot.fragment(len(part))[0]
        ends = np.array([[one[1]] for one in part])
        made.append(
            replace(
                fragment,
                obs=obs_of(np.array(shown[at : at + len(part) + 1])[:, None]),
                reward=np.array([[obs] for obs, _, _ in part], np.float32),
                truncated=ends,
                valid=np.array([[one[2]] for one in part]),
                final_obs=obs_of(np.array([obs + 1 for obs, end, _ in part if end], np.int64)),
            )
        )
    return made


def test_C44_inside_an_episode_the_next_obs_is_what_the_policy_saw_next() -> None:
    ids, rng = count(1), np.random.default_rng(44)
    slots = [TrueSlot(name, 4, rng, ids, next_step) for name, next_step in (("a", False), ("b", True))]
    ring, truth, episodes, k = ReplayRing(SPEC, 4000), Truth(), 0, 0
    while episodes < 1000:
        fragment, told = slots[k % 2].fragment(int(rng.integers(1, 12)), k)
        k += 1
        episodes += int(fragment.boundary.sum())
        truth.insert(fragment, told)
        ring.insert(fragment)
        if k % 20 == 0:
            assert_valid(ring)
            assert_true(ring, truth, ns=(1,))
    assert_valid(ring)
    assert_true(ring, truth, ns=(1, 5))


def test_C48_an_env_that_went_nan_leaves_no_trace_and_the_others_train() -> None:
    envs, sick = 64, 17
    slot = TrueSlot("s", envs, np.random.default_rng(48), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring = ReplayRing(SPEC, 4000)
    for _ in range(2):
        ring.insert(slot.fragment(8)[0])
    # In the third fragment env 17 shows nan from t 3 on; its episode began in the first fragment at t 5.
    fragment = slot.fragment(8, voided=(Voided(sick, 1, 5),))[0]
    valid = fragment.valid.copy()
    valid[:, sick] = False
    fragment.obs["state"][3:, sick] = np.nan
    ring.insert(replace(fragment, valid=valid))
    assert_valid(ring)
    assert ring.size == 3 * 8 * (envs - 1) + 5
    rows = torch.from_numpy(ring.sampleable_rows())
    for n in (1, 3):
        batch = gather(ring, rows, Returns(n, GAMMA))
        for tensors in (batch.obs, batch.next_obs):
            assert all(bool(torch.isfinite(one.float()).all()) for one in tensors.values())
        assert bool(torch.isfinite(batch.reward).all())


def test_a_fragment_larger_than_half_the_ring_is_refused_and_changes_nothing() -> None:
    slot = slots_of(0)[0]
    ring = ReplayRing(SPEC, 40)
    ring.insert(slot.fragment(3)[0])
    before = ring.state
    with pytest.raises(ConfigError, match=r"more than half of the ring's 40; raise replay\.capacity"):
        ring.insert(slot.fragment(12)[0])
    assert ring.state == before
    assert_valid(ring)


def test_a_fragment_of_another_shape_is_refused_and_changes_nothing() -> None:
    ring = ReplayRing(SPEC, 40)
    fragment = slots_of(0)[0].fragment(3)[0]
    with pytest.raises(SpecMismatch, match="reward"):
        ring.insert(replace(fragment, reward=fragment.reward[:2]))
    assert ring.state.head == 0
    assert_valid(ring)


def test_read_only_arrays_as_the_codec_gives_them_are_taken() -> None:
    fragment = slots_of(0)[0].fragment(3)[0]
    for array in (*fragment.obs.values(), fragment.action, fragment.reward, fragment.valid):
        array.flags.writeable = False
    ring = ReplayRing(SPEC, 40)
    ring.insert(fragment)
    assert_valid(ring)


def test_extras_travel_with_their_rows() -> None:
    fragment = slots_of(0)[0].fragment(3)[0]
    ring = ReplayRing(SPEC, 40, extras={"log_prob": ArraySpec(())})
    with pytest.raises(SpecMismatch, match=r"extras\.log_prob"):
        ring.insert(fragment)
    log_prob = np.arange(6, dtype=np.float32).reshape(3, 2)
    ring.insert(replace(fragment, extras={"log_prob": log_prob, "value": log_prob}))
    assert_valid(ring)
    assert gather(ring, torch.tensor([0, 5]), Returns(1, GAMMA)).extras["log_prob"].tolist() == [0, 5]


def test_newest_names_the_step_rows_of_the_last_fragment() -> None:
    slot = slots_of(0)[0]
    ring = ReplayRing(SPEC, 60)
    for _ in range(10):
        fragment = slot.fragment(4)[0]
        ring.insert(fragment)
        first, stop = ring.newest
        seen = ring.obs_at(torch.arange(first, stop))
        np.testing.assert_array_equal(seen["state"], fragment.obs["state"][:-1].reshape(8, 3))


def test_hops_lead_to_the_row_of_the_next_obs() -> None:
    # T 3, N 2, boundaries at (0, 1) and (2, 0): rows 0..5 | final 6, 7 | tail 8, 9.
    np.testing.assert_array_equal(np.arange(6) + hops(3, 2, np.array([1, 4])), [2, 6, 4, 5, 7, 9])


@pytest.mark.parametrize("capacity", [0, 1, 2**31])
def test_an_impossible_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        ReplayRing(SPEC, capacity)


def test_check_valid_notices_damage() -> None:
    ring = ReplayRing(SPEC, 60)
    slot = TrueSlot("s", 2, np.random.default_rng(0), count(1), chances=Chances(end=0.0, invalid=0.0))
    ring.insert(slot.fragment(4)[0])
    ring.links.put(np.array([0]), 0, lane=0)
    assert ring.check_valid() == (False, "a valid row has no live successor")
    ring.links.put(np.array([0]), 2, lane=0)
    ring.valid.fill(0, 1, False)
    assert not ring.check_valid()[0]
