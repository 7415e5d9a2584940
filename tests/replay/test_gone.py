"""Slots that are gone for long are forgotten, and none of their fragments is ever new again."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from clawq.core import Entry, Slots, Stream, Vanished
from clawq.replay import ledger as module
from clawq.replay.consumer import Consumer
from clawq.replay.ledger import Ledger, Lives, Marks, Settled
from clawq.replay.staleness import StalenessRule
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.testing.experience import RUN, SPEC, TrueSlot
from clawq.transport.codec import decode, encode
from clawq.types import FragmentMeta

META = TrueSlot("s", 2, np.random.default_rng(0), count(1)).fragment(1)[0].meta
KEPT = 8


@pytest.fixture(autouse=True)
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_GONE", KEPT)


def meta_of(slot: str, epoch: int, seq: int, life: int = 0) -> FragmentMeta:
    return replace(META, slot=slot, epoch=epoch, seq=seq, produced=2 * seq, life=life)


def slots(**epochs: int) -> Slots:
    return Slots(epochs, epochs, 0)


def settle(ledger: Ledger, slot: str, epoch: int, entries: int = 3) -> None:
    for seq in range(1, entries + 1):
        told = Settled(epoch, seq, "committed", meta_of(slot, epoch, seq), seq, stream=Stream(epoch))
        ledger.settle(slot, told)


def test_ten_thousand_slots_that_came_and_went_are_one_total_and_cost_no_more_than_those_that_are_there() -> None:
    ledger = Ledger()
    settle(ledger, "stays", 1)
    for number in range(10_000):
        settle(ledger, f"w{number}", 10 + number, 1)
        if number % 50 == 0:
            ledger.look(replace(slots(stays=1), swept=number), busy=())
            assert ledger.check_valid() == (True, "")
    ledger.look(replace(slots(stays=1), swept=10_000), busy=())
    state = ledger.state_dict()
    assert ledger.check_valid() == (True, "")
    assert (ledger.sums["gone"], ledger.sums["before"]) == ([10_000, 0], 0)
    assert ledger.counts.committed == 10_003
    assert list(ledger.places) == list(ledger.cursors) == ["stays"]
    for known in ("marks", "ordinals", "told"):
        assert len(state[known]) == KEPT + 1
    assert Ledger(state).state_dict() == state
    # Any of their entries, should it ever come again, is a repetition
    assert not any(ledger.marks.is_new(f"w{number}", 10 + number, 1) for number in range(10_000))
    assert not any(ledger.marks.is_new(f"w{number}", 10 + number, 2) for number in range(10_000 - KEPT))
    assert ledger.marks.is_new("w5", 10_010, 1)


def test_nothing_is_forgotten_while_something_older_may_be_on_its_way() -> None:
    ledger = Ledger()
    for number in range(20):
        settle(ledger, f"w{number}", 10 + number)
    # A writer took a slot at 12 and was not heard of; another one goes on in a known slot under an epoch above 15
    assert ledger.look(slots(fresh=12, w5=40), busy=()) == ["w0", "w1"]
    assert ledger.marks.is_new("fresh", 12, 1)
    settle(ledger, "fresh", 12)
    assert ledger.look(slots(fresh=12, w5=40), busy=()) == ["w2", "w3", "w4"]
    assert ledger.marks.is_new("w5", 17, 1)
    settle(ledger, "w5", 40)
    assert ledger.look(slots(fresh=12, w5=40), busy={"w6"})[0] == "w7"


def test_of_an_actor_that_was_forgotten_the_first_fragment_is_a_repetition_and_the_next_are_new() -> None:
    marks, lives = Marks(), Lives()
    for number in range(20):
        marks.advance(f"w{number}", 10 + number, 3)
        lives.advance(f"w{number}", meta_of(f"w{number}", 10 + number, 3))
    forgotten = marks.forgettable(slots(), busy=())
    marks.forget(forgotten)
    lives.forget(forgotten)
    lives.horizon = marks.horizon
    assert forgotten == [f"w{number}" for number in range(12)]
    assert marks.horizon == 21
    # It had been stopped for long, does not know whether its third one arrived, and sends it in a new epoch
    again = replace(meta_of("w3", 90, 1, life=13), produced=6)
    assert marks.is_new("w3", 90, 1)
    assert not lives.is_new("w3", again)
    lives.advance("w3", again)
    assert lives.is_new("w3", replace(again, seq=2, produced=8))
    # Whoever begins now is heard from the first on
    assert lives.is_new("w3", meta_of("w3", 91, 1))


def test_a_slot_that_comes_back_after_it_was_forgotten_trains_no_fragment_twice(
    eventually: Callable[..., None],
) -> None:
    class Source:
        """Gives batches of entries, and tells which slots there are before each."""

        def __init__(self) -> None:
            self.batches: list[tuple[Slots, list[Entry]]] = []
            self.consumer: Consumer | None = None
            self.given = 0

        def read(self, timeout_s: float) -> list[Entry]:
            # What was given is settled: only then can a slot be gone.
            if not self.batches or self.consumer is None or self.consumer.counts.entries < self.given:
                return []
            there, entries = self.batches.pop(0)
            self.consumer.on_slots(there)
            self.given += len(entries)
            return entries

        def cursors(self) -> dict[str, str]:
            return {}

        def acknowledge(self, cursors: object) -> None:
            pass

    def entry(slot: TrueSlot, life: int = 0) -> tuple[Entry, bytes]:
        made = slot.fragment(2)[0]
        payload = bytes(encode(replace(made, meta=replace(made.meta, life=life))))
        return Entry(slot.name, slot.epoch, slot.seq, payload, slot.seq, stream=Stream(slot.epoch)), payload

    rng, ids, source = np.random.default_rng(0), count(1), Source()
    sent = []
    for number in range(20):
        sent.append(entry(TrueSlot(f"w{number}", 2, rng, ids, epoch=10 + number)))
        source.batches.append((slots(**{f"w{number}": 10 + number}), [sent[-1][0]]))
    source.batches.append((replace(slots(), swept=20), []))
    # The server comes back in an older state with the stream of a slot that was forgotten
    source.batches.append((slots(w2=12), [sent[2][0]]))
    # And its actor, which had been stopped, sends the fragment again as the first of a new epoch, and goes on
    old = TrueSlot("w3", 2, rng, ids, epoch=13)
    first, second = (old.fragment(2)[0] for _ in range(2))
    again = [
        Entry(
            "w3",
            99,
            seq,
            bytes(encode(replace(one, meta=replace(one.meta, epoch=99, seq=seq, life=13)))),
            seq,
            stream=Stream(99),
        )
        for seq, one in ((1, first), (2, second))
    ]
    source.batches.append((slots(w3=99), again))
    check = Examiner(decode, FragmentCheck(SPEC, RUN))
    consumer = Consumer(source, check, StalenessRule(), lambda: 0, lambda *_: None)
    source.consumer = consumer
    consumer.start()
    taken = []
    for _ in range(21):
        [one] = consumer.take(1, 5.0)
        consumer.commit(one)
        taken.append((one.entry.slot, one.entry.epoch, one.entry.seq))
    eventually(lambda: consumer.counts.entries == 23, "all is settled")
    consumer.close()
    assert taken == [*((f"w{n}", 10 + n, 1) for n in range(20)), ("w3", 99, 2)]
    counts = consumer.counts
    assert (counts.committed, counts.duplicates, counts.unaccounted_steps) == (21, 2, 0)
    assert consumer.check_valid() == (True, "")
    # It goes on like that after a resume
    state = Ledger(consumer.state_dict())
    assert not state.marks.is_new("w1", 11, 1)
    assert not Lives({}, state.marks.horizon).is_new("w1", meta_of("w1", 99, 1, life=11))


def test_another_server_is_asked_for_what_it_knows_of_slots_that_are_gone() -> None:
    ledger = Ledger({"server": "first"})
    for number in range(4):
        settle(ledger, f"w{number}", 10 + number)
    ledger.look(replace(slots(w3=13), swept=9), busy=())
    assert ledger.on_server("second")
    ledger.vanished("w3", Vanished(0, 2, "0-0"), unsettled=0)
    ledger.moved()
    ledger.look(slots(), busy=())
    assert (ledger.sums["gone"], ledger.sums["before"], ledger.counts.gaps) == ([0, 0], 12, {"server_lost": 2})
    assert ledger.check_valid() == (True, "")
