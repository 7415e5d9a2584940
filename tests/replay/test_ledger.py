"""Settled entries are counted exactly, whatever was lost, repeated or refused."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.core import BYGONE, Entry, Stream, Vanished
from clawq.replay.ledger import KEPT_EPOCHS, MOST_REASONS, Ledger, Marks, Settled
from clawq.replay.staging import Staging
from clawq.testing.experience import TrueSlot
from clawq.types import FragmentMeta

STEPS, ENVS = 2, 3


def meta_of(
    seq: int, produced: int | None = None, dropped: dict[str, int] | None = None, epoch: int = 1
) -> FragmentMeta:
    meta = TrueSlot("s", ENVS, np.random.default_rng(0), count(1)).fragment(STEPS)[0].meta
    produced = seq * STEPS * ENVS if produced is None else produced
    return replace(meta, epoch=epoch, seq=seq, produced=produced, dropped=dropped or {})


def assert_valid(ledger: Ledger) -> None:
    ok, why = ledger.check_valid()
    assert ok, why


def settle(ledger: Ledger, seq: int, outcome: str = "committed", meta: FragmentMeta | None = None) -> None:
    ledger.settle("s", Settled(1, seq, outcome, meta_of(seq) if meta is None and outcome == "committed" else meta))
    assert_valid(ledger)


def test_gaps_drops_and_refusals_add_up() -> None:
    ledger = Ledger()
    settle(ledger, 1)
    # The outbox dropped fragment 2 and said so; 3 was corrupt; 5 was lost in the stream.
    settle(ledger, 3, "corrupt")
    settle(ledger, 4, meta=meta_of(4, dropped={"outbox_full": 6}))
    settle(ledger, 4, "duplicate")
    settle(ledger, 6, "stale", meta_of(6, dropped={"outbox_full": 6}))
    counts = ledger.counts
    assert (counts.entries, counts.committed, counts.duplicates) == (5, 2, 1)
    assert counts.rejected == {"corrupt": 1, "stale": 1}
    assert counts.gap_fragments == 2
    assert counts.produced_steps == 36
    assert counts.committed_steps == 12
    assert counts.dropped_steps == {"outbox_full": 6}
    assert counts.refused_steps == 6
    assert counts.unaccounted_steps == 12  # the corrupt one and the lost one
    assert ledger.cursors == {"s": "1-6"}


def test_what_went_away_with_a_stream_is_unaccounted_for_when_its_actor_goes_on_under_a_new_epoch() -> None:
    ledger = Ledger()
    settle(ledger, 1, meta=replace(meta_of(1), life=1))
    # Fragments 2 and 3 of epoch 1 had arrived, then Redis came back empty. The actor's next one is number 1 of epoch 2.
    ledger = Ledger(ledger.state_dict())
    ledger.settle("s", Settled(2, 1, "committed", replace(meta_of(1, produced=24, epoch=2), life=1)))
    assert_valid(ledger)
    assert (ledger.counts.produced_steps, ledger.counts.unaccounted_steps) == (24, 12)
    # Another actor in the slot counts from the beginning, and only so many lives are remembered.
    for epoch in range(3, 3 + 2 * KEPT_EPOCHS):
        ledger.settle("s", Settled(epoch, 1, "committed", meta_of(1, epoch=epoch)))
    assert_valid(ledger)
    assert ledger.counts.unaccounted_steps == 12
    assert len(ledger.state_dict()["told"]) == KEPT_EPOCHS


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.sampled_from(["committed", "stale", "corrupt"]))))
@settings(max_examples=100, deadline=None)
def test_a_ledger_saved_and_loaded_at_any_point_ends_the_same(entries: list[tuple[int, int, str]]) -> None:
    straight, broken = Ledger(), Ledger()
    for epoch, seq, outcome in entries:
        for ledger in (straight, broken):
            new = ledger.marks.is_new("s", epoch, seq)
            meta = meta_of(seq, epoch=epoch) if outcome != "corrupt" else None
            ledger.settle("s", Settled(epoch, seq, outcome if new else "duplicate", meta if new else None))
            assert ledger.counts.entries == ledger.counts.committed + ledger.counts.duplicates + sum(
                ledger.counts.rejected.values()
            )
        broken = Ledger(broken.state_dict())
    assert straight.state_dict() == broken.state_dict()
    first_seqs: dict[int, int] = {}
    for epoch, seq, _ in entries:
        first_seqs[epoch] = max(seq, first_seqs.get(epoch, 0))
    # Every seq up to the highest of its epoch was settled as new, or is part of a gap.
    news = straight.counts.entries - straight.counts.duplicates
    assert news + straight.counts.gap_fragments == sum(first_seqs.values())


def test_the_state_is_plain_and_a_copy() -> None:
    ledger = Ledger()
    settle(ledger, 1, meta=meta_of(1, dropped={"outbox_full": 0}))
    state = ledger.state_dict()
    frozen = json.dumps(state)
    settle(ledger, 2)
    assert json.dumps(state) == frozen


def test_the_cursor_follows_a_new_epoch_even_if_the_clock_went_back() -> None:
    ledger = Ledger()
    for epoch in (1000, 900):
        ledger.settle("s", Settled(epoch, 1, "committed", meta_of(1, epoch=epoch)))
        assert_valid(ledger)
    assert ledger.cursors == {"s": "900-1"}
    assert not ledger.marks.is_new("s", 1000, 1)


def test_marks_know_each_epoch_and_forget_only_the_oldest() -> None:
    marks = Marks()
    for epoch in range(1, KEPT_EPOCHS + 3):
        assert marks.is_new("s", epoch, 5)
        marks.advance("s", epoch, 5)
        assert not marks.is_new("s", epoch, 5)
        assert not marks.is_new("s", epoch, 1)
        assert marks.is_new("s", epoch, 6)
    assert len(marks.state()["s"]) == KEPT_EPOCHS
    # Forgotten, so taken for a repetition: never trained on twice.
    assert not marks.is_new("s", 1, 6)
    assert marks.is_new("t", 1, 1)


def test_reasons_from_the_wire_cannot_grow_without_bound() -> None:
    ledger = Ledger()
    for k in range(3 * MOST_REASONS):
        settle(ledger, k + 1, meta=meta_of(k + 1, dropped={f"reason {k}": 1}))
    assert len(ledger.counts.dropped_steps) == MOST_REASONS + 1
    assert sum(ledger.counts.dropped_steps.values()) == 3 * MOST_REASONS


def place_of(ledger: Ledger) -> tuple[int, str]:
    return ledger.places["s"].settled


def test_a_place_follows_all_that_is_settled_repetitions_too() -> None:
    ledger = Ledger()
    settle(ledger, 1)
    settle(ledger, 2, "corrupt")
    settle(ledger, 2, "duplicate")
    assert place_of(ledger) == (3, "1-2")
    assert place_of(Ledger(ledger.state_dict())) == (3, "1-2")


def test_what_an_archive_has_of_a_stream_that_went_with_its_server_counts_for_none_that_is_there() -> None:
    ledger = Ledger({"server": "first"})
    settle(ledger, 1)
    ledger.on_server("second")
    ledger.vanished("s", Vanished(0, 0, "0-0"), unsettled=0)
    for seq in (2, 3):
        ledger.settle("s", Settled(1, seq, "committed", meta_of(seq), stream=BYGONE))
    ledger.settle("s", Settled(1, 4, "server_lost", missed=1, stream=BYGONE))
    ledger.settle("t", Settled(1, 1, "corrupt", stream=BYGONE))
    # And the first that comes in a new stream may have any ordinal: its slot was heard of before
    for slot, ordinal in (("s", 5), ("t", 9)):
        ledger.settle(slot, Settled(50, 1, "corrupt", None, ordinal, stream=Stream(50, 0)))
        assert ledger.places[slot].settled == (1, "50-1")
    assert_valid(ledger)
    assert (ledger.sums["before"], ledger.sums["gone"], ledger.counts.gaps) == (4, [0, 0], {"server_lost": 1})


def test_what_of_it_is_not_settled_when_the_server_is_lost_again_counts_for_none_either() -> None:
    staging, fragment = Staging(1_000_000), TrueSlot("s", ENVS, np.random.default_rng(0), count(1)).fragment(STEPS)[0]
    staging.on_server("first", {})
    staging.put(Entry("s", 1, 1, b"", stream=BYGONE), fragment)
    [staged] = staging.take(1, 0.0)
    staging.on_server("second", {"s": Vanished(0, 0, "0-0")})
    staging.commit(staged)
    staging.drop(Entry("s", 50, 1, b"", 1, stream=Stream(50, 0)), "corrupt")
    sums, places = staging.books
    assert (sums["before"], places["s"].settled) == (1, (1, "50-1"))
    assert staging.check_valid() == (True, "")


def test_with_another_server_a_place_begins_anew_and_what_was_unread_is_a_gap() -> None:
    ledger = Ledger()
    assert not ledger.on_server("first")
    settle(ledger, 1)
    assert not ledger.on_server("first")
    assert ledger.on_server("second")
    # Given that 2 and 3 were read of the first server, 4 of the second, and none of these is settled yet
    ledger.vanished("s", Vanished(read=1, lost=5, cursor="1-4"), unsettled=3)
    assert ledger.counts.gaps == {"server_lost": 5}
    for seq, place in ((2, (0, "0-0")), (3, (0, "0-0")), (4, (1, "1-4")), (5, (2, "1-5"))):
        settle(ledger, seq)
        assert place_of(ledger) == place
    # A learner that goes on from here knows the server
    assert not Ledger(ledger.state_dict()).on_server("second")
    assert Ledger(ledger.state_dict()).on_server("third")


def test_a_server_that_lost_only_the_tail_is_read_from_where_reading_goes_on() -> None:
    ledger = Ledger({"server": "first"})
    for seq in range(1, 11):
        settle(ledger, seq)
    assert ledger.on_server("second")
    # It came back with 1..8, of which 1..3 are trimmed; reading begins anew.
    ledger.vanished("s", Vanished(read=3, lost=0, cursor="0-0"), unsettled=0)
    assert place_of(ledger) == (3, "0-0")
    settle(ledger, 4, "duplicate")
    assert place_of(ledger) == (4, "1-4")


def test_what_a_reader_missed_is_no_part_of_its_place() -> None:
    ledger = Ledger()
    settle(ledger, 1)
    ledger.settle("s", Settled(1, 5, "trimmed", ordinal=5, missed=4))
    settle(ledger, 6)
    assert ledger.places["s"].gap == 4
    assert place_of(ledger) == (2, "1-6")


def test_what_was_trimmed_unread_is_a_gap_in_fragments_at_once_and_in_env_steps_with_the_next_header() -> None:
    ledger = Ledger()
    ledger.settle("s", Settled(1, 1, "committed", meta_of(1), ordinal=1))
    # Number 4 was dropped by the outbox; 2, 3 and 5 were in the stream and were trimmed.
    ledger.settle("s", Settled(1, 5, "trimmed", ordinal=4, missed=3))
    assert_valid(ledger)
    assert ledger.counts.gaps == {"trimmed": 3}
    assert ledger.counts.gap_fragments == 1
    assert (ledger.cursors, ledger.ordinals) == ({"s": "1-5"}, {"s": 4})
    ledger = Ledger(json.loads(json.dumps(ledger.state_dict())) | {"marks": ledger.state_dict()["marks"]})
    ledger.settle("s", Settled(1, 6, "committed", meta_of(6, dropped={"outbox_full": 6}), ordinal=5))
    assert_valid(ledger)
    counts = ledger.counts
    assert (counts.missed_steps, counts.unaccounted_steps, counts.produced_steps) == (18, 0, 36)
    assert (ledger.missed["s"].fragments, ledger.missed["s"].steps) == (3, 18)
    assert ledger.places["s"].gap == 3
    # What is missing from now on is missing without a reason again.
    settle(ledger, 8)
    assert ledger.counts.unaccounted_steps == 6


def test_what_went_before_a_reader_began_is_told_apart_from_what_it_missed() -> None:
    ledger = Ledger()
    ledger.settle("s", Settled(1, 11, "committed", meta_of(11), ordinal=11))
    ledger.settle("t", Settled(1, 4, "trimmed", ordinal=4, missed=4))
    assert_valid(ledger)
    assert ledger.counts.gaps == {"before_it_began": 10, "trimmed": 4}
    assert (ledger.counts.missed_steps, ledger.counts.unaccounted_steps) == (60, 0)
    assert ledger.counts.gap_fragments == 0
    assert {slot: missed.fragments for slot, missed in ledger.missed.items()} == {"s": 0, "t": 4}


def test_what_was_deleted_with_its_finished_run_is_called_so_and_what_a_server_loses_later_is_not() -> None:
    # Given a run that had finished: its keys were deleted on a server that goes on, or with its own server
    for state, before, now in (({}, "p1/a", "p1/b"), ({"finished": True}, "p1/a", "p2/b")):
        ledger = Ledger({**state, "server": before})
        assert ledger.on_server(now)
        ledger.vanished("s", Vanished(read=0, lost=4, cursor="0-0"), unsettled=0)
        assert ledger.counts.gaps == {"deleted_with_run": 4}
        assert Ledger(ledger.state_dict()).state_dict() == ledger.state_dict()
        # Then that of the session that goes on is lost by its server
        assert ledger.on_server("p3/b")
        ledger.vanished("s", Vanished(read=0, lost=2, cursor="0-0"), unsettled=0)
        assert ledger.counts.gaps == {"deleted_with_run": 4, "server_lost": 2}
