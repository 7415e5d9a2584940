"""A finished run and its required readers, over real streams."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clawq.programs import farewell
from clawq.programs.farewell import Farewell
from clawq.programs.stopping import Stop, wish
from clawq.transport.keys import RunKeys
from clawq.transport.outstanding import Outstanding
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.stream import StreamWriter

Eventually = Callable[..., None]


class Waiting:
    """A farewell that goes on in a thread of its own."""

    def __init__(self, data: Any, keys: RunKeys, patience_s: float | None = 60.0) -> None:
        self.stop, self.shown, self.told = Stop(), "", list[str]()
        self.looks = 0
        self.lost: dict[str, int] | None = None
        self._farewell = Farewell(Outstanding(data, keys), patience_s, "r1", archive=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.lost = self._farewell.wait(self.stop, self._show, self.told.append, self._look)

    def _look(self) -> None:
        self.looks += 1

    def _show(self, stage: str) -> None:
        self.shown = stage

    def goes_on(self, eventually: Eventually) -> None:
        """It has looked at everything as it is now, and still waits."""
        looks = self.looks
        eventually(lambda: self.looks > looks + 2, "it looks again")
        assert self.lost is None

    def end(self) -> dict[str, int]:
        self._thread.join(10.0)
        assert self.lost is not None, self.told
        return self.lost


@pytest.fixture
def streams(data_client: Any, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, RunKeys]:
    """Two slots with three fragments each; a learner and an optional reader, which nobody waits for."""
    monkeypatch.setattr(farewell, "LOOK_S", 0.01)
    for slot in ("a", "b"):
        writer = StreamWriter.open(data_client, run_keys, slot, "w")
        for seq in (1, 2, 3):
            writer.send(seq, b"x")
        writer.close()
    StreamReader(data_client, run_keys).read(0.0)
    StreamReader(data_client, run_keys, "curious").read(0.0)
    return data_client, run_keys


def required(streams: tuple[Any, RunKeys], name: str) -> StreamReader:
    """A required reader that has read all and checkpointed nothing."""
    reader = StreamReader(*streams, name, required=True)
    while len(reader.cursors()) < 2 or any(not at.endswith("-3") for at in reader.cursors().values()):
        reader.read(0.1)
    return reader


def test_nobody_is_waited_for_without_need(streams: tuple[Any, RunKeys]) -> None:
    assert Waiting(*streams).end() == {}
    reader = required(streams, "keen")
    reader.checkpointed(reader.cursors())
    assert Waiting(*streams).end() == {}
    slow = required(streams, "slow")
    assert Waiting(*streams, patience_s=0.0).end() == {"slow": 6}
    slow.close()


def test_a_finished_run_waits_for_each_required_reader_by_name_until_it_has_all_or_is_dropped(
    streams: tuple[Any, RunKeys], eventually: Eventually
) -> None:
    keen, gone = required(streams, "keen"), required(streams, "gone")
    cursors = keen.cursors()
    keen.checkpointed({"a": cursors["a"], "b": cursors["b"].replace("-3", "-2")})
    gone.close()
    waiting = Waiting(*streams)
    eventually(lambda: waiting.told, "it says whom it waits for")
    assert waiting.shown == "waiting for reader gone and reader keen"
    assert "reader gone (which is not there), which has 6 fragments to checkpoint" in waiting.told[0]
    assert "reader keen, which has 1 fragments to checkpoint" in waiting.told[0]
    assert "clawq reader drop r1 gone" in waiting.told[0]
    Readers(*streams).leave("gone")
    eventually(lambda: waiting.shown == "waiting for reader keen", "one is dropped")
    # Something more comes from an actor that is late
    late = StreamWriter.open(*streams, "a", "w")
    late.send(1, b"x")
    late.close()
    keen.checkpointed(cursors)
    while not keen.cursors()["a"].endswith("-1"):
        keen.read(0.1)
    waiting.goes_on(eventually)
    keen.checkpointed(keen.cursors())
    assert waiting.end() == {}
    keen.close()


def test_it_gives_up_when_no_reader_gets_on_and_says_exactly_what_is_lost(
    streams: tuple[Any, RunKeys], eventually: Eventually
) -> None:
    slow = required(streams, "slow")
    waiting = Waiting(*streams, patience_s=1.0)
    eventually(lambda: waiting.told, "it waits")
    slow.checkpointed({"a": slow.cursors()["a"]})
    assert waiting.end() == {"slow": 3}
    assert "gave up waiting for reader slow: 3 fragments that it has not checkpointed are lost" in waiting.told[-1]
    assert "the archive has them" in waiting.told[-1]
    slow.close()


def test_patience_begins_anew_whenever_a_reader_gets_on(
    streams: tuple[Any, RunKeys], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(farewell, "time", SimpleNamespace(monotonic=lambda: now[0]))
    slow = required(streams, "slow")
    waiting = Waiting(*streams, patience_s=60.0)
    waiting.goes_on(eventually)
    now[0] = 50.0
    slow.checkpointed({"a": slow.cursors()["a"]})
    waiting.goes_on(eventually)
    now[0] = 109.0
    waiting.goes_on(eventually)
    now[0] = 110.0
    assert waiting.end() == {"slow": 3}
    slow.close()


def test_a_second_wish_gives_up_and_the_first_does_not(streams: tuple[Any, RunKeys], eventually: Eventually) -> None:
    slow = required(streams, "slow")
    waiting = Waiting(*streams, patience_s=None)
    eventually(lambda: waiting.told, "it waits")
    wish(waiting.stop)
    eventually(lambda: len(waiting.told) == 2, "it tells again what would be lost")
    assert waiting.lost is None
    wish(waiting.stop)
    assert waiting.end() == {"slow": 6}
    # Where nobody heeds it, a second wish is no more than the first
    assert not waiting.stop.insist()
    slow.close()
