"""An export that follows a run: real streams, read until the run ends."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawq.errors import UserError
from clawq.programs import export_follow, source_end
from clawq.programs.audit import audit_live
from clawq.programs.episode_parquet import ParquetWriter
from clawq.programs.export import Exported, export
from clawq.programs.export_follow import FollowedRun, find_running, reader_name
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.testing.experience import RUN, SPEC, TrueSlot
from clawq.transport.codec import decode, encode
from clawq.transport.control import ControlRecord, RunRecord, RunRegistry, delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter

Eventually = Callable[..., None]


class Running:
    """A run with one actor and a learner that trims, and what follows it in a thread of its own."""

    def __init__(self, servers: EmbeddedRedis, data: Any, broker: Any, folder: Path) -> None:
        self.keys, self.data, self._folder = RunKeys(RUN), data, folder
        self.registry, self._urls = RunRegistry(broker), (servers.broker_url, servers.data_url)
        self.record = RunRecord("r1", RUN, spec=SPEC.to_json(), state="running", created_ms=1)
        self.registry.add(self.record)
        ControlRecord(data, self.keys).write(stop=False, window_bytes=10**6, config_epoch=1)
        self.learner = StreamReader(data, self.keys)
        self._slot = TrueSlot("a", 2, np.random.default_rng(0), iter(range(1, 10**6)))
        self._writer = StreamWriter.open(data, self.keys, "a", "w")
        self._slot.epoch = self._writer.epoch
        self.stop, self.said, self.steps = threading.Event(), list[str](), 0
        self._result: list[Exported | BaseException] = []

    def send(self, fragments: int) -> None:
        for _ in range(fragments):
            made, _ = self._slot.fragment(3)
            self._writer.send(made.meta.seq, encode(made))
            self.steps += int(np.count_nonzero(made.valid))

    def trim(self) -> None:
        """The learner reads all that there is, and leaves nothing in the streams."""
        while self.learner.read(0.1):
            pass
        self.learner.trim(self.learner.cursors(), 0)

    def follow(self, required: bool = False) -> FollowedRun:
        followed = FollowedRun(find_running("r1", self._urls[0]), self._urls, "exporter", required)

        def write() -> None:
            try:
                with ParquetWriter(self._folder / "out.parquet", SPEC) as writer:
                    entries = followed.entries((), self.stop, self.said.append)
                    self._result.append(export(entries, Examiner(decode, FragmentCheck(SPEC, RUN)), writer))
            except BaseException as error:
                self._result.append(error)

        self._thread = threading.Thread(target=write)
        self._thread.start()
        return followed

    def exported(self) -> Exported:
        self._thread.join(20.0)
        [found] = self._result
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None:
        """As a learner does that has finished."""
        self._writer.close()
        self.registry.withdraw(self.record)
        delete_run(self.data, self.keys)


@pytest.fixture
def running(
    redis_servers: EmbeddedRedis, data_client: Any, broker_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(source_end, "DRAINED_S", 0.3)
    monkeypatch.setattr(export_follow, "TELL_S", 0.05)
    running = Running(redis_servers, data_client, broker_client, tmp_path)
    yield running
    running.stop.set()
    running.end()


def settled(running: Running) -> int:
    """Fragments that the exporter says that it has."""
    if not running.data.exists(running.keys.ledger("exporter")):
        return 0
    found = audit_live(running.data, running.keys, "exporter", settling_s=0.0)
    return int(found.sums["entries"])


def test_every_step_is_exported_until_the_run_has_finished(running: Running, eventually: Eventually) -> None:
    running.send(3)
    followed = running.follow()
    eventually(lambda: settled(running) == 3, "what was there")
    running.send(4)
    eventually(lambda: settled(running) == 7, "what came")
    found = audit_live(running.data, running.keys, "exporter")
    assert (found.problems(), found.acknowledged, found.sums["gaps"]) == ([], 7, {})
    [record] = [one for one in Readers(running.data, running.keys).list() if one.name == "exporter"]
    assert (record.required, record.holder is not None) == (False, True)
    running.end()
    done = running.exported()
    assert (done.steps, followed.missed, followed.ended) == (running.steps, 0, "the run has finished")
    assert not running.data.exists(running.keys.readers)


def test_it_is_told_what_it_missed_and_ends_when_it_is_stopped(running: Running, eventually: Eventually) -> None:
    followed = running.follow()
    running.send(2)
    eventually(lambda: settled(running) == 2, "it follows")
    running.stop.set()
    done = running.exported()
    assert (done.steps, followed.ended) == (running.steps, "you stopped it; the run goes on")
    assert [one.name for one in Readers(running.data, running.keys).list()] in ([], ["learner"])


@pytest.mark.parametrize(("required", "ordinals"), [(False, [1, 2, 8, 9]), (True, [*range(1, 10)])])
def test_what_was_trimmed_while_it_wrote_is_missed_exactly_and_by_a_required_one_nothing_however_slow(
    running: Running, required: bool, ordinals: list[int]
) -> None:
    followed = FollowedRun(running.record, running._urls, "exporter", required)
    running.send(2)
    entries = followed.entries((), running.stop, running.said.append)
    got = [next(entries)]
    # While it is busy with the first
    running.send(5)
    running.trim()
    running.send(2)
    got += [next(entries) for _ in ordinals[1:]]
    assert ([entry.ordinal for entry in got], followed.missed) == (ordinals, 9 - len(ordinals))
    running.stop.set()
    assert list(entries) == []


def test_who_cannot_be_followed_is_refused_in_words(running: Running) -> None:
    with pytest.raises(UserError, match="there is no run 'r2' alive on this Redis to follow; there are r1"):
        find_running("r2", running._urls[0])
    for wrong in ("learner", "no such name!"):
        with pytest.raises(UserError, match="cannot be the name of a reader"):
            reader_name(wrong)
    assert reader_name("mine") == "mine"
    assert reader_name(None).startswith("export-")
    running.follow()
    running.stop.set()
    running._thread.join(20.0)
