"""A part of a log, by fragment, env steps or time."""

import time

import pytest

from clawq.errors import UserError
from clawq.programs.schedule import FragmentCommitted, Record, SessionBegun, UpdatesTried, WeightsPublished
from clawq.programs.span import Made, Mark, Span, parse_mark, within

#: Noon of some day, local time, in milliseconds.
NOON = int(1000 * time.mktime((2026, 11, 29, 12, 0, 0, 0, 0, -1)))
RECORDS: list[Record] = [SessionBegun({})]
for number in range(1, 6):
    RECORDS += [FragmentCommitted("a", 1, number, 0), UpdatesTried(number, 0.0, 0), WeightsPublished(number)]


def fragments(span: Span, gone: tuple[int, ...] = ()) -> list[int]:
    """Numbers of the fragments within; updates go with them, what is in force stays."""

    def locate(slot: str, epoch: int, seq: int) -> Made | None:
        return None if seq in gone else Made(NOON + 60_000 * (seq - 1), 10)

    found = list(within(RECORDS, span, locate))
    numbers = [one.number for one in found if isinstance(one.record, FragmentCommitted)]
    assert [one.record.count for one in found if isinstance(one.record, UpdatesTried)] == numbers
    assert sum(isinstance(one.record, WeightsPublished) for one in found) == 5
    return numbers


def mark(text: str) -> Mark:
    return parse_mark(text, NOON)


def test_every_kind_of_place() -> None:
    assert fragments(Span()) == [1, 2, 3, 4, 5]
    assert fragments(Span(mark("fragment:2"), mark("fragment:4"))) == [2, 3]
    assert fragments(Span(mark("10"), mark("3_0"))) == [2, 3]
    assert fragments(Span(mark("11"))) == [3, 4, 5]
    assert mark("12") == Mark("steps", 12)
    assert fragments(Span(mark("12:01"), mark("12:03:00"))) == [2, 3]
    assert fragments(Span(mark("2026-11-29T12:02"), mark("2026-11-30"))) == [3, 4, 5]
    assert fragments(Span(None, mark("2026-11-29 12:01:30"))) == [1, 2]


def test_what_the_log_has_lost_is_outside_of_a_time_and_cannot_be_counted_in_env_steps() -> None:
    assert fragments(Span(mark("12:00")), gone=(1, 2)) == [3, 4, 5]
    assert fragments(Span(mark("fragment:1")), gone=(1, 2)) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="lost fragment 2; give fragment:N"):
        fragments(Span(mark("20")), gone=(2,))


@pytest.mark.parametrize(
    "text", ["", "fragment:0", "fragment:x", "-5", "25:00", "1e3", "1__0", "1_", "²", "fragment:²", "9" * 5000, "a:1"]
)
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UserError, match=r"no place in a log; allowed are fragment:N"):
        mark(text)
