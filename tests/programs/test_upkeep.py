"""Streams inside budget and memory while trimming waits: real learner, real Redis, real figures."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawq.acting.outbox import Outbox
from clawq.acting.sender import Sender
from clawq.cli.status import View
from clawq.config import RunConfig
from clawq.errors import CheckpointNotWritten, StoreUnfit
from clawq.programs import learner
from clawq.programs.run import Run, make_folders
from clawq.programs.session import Session
from clawq.programs.train import Trainer
from clawq.programs.upkeep import LEAST_WINDOW_BYTES, fitting_window, full_text, squeezed_budget
from clawq.spawning.spawner import Spawner
from clawq.testing.experience import RUN, SPEC, TrueSlot
from clawq.transport.claims import Claim
from clawq.transport.client import check_server, connect, memory_bytes
from clawq.transport.codec import encode
from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.keys import ARCHIVE, LEARNER, RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.registry import ReaderRecord, Readers
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from clawq.transport.trimming import room
from clawq.transport.weights import WeightsReader

Eventually = Callable[..., None]
STEPS, ENVS = 1000, 4


class Flood:
    """An actor's outbox and sender, fed as fast as they take it."""

    def __init__(self, data_url: str, slot: str, fragments: int) -> None:
        self._client, keys = connect(data_url), RunKeys(RUN)

        def open_slot(after_epoch: int = 0) -> StreamWriter:
            return StreamWriter.open(self._client, keys, slot, "flood", after_epoch=after_epoch)

        sink = open_slot()
        self.outbox = Outbox(4, "block")
        self.sender = Sender(self.outbox, sink, open_slot, encode, WeightsReader(self._client, keys))
        made = TrueSlot(slot, ENVS, np.random.default_rng(0), count(1), epoch=sink.epoch).fragment(STEPS)[0]
        self.fragments, self.size_bytes = fragments, len(encode(made))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._feed, args=(made,))

    def start(self) -> "Flood":
        self.sender.start()
        self._thread.start()
        return self

    def _feed(self, made: Any) -> None:
        for seq in range(1, self.fragments + 1):
            meta = replace(made.meta, seq=seq, produced=seq * STEPS * ENVS)
            while not self.outbox.put(replace(made, meta=meta), 0.1):
                if self._ending.is_set():
                    return

    def close(self) -> None:
        self._ending.set()
        self._thread.join(10.0)
        self.sender.close()
        self._client.close()


class Rig:
    """A run, its learner in this process, and a data server of 64 MB that is its own."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.servers = EmbeddedRedis.start(folder / "redis", data_memory_mb=64)
        self.data: Any = connect(self.servers.data_url)
        self.broker: Any = connect(self.servers.broker_url)
        config = RunConfig.model_validate(
            {
                "name": "test",
                "environment": {"name": "point", "num_envs": ENVS},
                "algorithm": {"name": "td3", "options": {"hidden": [8]}},
                "replay": {"capacity": 20_000, "batch_size": 16},
                "rate_limit": {"samples_per_insert": None, "min_size_to_sample": 10**6},
                "learner": {"device": "cpu", "checkpoint_interval_s": 3600},
                "evaluation": {"interval_s": None},
                "metrics": [],
                **sections,
            }
        )
        run = Run("r1", RUN, folder / "run", config, SPEC)
        run.folder.mkdir()
        make_folders(run)
        self.keys = RunKeys(RUN)
        claim = Claim.take(self.data, self.keys.claim("learner"), "test", 600.0)
        record = RunRecord("r1", RUN, state="running")
        RunRegistry(self.broker).add(record)
        urls = self.servers.broker_url, self.servers.data_url
        self.session = Session(run, *urls, self.broker, self.data, self.keys, claim, Spawner(), record)
        self.trainer, self._writers = learner.build(self.session, "cpu", False, lambda line: None)
        self.trainer.parts.consumer.start()
        self.trainer.parts.link.start()
        self.trainer.publish()
        self.floods: list[Flood] = []
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._train)

    def flood(self, slot: str, fragments: int) -> Flood:
        self.floods.append(Flood(self.servers.data_url, slot, fragments).start())
        return self.floods[-1]

    def train(self) -> Trainer:
        self._thread.start()
        return self.trainer

    def _train(self) -> None:
        self.trainer.train(self._stop)

    def stored(self) -> int:
        """Bytes of all fragments in the streams, as the server has them."""
        size = 0
        for slot in self.data.hkeys(self.keys.slots):
            entries = self.data.xrange(self.keys.stream(slot.decode()))
            size += sum(len(fields[b"f"]) for _, fields in entries)
        return size

    def board(self) -> dict[str, Any]:
        return dict(View().snapshot(self.session.record))

    def close(self) -> None:
        for flood in self.floods:
            flood.close()
        self._stop.set()
        if self._thread.ident:
            self._thread.join(20.0)
        self.trainer.parts.consumer.close()
        self.trainer.parts.link.stop(5.0)
        self.trainer.close()
        self._writers.close()
        self.data.close()
        self.broker.close()
        self.servers.stop()


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**sections: Any) -> Rig:
        made.append(Rig(tmp_path, **sections))
        monkeypatch.setenv("CLAWQ_BROKER_URL", made[0].servers.broker_url)
        monkeypatch.setenv("CLAWQ_DATA_URL", made[0].servers.data_url)
        return made[0]

    yield make
    for rig in made:
        rig.close()


def assert_all_was_learned(rig: Rig, *floods: Flood) -> None:
    """Ledger exact to the step: what was produced is in the ring, and nothing is missing without a name."""
    consumer = rig.trainer.parts.consumer
    counts, steps = consumer.counts, STEPS * ENVS
    sent = sum(flood.fragments for flood in floods)
    assert consumer.check_valid() == (True, "")
    assert (counts.committed, counts.committed_steps, counts.produced_steps) == (sent, sent * steps, sent * steps)
    assert (counts.unaccounted_steps, counts.gaps, counts.rejected, counts.dropped_steps) == (0, {}, {}, {})


@pytest.mark.timeout(120)
def test_C58_a_full_server_pauses_actors_with_that_reason_and_flow_resumes_by_itself_with_nothing_lost(
    make_rig: Callable[..., Rig], eventually: Eventually
) -> None:
    rig = make_rig(redis={"window_bytes": 30_000_000, "stream_bytes": 34_000_000})
    # Somebody else's: the streams' share of the memory is not there.
    for number in range(52):
        rig.data.set(f"somebody-elses-{number}", bytes(1_000_000))
    floods = [rig.flood("a", 70), rig.flood("b", 70)]
    eventually(lambda: all(flood.sender.waited_s["full"] > 0 for flood in floods), "actors wait: out of memory", 60)
    eventually(lambda: "OOM" in (rig.trainer.parts.link.note or ""), "the learner says so", 20)
    eventually(lambda: "OOM" in note(rig), "`clawq status` says so", 20)
    used, most = memory_bytes(rig.data)
    assert used < 1.1 * most
    trainer = rig.train()
    eventually(lambda: trainer.parts.consumer.counts.committed == 140, "all arrived", 60)
    assert_all_was_learned(rig, *floods)
    assert all(flood.sender.view.ended is None and flood.sender.view.failure is None for flood in floods)
    eventually(lambda: trainer.parts.link.note is None, "all is well again", 20)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_stuck_optional_reader_never_raises_memory_and_is_told_what_it_missed(
    make_rig: Callable[..., Rig], eventually: Eventually
) -> None:
    rig = make_rig(redis={"window_bytes": 1_000_000, "stream_bytes": 8_000_000})
    reading = connect(rig.servers.data_url)
    stuck = StreamReader(reading, rig.keys, "stuck")
    stuck.read(0.0)
    trainer, peak = rig.train(), 0
    flood = rig.flood("a", 200)
    first = 0
    while trainer.parts.consumer.counts.committed < 200:
        peak = max(peak, memory_bytes(rig.data)[0])
        if not first:
            # It reads once, and then no more.
            first = sum(not entry.missed for entry in stuck.read(0.2))
        assert rig.stored() <= 8_000_000
        threading.Event().wait(0.05)
    assert 200 * flood.size_bytes > 4 * 8_000_000
    assert peak < 8_000_000 + 12_000_000, "streams within their budget, and what an empty server takes"
    entries: list[Any] = []
    eventually(lambda: _read_on(stuck, entries) and entries[-1].ordinal == 200, "it reads on", 20)
    missed = sum(entry.missed for entry in entries)
    assert missed > 100
    assert first + missed + sum(not entry.missed for entry in entries) == 200, "exactly"
    assert_all_was_learned(rig, flood)
    reading.close()


def note(rig: Rig) -> str:
    return str(rig.board().get("note"))


def _read_on(reader: StreamReader, entries: list[Any]) -> bool:
    entries += reader.read(0.2)
    return bool(entries)


@pytest.mark.timeout(120)
def test_a_stuck_required_reader_pushes_back_inside_the_budget_and_is_named_until_it_is_dropped(
    make_rig: Callable[..., Rig], eventually: Eventually
) -> None:
    rig = make_rig(redis={"window_bytes": 1_000_000, "stream_bytes": 8_000_000})
    reading = connect(rig.servers.data_url)
    keeper = StreamReader(reading, rig.keys, "keeper", required=True)
    keeper.read(0.0)
    trainer, flood = rig.train(), rig.flood("a", 100)
    eventually(lambda: "keeper is required" in note(rig), "the one that reads nothing is named", 30)
    assert flood.sender.view.paced
    assert rig.stored() <= 1_000_000 + flood.size_bytes, "one window"
    # Now it takes everything over, and keeps nothing.
    ending = threading.Event()

    def take_over() -> None:
        while not ending.is_set():
            keeper.read(0.1)
            keeper.acknowledge(keeper.cursors())

    thread = threading.Thread(target=take_over)
    thread.start()
    eventually(lambda: "checkpoint of reader keeper" in note(rig), "what it holds up is told", 30)
    assert 4_000_000 < rig.stored() <= 8_000_000
    figures = rig.board()
    assert figures["reader/keeper/uncheckpointed_bytes"] >= 4_000_000 > figures["reader/keeper/unread_bytes"]
    ending.set()
    thread.join()
    keeper.close()
    eventually(lambda: "clawq reader drop r1 keeper" in note(rig), "it is gone: what to do is told")
    assert trainer.parts.consumer.counts.committed < 100
    Readers(rig.data, rig.keys).leave("keeper")
    eventually(lambda: trainer.parts.consumer.counts.committed == 100, "the rest flows", 60)
    assert rig.stored() <= 8_000_000
    assert_all_was_learned(rig, flood)
    reading.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_checkpoints_that_fail_stop_the_streams_at_their_budget_and_never_fill_the_server(
    make_rig: Callable[..., Rig], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(redis={"window_bytes": 1_000_000, "stream_bytes": 8_000_000})
    checkpoints, refused = rig.trainer.parts.checkpoints, []

    def disk_full(*anything: Any, **more: Any) -> None:
        refused.append(anything)
        raise CheckpointNotWritten("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoints, "save", disk_full)
        trainer, flood = rig.train(), rig.flood("a", 100)
        eventually(lambda: "checkpoint of the learner" in note(rig), "what holds actors up is told", 30)
        eventually(lambda: len(refused) >= 3, "it is tried again and again", 20)
        assert flood.sender.view.paced
        assert 3_000_000 < rig.stored() <= 8_000_000
        assert flood.sender.waited_s["full"] == 0, "the server was never full"
        assert trainer.parts.consumer.counts.committed < 100
    eventually(lambda: trainer.parts.consumer.counts.committed == 100, "the disk is back: all flows", 60)
    assert rig.stored() <= 8_000_000
    assert_all_was_learned(rig, flood)


def test_C58_a_server_that_evicts_is_refused_with_the_reason(own_servers: EmbeddedRedis) -> None:
    client: Any = connect(own_servers.data_url)
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnfit, match=r"allkeys-lru.*silently delete keys.*noeviction"):
        check_server(client, "data")
    client.close()


@given(st.integers(1_000_000, 10**9), st.integers(65_536, 10**7), st.integers(0, 1000), st.integers(0, 4_000_000))
def test_windows_leave_room_for_what_is_taken_over_wherever_that_is_possible(
    budget: int, wanted: int, slots: int, largest: int
) -> None:
    window = fitting_window(wanted, budget, slots, largest)
    assert LEAST_WINDOW_BYTES <= window <= wanted
    if window > LEAST_WINDOW_BYTES:
        assert room(budget, window, slots, largest) >= budget // 2


def test_streams_give_way_by_as_much_as_the_server_is_too_full() -> None:
    assert squeezed_budget(100, 90, 10**9, 0) == 100, "no limit"
    assert squeezed_budget(100, 90, 899, 1000) == 100
    assert squeezed_budget(100, 90, 950, 1000) == 40
    assert squeezed_budget(100, 90, 1000, 1000) == 0


def test_whoever_holds_trimming_up_is_named_the_archive_too() -> None:
    text = full_text([ReaderRecord(ARCHIVE, False)], 7_000_000, 8_000_000, "r1")
    assert text == (
        "actors wait: the streams are full (7 MB, and 8 MB with every window full), and trimming waits for a "
        "checkpoint of the archive"
    )
    both = full_text([ReaderRecord(LEARNER, True), ReaderRecord("keeper", True)], 1, 2, "r1")
    assert "of the learner and reader keeper, which is not there; start it again" in both
