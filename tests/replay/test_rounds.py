"""Rounds, purely: quota, deadline, quorum, late and joining actors, and an order that does not depend on arrival."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawq.core import Entry
from clawq.replay.round_limiter import RoundLimiter
from clawq.replay.rounds import Rounds, RoundSupply, Terms
from clawq.replay.staging import Staged
from clawq.types import Fragment, FragmentMeta

SEATS = ("seat-000", "seat-001", "seat-002")
ENVS = 2


def terms(**more: float) -> Terms:
    return Terms(SEATS, quota_steps=8, envs=ENVS, **more)


def staged(seat: int, version: int, seq: int, steps: int = 4, epoch: int = 1) -> Staged:
    """A fragment of that seat."""
    slot, zeros = f"seat-{seat:03d}", np.zeros((steps, ENVS), np.float32)
    off = np.zeros((steps, ENVS), np.bool_)
    meta = FragmentMeta("0" * 32, "w", slot, epoch, seq, "e", 0, version, steps, ENVS, produced=seq * steps * ENVS)
    fragment = Fragment(meta, {}, zeros[..., None], zeros, off, off, ~off, {})
    return Staged(fragment, Entry(slot, epoch, seq, b""))


def names(fragments: list[Staged]) -> list[tuple[int, str, int, int]]:
    return [(f.fragment.meta.weights_version, f.entry.slot[-1], f.entry.epoch, f.entry.seq) for f in fragments]


def opened(version: int = 1, **more: float) -> Rounds:
    rounds = Rounds(terms(**more))
    rounds.open(version)
    return rounds


def whole(version: int, first_seq: int = 1) -> list[Staged]:
    """All fragments of a round, two for each seat."""
    return [staged(seat, version, seq) for seat in range(3) for seq in (first_seq, first_seq + 1)]


@given(st.permutations(whole(1)))
def test_whatever_order_fragments_arrive_in_they_are_committed_in_the_same_one(arrived: list[Staged]) -> None:
    rounds = opened()
    for one in arrived[:-1]:
        rounds.add(one)
        assert not rounds.ready(1e9)
        assert rounds.missing()
    rounds.add(arrived[-1])
    assert rounds.ready(0.0)
    assert names(rounds.close()) == names(whole(1))
    assert (rounds.closed, rounds.short, rounds.late) == (1, 0, 0)


@given(st.data())
def test_with_late_ones_and_restarts_the_order_is_that_of_version_seat_epoch_and_seq(data: st.DataObject) -> None:
    late = [
        staged(seat, version, seq, epoch=epoch) for seat in (0, 2) for version, epoch, seq in ((3, 1, 7), (4, 2, 1))
    ]
    rounds = opened(5)
    for one in data.draw(st.permutations([*late, *whole(5, first_seq=20)])):
        rounds.add(one)
    assert rounds.ready(0.0)
    found = names(rounds.close())
    assert found == sorted(found)
    assert len(found) == 10
    assert (rounds.short, rounds.late) == (0, 4)


def test_before_the_first_version_nothing_is_ready() -> None:
    rounds = Rounds(terms())
    for one in whole(0):
        rounds.add(one)
    assert not rounds.ready(1e9)


def test_a_round_without_a_deadline_waits_for_all_and_says_for_whom() -> None:
    rounds = opened()
    for one in whole(1)[:3]:
        rounds.add(one)
    assert not rounds.ready(1e9)
    assert rounds.missing() == {"seat-001": 4, "seat-002": 8}
    assert rounds.describe_missing() == "seat-001 (4 of 8 steps), seat-002 (0 of 8 steps)"


def test_after_the_deadline_a_quorum_is_enough_and_what_comes_later_is_used_in_the_next_round() -> None:
    rounds = opened(deadline_s=5.0, quorum=0.5)
    rounds.add(staged(0, 1, 1))
    assert not rounds.ready(100.0)
    # The deadline counts from when the learner began to wait
    rounds.add(staged(0, 1, 2))
    rounds.add(staged(1, 1, 1))
    assert not rounds.ready(104.9)
    assert rounds.ready(105.0)
    assert names(rounds.close()) == [(1, "0", 1, 1), (1, "0", 1, 2), (1, "1", 1, 1)]
    assert (rounds.closed, rounds.short) == (1, 1)
    rounds.open(2)
    rounds.add(staged(1, 1, 2))
    assert rounds.missing() == dict.fromkeys(SEATS, 8)
    # And the next deadline begins anew
    for one in whole(2, first_seq=3)[:3]:
        rounds.add(one)
    assert not rounds.ready(106.0)
    assert rounds.ready(111.0)
    assert names(rounds.close())[0] == (1, "1", 1, 2)
    assert (rounds.short, rounds.late) == (2, 1)


def test_with_less_than_the_quorum_it_keeps_waiting_after_the_deadline() -> None:
    rounds = opened(deadline_s=5.0, quorum=0.5)
    rounds.add(staged(0, 1, 1))
    rounds.add(staged(0, 1, 2))
    assert not rounds.ready(0.0)
    assert not rounds.ready(1e9)
    assert rounds.waited_s(100.0) == 100.0


def test_one_seat_that_brings_much_does_not_stand_for_another() -> None:
    rounds = opened(deadline_s=5.0, quorum=0.5)
    for seq in range(1, 6):
        rounds.add(staged(0, 1, seq))
    assert not rounds.ready(0.0)
    assert not rounds.ready(10.0)
    assert set(rounds.missing()) == {"seat-001", "seat-002"}


def test_an_actor_that_restarts_in_a_round_begins_its_quota_anew_and_all_it_brought_is_used() -> None:
    rounds = opened()
    rounds.add(staged(0, 1, 1, epoch=1))
    for one in whole(1)[2:]:
        rounds.add(one)
    assert rounds.missing() == {"seat-000": 4}
    # The new life of seat 0: what makes up the quota completes the round, the rest is late
    rounds.add(staged(0, 1, 1, epoch=2))
    assert rounds.ready(0.0)
    assert names(rounds.close())[:2] == [(1, "0", 1, 1), (1, "0", 2, 1)]
    rounds.open(2)
    rounds.add(staged(0, 1, 2, epoch=2))
    for one in whole(2, first_seq=3):
        rounds.add(one)
    assert names(rounds.close())[0] == (1, "0", 2, 2)
    assert rounds.late == 1
    # (In round 2 the first life's numbers are back: that is an actor replaced, too)
    assert rounds.replaced == 2


def test_what_was_held_when_a_round_is_called_again_is_used_in_it() -> None:
    rounds = opened(1)
    rounds.add(staged(0, 1, 1))
    rounds.open(2)
    assert rounds.missing() == dict.fromkeys(SEATS, 8)
    for one in whole(2, first_seq=2):
        rounds.add(one)
    assert rounds.ready(0.0)
    assert len(rounds.close()) == 7
    assert (rounds.closed, rounds.late) == (1, 1)


def test_a_worker_that_joins_and_is_no_seat_loses_nothing() -> None:
    rounds = opened()
    rounds.add(staged(7, 1, 1))
    assert rounds.missing() == dict.fromkeys(SEATS, 8)
    for one in whole(1):
        rounds.add(one)
    assert names(rounds.close())[-1] == (1, "7", 1, 1)


def test_what_is_held_is_bounded_a_round_with_twice_its_steps_closes() -> None:
    rounds = opened()
    # A seat whose actor restarts for ever, while another never comes
    for epoch in range(1, 13):
        rounds.add(staged(0, 1, 1, epoch=epoch))
        assert not rounds.ready(0.0)
    rounds.add(staged(0, 1, 1, epoch=13))
    assert rounds.ready(0.0)
    rounds.close()
    assert rounds.short == 1


def test_counters_go_on_over_a_checkpoint() -> None:
    rounds = opened(deadline_s=1.0, quorum=0.1)
    rounds.add(staged(0, 1, 1))
    rounds.close()
    again = Rounds(terms())
    again.load_state_dict(rounds.state_dict())
    assert (again.closed, again.short, again.late) == (1, 1, 0)
    again.load_state_dict({})
    assert again.closed == 0


class Given:
    """A supply in the order of arrival."""

    def __init__(self, fragments: list[Staged]) -> None:
        self.queue = deque(fragments)

    def take(self, most: int = 1, timeout_s: float = 0.0) -> list[Staged]:
        return [self.queue.popleft() for _ in range(min(most, len(self.queue)))]


def test_the_supply_hands_on_closed_rounds_only_and_never_stops_to_take() -> None:
    consumer = Given([*whole(1)[:5], staged(0, 2, 9)])
    supply = RoundSupply(consumer, opened())
    assert supply.take(4) == []
    assert not consumer.queue
    consumer.queue.append(whole(1)[5])
    assert supply.take(4) == []
    assert supply.rounds.ready(0.0)
    supply.release()
    supply.rounds.open(2)
    # What arrives while a round is handed on belongs to the next
    consumer.queue.append(staged(1, 2, 9))
    assert names(supply.take(4)) == names(whole(1)[:4])
    assert not consumer.queue
    assert len(supply.take(4)) == 3
    assert supply.take(4) == []
    assert supply.rounds.missing() == {"seat-000": 8, "seat-001": 4, "seat-002": 8}
    assert supply.metrics() == {"rounds": 1, "short_rounds": 0, "late_fragments": 1, "replaced_actors": 0}


@pytest.mark.parametrize("ratio", [0.5, 1.0, 7.3])
def test_after_each_round_exactly_the_updates_are_made_that_it_calls_for(ratio: float) -> None:
    limiter = RoundLimiter(ratio, min_size_to_sample=100, batch_size=16)
    for size in (60, 50, 48, 48, 48):
        for steps in (size // 2, size - size // 2):
            assert limiter.can_insert(steps)
            limiter.inserted(steps)
        while limiter.can_sample(16):
            limiter.sampled(16)
        due = max(0, limiter.inserts - 100) * ratio
        assert limiter.samples == 16 * int(due / 16 + 1e-9)
        assert limiter.check_valid() == (True, "")


def test_on_policy_each_env_step_calls_for_its_samples_those_that_fill_the_ring_too() -> None:
    limiter = RoundLimiter(1.0, min_size_to_sample=16, batch_size=48, from_first=True)
    for _ in range(3):
        limiter.inserted(48)
        assert limiter.can_sample(48)
        limiter.sampled(48)
        assert not limiter.can_sample(1)
        assert limiter.error >= limiter.bounds[0]
