"""The tally of a reader that keeps every entry: why what it never read is gone."""

import pytest

from clawq.core import Vanished
from clawq.transport.tally import Tally


@pytest.mark.parametrize(("now", "reason"), [("p1/b", "deleted_with_run"), ("p2/b", "server_lost")])
def test_what_was_deleted_with_a_run_is_told_apart_from_what_a_server_lost(now: str, reason: str) -> None:
    tally = Tally()
    tally.on_server("p1/a", {})
    tally.on_server(now, {"s": Vanished(read=0, lost=4, cursor="0-0"), "t": Vanished(read=0, lost=1, cursor="0-0")})
    assert tally.snapshot()[1]["gaps"] == {reason: 5}
    assert tally.missed == 5
