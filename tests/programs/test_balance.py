"""Both sides of the ledger, put together."""

import json

import pytest

from clawq.cli.ledger import lines
from clawq.core import Stream
from clawq.programs.audit import NOT_TOLD, with_untold
from clawq.programs.balance import GONE, Balance, balance
from clawq.replay.ledger import Counts
from clawq.transport.books import Position, Sighting, View

SUMS = {
    "entries": 9,
    "committed": 6,
    "committed_steps": 60,
    "duplicates": 1,
    "rejected": {"corrupt": 2},
    "gap_fragments": 0,
    "produced_steps": 100,
    "dropped_steps": {"outbox_full": 20},
    "refused_steps": 0,
    "unaccounted_steps": 20,
    "stale_steps": 0,
    "missed_steps": 0,
    "gaps": {"server_lost": 3},
    "before": 4,
    "gone": [0, 0],
    "lost_unacked": 66,
}


def found(acknowledged: int | None = 7, **sums: object) -> Balance:
    streams = {"a": Sighting(acknowledged, 2, Stream(1)), "b": Sighting(0, 0, Stream(2))}
    return balance("learner", "now", {"a": Position(5, "1-5", born=1)}, View(streams, 0), SUMS | sums)


def test_what_adds_up_is_shown_and_balances() -> None:
    assert set(SUMS) == {*Counts.__dataclass_fields__, "before", "gone", "lost_unacked"}
    told = "\n".join(lines("r1", found()))
    # 5 settled and 2 in the stream here; 4 settled and 3 lost with a server that is gone
    for text in (
        *("14  acknowledged", "= ", "6  inserted", "2  rejected: corrupt", "1  duplicates", "2  still in the streams"),
        *("3  gap: server_lost", "7 of them in streams that are gone", "100  produced", "at most 66 unsent"),
    ):
        assert text in told
    assert told.endswith("\nbalances")


@pytest.mark.parametrize(
    ("acknowledged", "meaning"), [(9, "2 acknowledged fragments are accounted for nowhere"), (6, "1 fragments more")]
)
def test_a_difference_is_told_by_slot_with_what_it_could_mean(acknowledged: int, meaning: str) -> None:
    [problem] = found(acknowledged).problems()
    assert problem.startswith(f"slot a: {meaning}")
    assert "WRONG: slot a" in "\n".join(lines("r1", found(acknowledged)))


def test_outcomes_and_env_steps_that_do_not_add_up_are_told() -> None:
    assert "outcomes add up to 9" in found(entries=8).problems()[0]
    assert "env steps" in found(produced_steps=99).problems()[0]


def test_a_redis_that_does_not_count_is_believed_and_that_is_said() -> None:
    assert found(None).problems() == []
    assert found(None).acknowledged == 14
    assert "does not count" in "\n".join(lines("r1", found(None)))


def test_a_balance_is_the_same_after_a_round_trip_through_its_file() -> None:
    for one in (found(), found(9), found(None), Balance("learner", "x")):
        assert Balance.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_what_a_reader_that_is_behind_was_not_told_of_yet_is_a_gap_with_that_name() -> None:
    positions = {"a": Position(5, "1-9", 2, 1), "b": Position(5, "1-5", 0, 1), "was": Position(4, "1-4", 1, 1)}
    trimmed = {"a": ("1-20", 15), "b": ("1-4", 4), "new": ("1-3", 3), "was": ("8-1", 9)}
    view = View(
        {
            "a": Sighting(18, 3, Stream(1)),
            "b": Sighting(6, 1, Stream(1)),
            "new": Sighting(3, 0, Stream(1)),
            # Swept after seven, and made anew with two, of which one is trimmed
            "was": Sighting(3, 1, Stream(8, 7)),
        },
        10,
    )
    for optional, gone in ((True, 5), (False, 0)):
        found, sums = with_untold(positions, SUMS, trimmed, view, optional)
        assert found == {
            "a": Position(5, "1-9", 10, 1),
            "b": Position(5, "1-5", 0, 1),
            "new": Position(0, "0-0", 3, 1),
            "was": Position(0, "0-0", 2, 8),
        }
        assert sums["gaps"] == {"server_lost": 3, NOT_TOLD: 13 + gone}
        assert sums["gone"] == [4, 1 + gone]
        assert SUMS["gaps"] == {"server_lost": 3}
        wrong = balance("r", "now", found, view, {"gone": sums["gone"]}).wrong
        assert [(row.slot, row.difference) for row in wrong] == ([] if optional else [(GONE, 5)])


def test_a_stream_that_is_gone_for_one_side_only_balances_with_those_that_are_gone() -> None:
    # The reader has not noticed yet that "a" was swept and made anew, nor that "b" was swept; "c" it has folded.
    positions = {"a": Position(5, "1-5", born=1), "b": Position(2, "1-2", 1, born=1)}
    view = View({"a": Sighting(2, 2, Stream(9, 5))}, 5 + 3 + 4)
    told = balance("learner", "now", positions, view, SUMS | {"gone": [4, 0], "entries": 9})
    assert told.problems() == []
    assert [(row.slot, row.acknowledged, row.settled, row.gap) for row in told.rows] == [
        ("a", 2, 0, 0),
        (GONE, 12, 11, 1),
    ]
    [problem] = balance("learner", "now", positions, View(view.streams, 13), SUMS | {"gone": [4, 0]}).problems()
    assert problem.startswith("slots that are gone: 1 acknowledged fragments are accounted for nowhere")
