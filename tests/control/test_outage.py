"""What a worker says while a Redis is away; that it does so, and ends, is in tests/integration/test_outages.py."""

from pathlib import Path

import pytest

from clawq.control.outage import TELL_S, Outage, gone_for_good
from clawq.state import ServerState


def test_an_outage_is_told_at_once_then_every_minute_and_when_it_is_over_and_never_with_the_password() -> None:
    now = [100.0]
    outage = Outage("broker", "redis://:secret@host:6379/0", lambda: now[0])
    assert outage.back() is None
    told = outage.away("refused")
    assert told is not None
    assert told.startswith("the broker Redis redis://:***@host:6379/0 cannot be reached (refused); the worker waits")
    said = []
    for second in range(1, 200):
        now[0] = 100.0 + second
        if (text := outage.away("refused")) is not None:
            said.append((second, text))
    assert [second for second, _ in said] == [TELL_S, 2 * TELL_S, 3 * TELL_S]
    assert "has been away for 2 min, since 20" in said[1][1]
    now[0] = 400.0
    assert outage.back() == "the broker Redis redis://:***@host:6379/0 is back, after 300 s"
    assert outage.back() is None
    # The next outage is another one
    assert "cannot be reached" in str(outage.away("refused"))
    assert all("secret" not in text for _, text in said)


def test_servers_of_this_machine_are_gone_for_good_with_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path))
    assert gone_for_good("unix:///b")
    ServerState.of("unix:///b", "unix:///d").write()
    assert not gone_for_good("unix:///b")
    # Others were started meanwhile
    assert gone_for_good("unix:///older")
    ServerState.forget()
    assert gone_for_good("unix:///b")
