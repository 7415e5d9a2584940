import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.acting.outbox import OnFull, Outbox
from clawq.acting.sender import Pauses, Sender
from clawq.core import Weights
from clawq.errors import (
    ClaimHeld,
    ClaimLost,
    ClawqError,
    FragmentTooLarge,
    StoreFull,
    StoreUnavailable,
    StreamRejected,
)
from clawq.testing.scripted import SPEC, CountingEnv, FixedWeights, ScriptedSink
from clawq.types import Fragment, FragmentMeta, Voided

QUICK = Pauses(poll_s=0.01, eager_s=0.005, first_s=0.001, longest_s=0.01)


class Desk:
    """A sender over scripted sinks, its outbox, and the metas of what arrived."""

    def __init__(self, on_full: OnFull = "block", capacity: int = 16) -> None:
        self.metas: dict[bytes, FragmentMeta] = {}
        self.first = ScriptedSink(epoch=1)
        self.second = ScriptedSink(epoch=2, log=self.first.log)
        self.refusal: ClawqError | None = None
        self.outbox = Outbox(capacity, on_full)
        self.weights = FixedWeights(Weights(1, {}, 0, {}))
        self.sender = Sender(self.outbox, self.first, self.reopen, self.encode, self.weights, QUICK)
        self.env = CountingEnv(2, lengths=(50,))
        self.adder = Adder(SPEC, 2, Origin("0" * 32, "w", "s", 0), Limits(1e9, 3 * step_bytes(SPEC, 2)))
        self.adder.begin(self.env.reset([0, 0]))

    def reopen(self) -> ScriptedSink:
        if self.refusal:
            raise self.refusal
        return self.second

    def encode(self, fragment: Fragment) -> bytes:
        key = f"{fragment.meta.epoch}-{fragment.meta.seq}-{fragment.meta.produced}".encode()
        self.metas[key] = fragment.meta
        return key

    def fragment(self, voided: tuple[Voided, ...] = ()) -> Fragment:
        self.adder.open(1, 0.0)
        action = np.zeros((2, 2), np.float32)
        while not self.adder.full(0.0):
            self.adder.add(action, {}, self.env.step(action))
        fragment = self.adder.close()
        return replace(fragment, meta=replace(fragment.meta, voided=voided))

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.outbox.put(self.fragment(), 5.0)

    def arrived(self) -> list[tuple[int, int, int]]:
        """(epoch, seq, produced) of everything that arrived."""
        return [(epoch, seq, self.metas[payload].produced) for epoch, seq, payload in self.first.log]

    def until(self, met: Callable[[], bool]) -> None:
        for _ in range(2000):
            if met():
                return
            self.sender.wait(0.01)
        raise AssertionError("it never came to that")


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.sender.close()


def test_fragments_arrive_in_order_with_ids_that_count_up(desk: Desk) -> None:
    desk.sender.start()
    desk.put(5)
    assert desk.sender.drain(5.0)
    assert desk.arrived() == [(1, seq, 6 * seq) for seq in range(1, 6)]


def test_control_record_and_weights_are_kept_at_hand(desk: Desk) -> None:
    desk.sender.start()
    desk.until(lambda: desk.sender.view.weights is not None)
    view = desk.sender.view
    assert view.control == desk.first.control
    assert view.weights is desk.weights.weights


def test_an_idle_sender_goes_on_looking_and_shows_it(desk: Desk) -> None:
    desk.first.control = None
    desk.sender.start()
    seen = desk.sender.view.attempts
    desk.until(lambda: desk.sender.view.attempts > seen + 3)
    assert desk.sender.view.control is None
    assert desk.sender.view.weights is None


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), StoreFull("full")])
def test_the_same_fragment_is_sent_again_until_redis_is_back(desk: Desk, fault: ClawqError) -> None:
    desk.first.faults = [fault] * 4
    desk.put(3)
    desk.sender.start()
    assert desk.sender.drain(5.0)
    assert desk.arrived() == [(1, 1, 6), (1, 2, 12), (1, 3, 18)]


def test_an_outage_is_logged_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.first.faults = [StoreUnavailable("Redis is away")] * 5
    desk.put(1)
    desk.sender.start()
    assert desk.sender.drain(5.0)
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "Redis is away; waiting for it",
        "Redis is back",
    ]


@pytest.mark.parametrize("fault", [StreamRejected("refused"), ClaimLost("lapsed")])
def test_a_refused_id_begins_a_new_epoch_with_the_same_fragment(desk: Desk, fault: ClawqError) -> None:
    desk.sender.start()
    desk.put(2)
    assert desk.sender.drain(5.0)
    desk.first.faults = [fault]
    desk.put(2)
    assert desk.sender.drain(5.0)
    # Numbers begin anew, sums go on: whatever went away with the stream of epoch 1 is missing in them.
    assert desk.arrived() == [(1, 1, 6), (1, 2, 12), (2, 1, 18), (2, 2, 24)]
    assert {meta.life for meta in desk.metas.values()} == {1}
    assert desk.first.closed == 1


def test_an_epoch_that_begins_before_anything_was_sent_begins_with_number_1(desk: Desk) -> None:
    desk.first.poll_faults = [StreamRejected("lapsed")]
    desk.sender.start()
    desk.until(lambda: desk.first.closed == 1)
    desk.put(2)
    assert desk.sender.drain(5.0)
    assert desk.arrived() == [(2, 1, 6), (2, 2, 12)]


def test_voided_rows_are_named_by_the_numbers_of_the_epoch(desk: Desk) -> None:
    desk.sender.start()
    desk.put(2)
    assert desk.sender.drain(5.0)
    desk.first.faults = [StreamRejected("refused")]
    desk.put(1)
    assert desk.outbox.put(desk.fragment(voided=(Voided(0, 3, 2), Voided(1, 1, 1))), 5.0)
    assert desk.sender.drain(5.0)
    last = desk.metas[desk.first.log[-1][2]]
    # Fragment 3 is number 1 of the new epoch; rows of the old epoch cannot be named, all of this one's are.
    assert last.voided == (Voided(0, 1, 2), Voided(1, 1, 0))


def test_a_slot_that_somebody_else_holds_ends_the_sender_quietly(desk: Desk) -> None:
    desk.refusal = ClaimHeld("slot s", "another actor")
    desk.first.faults = [ClaimLost("taken")]
    desk.put(1)
    desk.sender.start()
    desk.until(lambda: desk.sender.view.ended is not None)
    assert desk.sender.view.ended == "claim_lost"
    assert desk.sender.view.failure is None
    assert not desk.sender.drain(0.2)


def test_an_unexpected_error_is_kept_for_the_env_loop(desk: Desk) -> None:
    desk.first.faults = [FragmentTooLarge("5 MB")]
    desk.put(1)
    desk.sender.start()
    desk.until(lambda: desk.sender.view.failure is not None)
    assert isinstance(desk.sender.view.failure, FragmentTooLarge)


def test_it_holds_back_while_the_learner_has_too_much_unread(desk: Desk) -> None:
    desk.first.unread = 1_000_000
    desk.sender.start()
    desk.until(lambda: desk.sender.view.control is not None)
    desk.put(2)
    seen = desk.sender.view.attempts
    desk.until(lambda: desk.sender.view.attempts > seen + 5)
    assert desk.arrived() == []
    desk.first.unread = 999_999
    assert desk.first.wait_for(2)


def test_headers_count_drops_exactly() -> None:
    desk = Desk("drop_oldest", capacity=2)
    desk.put(5)
    desk.sender.start()
    assert desk.sender.drain(5.0)
    metas = [desk.metas[payload] for _, _, payload in desk.first.log]
    assert [(m.seq, m.produced, m.dropped) for m in metas] == [
        (4, 24, {"outbox_full": 18}),
        (5, 30, {"outbox_full": 18}),
    ]
    desk.sender.close()


def test_closing_twice_is_fine_and_gives_the_slot_back(desk: Desk) -> None:
    desk.sender.start()
    desk.sender.close()
    desk.sender.close()
    assert desk.first.closed >= 1
    assert desk.first.all_sent
    assert not any(thread.name == "sender" for thread in threading.enumerate())


@pytest.mark.parametrize(("waiting", "stop", "all_sent"), [(1, False, False), (3, False, False), (3, True, True)])
def test_what_is_left_unsent_is_said_unless_the_run_is_over(
    desk: Desk, waiting: int, stop: bool, all_sent: bool
) -> None:
    desk.sender.start()
    desk.put(1)
    assert desk.sender.drain(5.0)
    # One of them is in flight, the others are in the outbox
    assert desk.first.control is not None
    desk.first.control = replace(desk.first.control, stop=stop)
    desk.until(lambda: desk.sender.view.control == desk.first.control)
    desk.first.faults = [StoreUnavailable("away")] * 100_000
    desk.put(waiting)
    desk.until(lambda: len(desk.outbox) == waiting - 1)
    desk.sender.close()
    assert desk.first.all_sent is all_sent


def test_what_is_being_sent_for_too_long_is_not_said_to_be_sent(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    going, answered, join = threading.Event(), threading.Event(), threading.Thread.join

    def hang(seq: int, payload: object) -> None:
        going.set()
        answered.wait(10.0)

    monkeypatch.setattr(desk.first, "send", hang)
    desk.sender.start()
    desk.put(1)
    assert going.wait(5.0)
    with monkeypatch.context() as impatient:
        impatient.setattr(threading.Thread, "join", lambda thread, timeout=None: join(thread, 0.01))
        desk.sender.close()
    assert not desk.first.all_sent
    answered.set()


def test_closing_does_not_wait_for_a_redis_that_is_away(desk: Desk) -> None:
    desk.first.faults = [StoreUnavailable("away")] * 100_000
    desk.put(1)
    desk.sender.start()
    desk.until(lambda: desk.sender.view.attempts > 2)
    desk.sender.close()
    assert not any(thread.name == "sender" for thread in threading.enumerate())
