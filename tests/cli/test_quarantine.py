"""`clawq log quarantine`: what can be written on the command line, and what is refused before anybody is asked."""

from datetime import UTC, datetime

import click
import pytest
from click.testing import CliRunner

from clawq.cli.quarantine import notes, quarantine
from clawq.cli.times import milliseconds
from clawq.errors import UserError

NOW_S = 1_764_450_000.0


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("15m", NOW_S - 900),
        ("90s", NOW_S - 90),
        ("1.5h", NOW_S - 5400),
        ("2d", NOW_S - 172_800),
        ("2025-11-29T20:00:00+00:00", 1_764_446_400.0),
        ("2025-11-29T21:00+01:00", 1_764_446_400.0),
        ("2025-11-29T20:00", datetime(2025, 11, 29, 20).astimezone(UTC).timestamp()),
    ],
)
def test_a_time_is_iso_or_how_long_ago(text: str, expected_s: float) -> None:
    assert milliseconds("since", text, NOW_S) == int(1000 * expected_s)


@pytest.mark.parametrize("text", ["yesterday", "15", "15w", "", "2025-13-01"])
def test_what_is_no_time_is_told_with_what_is(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"is no time; write 2026-11-29T21:00"):
        milliseconds("since", text, NOW_S)


@pytest.mark.parametrize(
    "words", [["r1"], ["r1", "--list", "--worker", "w"], ["r1", "--lift", "1", "--list"], ["r1", "--lift", "x"]]
)
def test_exactly_one_thing_is_asked_for(words: list[str]) -> None:
    assert CliRunner().invoke(quarantine, words).exit_code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--reason", "none"], "name a worker, a slot, or a time"),
        (["--worker", "w", "--epoch", "1"], "an epoch needs its slot"),
        (["--slot", "s", "--epoch", "1", "--from", "3", "--to", "2"], "from 3 is after to 2"),
        (["--since", "5m", "--until", "10m"], "since is not before until"),
        (["--slot", "s" * 129], "slot must be a text of at most 128"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_before_the_learner_is_asked(words: list[str], told: str) -> None:
    error = CliRunner().invoke(quarantine, ["r1", *words]).exception
    assert isinstance(error, UserError)
    assert told in str(error)


def test_names_that_the_learner_does_not_know_are_told_with_the_nearest() -> None:
    assert notes({"worker": "w1"}, {}) == []
    told = notes({"worker": "hots", "slot": "x-0"}, {"worker": ["host", "other"], "slot": []})
    assert told[0].startswith("note: nothing is known of a worker 'hots'; nearest: host, other.")
    assert told[1].startswith("note: nothing is known of a slot 'x-0'; nearest: none is known at all.")
