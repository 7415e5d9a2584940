"""Both sides of the ledger, put together."""

import json

import pytest

from clawq.cli.ledger import lines
from clawq.programs.audit import NOT_TOLD, with_untold
from clawq.programs.balance import Balance, balance
from clawq.replay.ledger import Counts
from clawq.transport.books import Position, Sighting

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
    "lost_unacked": 66,
}


def found(acknowledged: int | None = 7, **sums: object) -> Balance:
    return balance(
        "learner", "now", {"a": Position(5, "1-5")}, {"a": Sighting(acknowledged, 2), "b": Sighting(0, 0)}, SUMS | sums
    )


def test_what_adds_up_is_shown_and_balances() -> None:
    assert set(SUMS) == {*Counts.__dataclass_fields__, "before", "lost_unacked"}
    told = "\n".join(lines("r1", found()))
    # 5 settled and 2 in the stream here; 4 settled and 3 lost with a server that is gone
    for text in (
        *("14  acknowledged", "= ", "6  inserted", "2  rejected: corrupt", "1  duplicates", "2  still in the streams"),
        *("3  gap: server_lost", "7 of them by servers that are gone", "100  produced", "at most 66 unsent"),
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
    positions = {"a": Position(5, "1-9", 2), "b": Position(5, "1-5", 0)}
    trimmed = {"a": ("1-20", 15), "b": ("1-4", 4), "new": ("1-3", 3)}
    found, sums = with_untold(positions, SUMS, trimmed)
    assert found == {"a": Position(5, "1-9", 10), "b": Position(5, "1-5", 0), "new": Position(0, "0-0", 3)}
    assert sums["gaps"] == {"server_lost": 3, NOT_TOLD: 11}
    assert SUMS["gaps"] == {"server_lost": 3}
    sightings = {"a": Sighting(18, 3), "b": Sighting(6, 1), "new": Sighting(3, 0)}
    assert balance("r", "now", found, sightings, {}).problems() == []
