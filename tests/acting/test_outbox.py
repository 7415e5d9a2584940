import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.acting.outbox import OnFull, Outbox
from clawq.testing.scripted import SPEC, CountingEnv
from clawq.types import Fragment, Voided


def fragments(count: int, voided: dict[int, tuple[Voided, ...]] | None = None) -> list[Fragment]:
    env = CountingEnv(2)
    adder = Adder(SPEC, 2, Origin("0" * 32, "w", "s", 0), Limits(1e9, 3 * step_bytes(SPEC, 2)))
    adder.begin(env.reset([0, 0]))
    made = []
    action = np.zeros((2, 2), np.float32)
    for index in range(1, count + 1):
        adder.open(1, 0.0)
        while not adder.full(0.0):
            adder.add(action, {}, env.step(action))
        fragment = adder.close()
        made.append(replace(fragment, meta=replace(fragment.meta, voided=(voided or {}).get(index, ()))))
    return made


def test_block_waits_for_room_and_drops_nothing() -> None:
    outbox = Outbox(2, "block")
    made = fragments(3)
    assert outbox.put(made[0], 0)
    assert outbox.put(made[1], 0)
    assert not outbox.put(made[2], 0.01)
    taken = threading.Thread(target=lambda: outbox.take(5.0))
    taken.start()
    assert outbox.put(made[2], 5.0)
    taken.join()
    assert outbox.dropped == {}


def test_drop_oldest_keeps_the_newest_and_counts_before_the_next() -> None:
    outbox = Outbox(2, "drop_oldest")
    for fragment in fragments(5):
        assert outbox.put(fragment, 0)
    first, second = outbox.take(0), outbox.take(0)
    assert first
    assert second
    assert [first.fragment.meta.seq, second.fragment.meta.seq] == [4, 5]
    assert first.dropped == {"outbox_full": 18}
    assert not second.dropped
    assert outbox.dropped == {"outbox_full": 18}


def test_drop_newest_keeps_the_oldest_and_counts_before_the_next() -> None:
    outbox = Outbox(1, "drop_newest")
    made = fragments(4)
    for fragment in made[:3]:
        assert outbox.put(fragment, 0)
    first = outbox.take(0)
    outbox.put(made[3], 0)
    second = outbox.take(0)
    assert first
    assert second
    assert [first.fragment.meta.seq, second.fragment.meta.seq] == [1, 4]
    assert not first.dropped
    assert second.dropped == {"outbox_full": 12}


@pytest.mark.parametrize("on_full", ["drop_oldest", "drop_newest"])
def test_notices_of_a_dropped_fragment_travel_with_the_one_after_it(on_full: OnFull) -> None:
    notice = (Voided(1, 1, 0),)
    outbox = Outbox(1, on_full)
    made = fragments(4, {2: notice})
    outbox.put(made[0], 0)
    if on_full == "drop_oldest":
        outbox.take(0)
    for fragment in made[1:3]:
        outbox.put(fragment, 0)
    if on_full == "drop_newest":
        outbox.take(0)
        outbox.put(made[3], 0)
    parcel = outbox.take(0)
    assert parcel
    assert parcel.fragment.meta.seq == (3 if on_full == "drop_oldest" else 4)
    assert parcel.fragment.meta.voided == notice


def test_interrupt_lets_a_waiting_take_return() -> None:
    outbox = Outbox(1, "block")
    thread = threading.Thread(target=lambda: outbox.take(30.0))
    thread.start()
    outbox.interrupt()
    thread.join(5.0)
    assert not thread.is_alive()


@given(
    on_full=st.sampled_from(["drop_oldest", "drop_newest"]),
    capacity=st.integers(1, 4),
    moves=st.lists(st.booleans(), max_size=40),
)
def test_what_every_parcel_reports_is_exact(on_full: OnFull, capacity: int, moves: list[bool]) -> None:
    outbox, made, taken, dropped = Outbox(capacity, on_full), iter(FORTY), 0, 0
    for put in [*moves, *[False] * capacity]:
        if put:
            outbox.put(next(made), 0)
        elif (parcel := outbox.take(0)) is not None:
            taken += 6
            dropped += parcel.dropped["outbox_full"]
            # Everything up to this fragment was either handed over or is reported as dropped.
            assert taken + dropped == parcel.fragment.meta.produced
        assert len(outbox) <= capacity


FORTY = fragments(40)
