"""The tally of a reader that keeps every entry: why what it never read is gone."""

import pytest

from clawq.core import Entry, Slots, Stream, Vanished
from clawq.transport.tally import Tally


@pytest.mark.parametrize(("now", "reason"), [("p1/b", "deleted_with_run"), ("p2/b", "server_lost")])
def test_what_was_deleted_with_a_run_is_told_apart_from_what_a_server_lost(now: str, reason: str) -> None:
    tally = Tally()
    tally.on_server("p1/a", {})
    tally.on_server(now, {"s": Vanished(read=0, lost=4, cursor="0-0"), "t": Vanished(read=0, lost=1, cursor="0-0")})
    assert tally.snapshot()[1]["gaps"] == {reason: 5}
    assert tally.missed == 5


def test_what_was_gone_when_it_began_is_nothing_that_it_missed() -> None:
    tally = Tally()
    tally.on_slots(Slots({"a": 5, "b": 6}, {"a": 5, "b": 6}, swept=2, first=True))
    tally.take(Entry("a", 5, 4, b"", ordinal=4, stream=Stream(5)))
    # Of this one more went away before it came to it
    tally.miss(Entry("b", 6, 9, b"", ordinal=9, missed=2, stream=Stream(6)))
    positions, sums = tally.snapshot()
    assert sums["gaps"] == {"before_it_began": 2 + 3 + 7, "trimmed": 2}
    assert tally.missed == 2
    assert (positions["a"].settled, positions["a"].gap, positions["b"].gap) == (1, 3, 9)
