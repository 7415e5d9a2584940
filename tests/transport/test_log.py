"""The archive's reader over a real Redis, and streams and archive read as one log."""

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from clawq.core import Entry
from clawq.errors import LogGone
from clawq.testing.experience import RUN, TrueSlot
from clawq.transport.archive import Archive
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.archiver import Archiver
from clawq.transport.client import connect
from clawq.transport.codec import encode
from clawq.transport.keys import ARCHIVE, RunKeys
from clawq.transport.log import RunLog
from clawq.transport.readers import StreamReader
from clawq.transport.segment_index import segment_paths
from clawq.transport.server import EmbeddedRedis

Eventually = Callable[..., None]
LIMITS = ArchiveLimits(segment_bytes=20_000)


class Actors:
    """Slots that send fragments into the streams of a run."""

    def __init__(self, client: Any, keys: RunKeys, slots: int = 3) -> None:
        self.client, self.keys = client, keys
        self.rng, ids = np.random.default_rng(0), itertools.count(1)
        self.slots = [TrueSlot(f"w.{i}", 2, self.rng, ids, epoch=1000 + i) for i in range(slots)]
        self.sent: list[Entry] = []

    def send(self, count: int) -> list[Entry]:
        sent: list[Entry] = []
        for _ in range(count):
            actor = self.slots[int(self.rng.integers(len(self.slots)))]
            fragment, _ = actor.fragment(int(self.rng.integers(3, 12)))
            made_ms = 1_000_000 + 10 * (len(self.sent) + len(sent))
            fragment = replace(fragment, meta=replace(fragment.meta, created_ms=made_ms))
            entry = Entry(actor.name, actor.epoch, actor.seq, bytes(encode(fragment)))
            self.client.hset(self.keys.slots, entry.slot, json.dumps({"worker": "w", "epoch": entry.epoch}))
            self.client.xadd(self.keys.stream(entry.slot), {"f": entry.payload}, id=f"{entry.epoch}-{entry.seq}")
            sent.append(entry)
        self.sent += sent
        return sent

    def trim(self, kept: list[Entry]) -> None:
        """Leave only these in the streams."""
        for actor in self.slots:
            ids = [entry.seq for entry in kept if entry.slot == actor.name]
            first = f"{actor.epoch}-{ids[0]}" if ids else f"{actor.epoch + 1}-0"
            self.client.xtrim(self.keys.stream(actor.name), minid=first, approximate=False)


@pytest.fixture
def actors(data_client: redis.Redis, run_keys: RunKeys) -> Actors:
    return Actors(data_client, run_keys)


@pytest.fixture
def archive(data_client: redis.Redis, run_keys: RunKeys, tmp_path: Path) -> Iterator["Archiving"]:
    made = Archiving(data_client, run_keys, tmp_path / "archive")
    yield made
    made.close()


class Archiving:
    """Archivers of one run, one after the other."""

    def __init__(self, client: redis.Redis, keys: RunKeys, folder: Path) -> None:
        self.client, self.keys, self.folder = client, keys, folder
        self.now: Archiver | None = None

    def start(self, on_full: Any = "gap") -> Archiver:
        writer = ArchiveWriter(self.folder, RUN, LIMITS)
        reader = StreamReader(self.client, self.keys, ARCHIVE, writer.cursors())
        self.now = Archiver(reader, writer, on_full).start()
        return self.now

    def close(self) -> None:
        if self.now is not None:
            self.now.close()

    def read(self) -> Archive:
        return Archive(self.folder, RUN)

    def log(self, streams: bool = True) -> RunLog:
        return RunLog((self.client, self.keys) if streams else None, self.read())


def ids(entries: "list[Entry]") -> list[tuple[str, int, int]]:
    return [(entry.slot, entry.epoch, entry.seq) for entry in entries]


def covers(archiver: Archiver, entries: list[Entry]) -> bool:
    """Whether all these may be trimmed for all that the archive cares."""
    holds = archiver.holds() or {}
    return all(_number(holds.get(entry.slot, "0-0")) >= (entry.epoch, entry.seq) for entry in entries)


def _number(text: str) -> tuple[int, int]:
    epoch, seq = text.split("-")
    return int(epoch), int(seq)


def test_everything_sent_is_archived_once_over_restarts(
    actors: Actors, archive: Archiving, eventually: Eventually
) -> None:
    actors.send(20)
    first = archive.start()
    actors.send(20)
    eventually(lambda: covers(first, actors.sent), "all is on the disk", 20)
    archive.close()
    # What is sent while nobody archives, and what was archived but is still in the streams
    actors.send(10)
    archive.start()
    archive.close()
    found = archive.read()
    assert found.entries == 50
    assert ids(list(archive.log(streams=False).entries())) == ids(actors.sent)
    mirrored: Mapping[bytes, bytes] = actors.client.hgetall(actors.keys.cursors(ARCHIVE))
    assert {slot.decode(): cursor.decode() for slot, cursor in mirrored.items()} == found.cursors()


def test_streams_are_trimmed_only_behind_what_is_on_the_disk(
    actors: Actors, archive: Archiving, eventually: Eventually
) -> None:
    writer = ArchiveWriter(archive.folder, RUN, LIMITS)
    archiver = Archiver(StreamReader(actors.client, actors.keys, ARCHIVE), writer)
    archive.now = archiver
    sent = actors.send(12)
    reader = StreamReader(actors.client, actors.keys)
    while reader.unread_entries() or not reader.cursors():
        if not reader.read(0.2):
            break
    # Given a learner that has checkpointed all, and an archive that has nothing yet
    assert archiver.holds() == {}
    assert reader.trim(reader.cursors(), 0, 0, {ARCHIVE: archiver.holds() or {}}) == 0
    assert reader.trimming.holding == (ARCHIVE,), "and it is named"
    archiver.start()
    eventually(lambda: covers(archiver, sent), "all is on the disk", 20)
    assert reader.trim(reader.cursors(), 0, 0, {ARCHIVE: archiver.holds() or {}}) == 12


@pytest.mark.parametrize("on_full", ["gap", "block"])
def test_a_full_disk_is_told_and_the_policy_decides_what_the_streams_keep(
    actors: Actors,
    archive: Archiving,
    on_full: str,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    archiver = archive.start(on_full)
    early = actors.send(10)
    eventually(lambda: covers(archiver, early), "the first ones are on the disk", 20)
    real = os.pwrite

    def refuse(fd: int, content: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    late = actors.send(10)
    eventually(lambda: archiver.trouble is not None, "the refusal is told", 20)
    assert "No space left on device" in str(archiver.trouble)
    assert "cannot be written" in caplog.text
    holds = archiver.holds()
    if on_full == "gap":
        assert holds is None
        # The streams are trimmed all the same, and what went is missing and counted
        actors.trim(late[8:])
    else:
        assert holds == archive.read().cursors()
    monkeypatch.setattr(os, "pwrite", real)
    # A gap shows by the next number of its slot
    last = actors.send(15)
    eventually(lambda: covers(archiver, last), "the rest is on the disk", 20)
    assert archiver.trouble is None
    archive.close()
    found = ids(list(archive.log(streams=False).entries()))
    missing = set(ids(actors.sent)) - set(found)
    assert len(found) == len(set(found))
    # What it had read already when the disk refused is not lost either
    assert missing <= (set(ids(late[:8])) if on_full == "gap" else set())
    assert archiver.metrics()["archive/gap_fragments"] == len(missing)


def test_redis_may_come_back_empty_under_the_archive(
    own_servers: EmbeddedRedis, tmp_path: Path, restart_data: Callable[[EmbeddedRedis], None], eventually: Eventually
) -> None:
    client, keys = connect(own_servers.data_url), RunKeys(RUN)
    actors, archive = Actors(client, keys), Archiving(client, keys, tmp_path / "archive")
    archiver = archive.start()
    before = actors.send(20)
    eventually(lambda: covers(archiver, before), "all is on the disk", 20)
    restart_data(own_servers)
    for actor in actors.slots:
        actor.begin_epoch()
    after = actors.send(20)
    eventually(lambda: covers(archiver, after), "all of the new server is on the disk", 30)
    archive.close()
    client.close()
    # The log outlived the server
    assert ids(list(archive.log(streams=False).entries())) == ids(before + after)


@pytest.fixture
def split(actors: Actors, archive: Archiving) -> RunLog:
    """40 fragments: 30 are archived, the last 20 are in the streams."""
    actors.send(30)
    archive.start()
    archive.close()
    actors.send(10)
    actors.trim(actors.sent[20:])
    return archive.log()


def test_the_log_is_the_same_wherever_it_is_read_from(split: RunLog, actors: Actors) -> None:
    assert list(split.entries()) == actors.sent
    places = [(found.slot, found.seq, found.place) for found in split.find_all()]
    in_streams = {(entry.slot, entry.seq) for entry in actors.sent[30:]}
    assert all((place == "streams") == ((slot, seq) in in_streams) for slot, seq, place in places)
    held = split.held()
    assert sum(one.archived for one in held.values()) == 30
    assert {slot: one.first for slot, one in held.items()} == {slot.name: (slot.epoch, 1) for slot in actors.slots}
    assert split.losses == []


def test_parts_of_the_log_are_chosen_by_slot_time_and_id(split: RunLog, actors: Actors) -> None:
    sent = actors.sent
    one = [entry for entry in sent if entry.slot == "w.1"]
    assert list(split.entries(slots=["w.1"])) == one
    times = [found.made_ms for found in split.find_all()]
    assert list(split.entries(since_ms=times[7], until_ms=times[35])) == sent[7:35]
    middle = f"{one[4].epoch}-{one[4].seq}"
    assert list(split.entries(slots=["w.1"], after={"w.1": middle})) == one[5:]
    assert list(split.entries(upto={"w.1": middle})) == one[:5]


def test_one_fragment_is_found_and_one_that_is_gone_is_answered_with_what_is_held(
    split: RunLog, actors: Actors, archive: Archiving
) -> None:
    for entry in (actors.sent[0], actors.sent[25], actors.sent[-1]):
        assert split.get(entry.slot, entry.epoch, entry.seq) == entry
    both = actors.sent[25]
    assert [found.place for found in split.find(both.slot, both.epoch, both.seq)] == ["archive", "streams"]
    with pytest.raises(LogGone, match=r"does not hold fragment w.0 1000-999; of w.0 it holds 1000-1 to 1000-"):
        split.get("w.0", 1000, 999)
    with pytest.raises(LogGone, match=r"holds slots w.0, w.1, w.2"):
        split.get("nobody", 1, 1)
    # It reaches back to the run's beginning, whenever that was
    split.require(since_ms=5, slots=["w.0"])
    streams = RunLog((archive.client, archive.keys), None)
    with pytest.raises(LogGone, match="does not reach back to"):
        streams.require(since_ms=5)
    gone = actors.sent[0]
    with pytest.raises(LogGone):
        streams.get(gone.slot, gone.epoch, gone.seq)
    with pytest.raises(LogGone, match="holds nothing"):
        RunLog(None, None).get("w.0", 1, 1)


def test_what_is_damaged_on_disk_comes_from_the_streams_or_is_told(
    split: RunLog, actors: Actors, archive: Archiving
) -> None:
    gone, kept = actors.sent[3], actors.sent[25]
    for entry in (gone, kept):
        found = archive.read().find(entry.slot, entry.epoch, entry.seq)
        assert found is not None
        with found.path.open("r+b") as file:
            file.seek(found.record.body + 3)
            file.write(b"\xff\xff\xff\xff")
    log = archive.log()
    assert list(log.entries()) == [entry for entry in actors.sent if entry is not gone]
    assert log.lost == 1
    assert f"{gone.slot} {gone.epoch}-{gone.seq}" in log.losses[0]
    assert log.get(kept.slot, kept.epoch, kept.seq) == kept


def test_what_is_trimmed_while_the_log_is_read_is_read_from_the_archive(
    actors: Actors, archive: Archiving, eventually: Eventually
) -> None:
    actors.send(10)
    archive.start()
    archive.close()
    actors.send(20)
    reading = archive.log().entries()
    seen = [next(reading) for _ in range(12)]
    # Given that all the rest moves from the streams to the archive meanwhile, and more comes
    archive.start()
    archive.close()
    actors.send(5)
    actors.trim(actors.sent[30:])
    seen += list(reading)
    assert ids(seen) == ids(actors.sent)
    assert len(segment_paths(archive.folder)) >= 2
