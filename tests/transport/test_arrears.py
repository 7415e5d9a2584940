"""What only an archive has is read before the streams are read on: each entry once, in its order; over a real Redis."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from clawq.core import BYGONE, OVER, Entry, Vanished
from clawq.errors import StoreUnavailable
from clawq.transport import archive as archive_module
from clawq.transport import arrears as module
from clawq.transport.archive import Archive
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.arrears import Arrears
from clawq.transport.control import delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.read_back import slot_entries
from clawq.transport.readers import StreamReader
from clawq.transport.restarts import bear, server_of
from clawq.transport.segment_index import index_path, segment_paths
from clawq.transport.stream import StreamWriter, id_text

Id = tuple[str, int, int]


class Shop:
    """One run's streams and archive, and readers that go on where one before them stood.

    Attributes:
        seen: slot -> newest id that was read.
        lost: what the last reader was told of: slot -> entries that are lost with their server.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, folder: Path, limits: ArchiveLimits) -> None:
        self.client, self.keys, self._folder = client, keys, folder
        self.writer = ArchiveWriter(folder, keys.tag, limits)
        self.seen: dict[str, tuple[int, int]] = {}
        self.arrears: Arrears | None = None
        self.lost: dict[str, int] = {}
        bear(client, keys)

    @property
    def server(self) -> str:
        return server_of(self.client, self.keys)

    def empty(self) -> None:
        """The server forgets the run."""
        delete_run(self.client, self.keys)
        bear(self.client, self.keys)

    def archive(self, slot: str, epoch: int, seqs: range, size: int = 10) -> list[Id]:
        for seq in seqs:
            self.writer.append(Entry(slot, epoch, seq, f"{slot} {seq}".encode().ljust(size)))
        self.writer.sync()
        return [(slot, epoch, seq) for seq in seqs]

    def reader(self, server: str = "", ordinals: dict[str, int] | None = None, **unread: int) -> StreamReader:
        """One that goes on from what was seen."""
        cursors = {slot: id_text(one) for slot, one in self.seen.items()}
        reader = StreamReader(
            self.client, self.keys, cursors=cursors, server=server, unread=unread, ordinals=ordinals or {}
        )
        seen: Callable[[str], tuple[int, int]] = lambda slot: self.seen.get(slot, (0, 0))  # noqa: E731
        self.arrears = Arrears(self.client, self.keys, partial(Archive, self._folder, self.keys.tag), seen)
        reader.begin_with(self.arrears)
        reader.tell_server(self._note)
        return reader

    def _note(self, server: str, found: dict[str, Vanished] | Any) -> None:
        self.lost = {slot: one.lost for slot, one in found.items()}

    def read(self, reader: StreamReader, most: int = 1000) -> list[Entry]:
        """So many, or until nothing more comes."""
        entries: list[Entry] = []
        while len(entries) < most and (read := reader.read(0.05)):
            entries += read
            self.seen |= {one.slot: (one.epoch, one.seq) for one in read}
        return entries


@pytest.fixture
def shop(data_client: redis.Redis, run_keys: RunKeys, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(data_client, run_keys, tmp_path / "archive", ArchiveLimits(segment_bytes=2000, compress=False))
    yield shop
    shop.writer.close()


def ids(entries: list[Entry]) -> list[Id]:
    return [(one.slot, one.epoch, one.seq) for one in entries]


def send(writer: StreamWriter, seqs: range) -> list[Id]:
    for seq in seqs:
        writer.send(seq, f"{writer.slot} {seq}".encode())
    return [(writer.slot, writer.epoch, seq) for seq in seqs]


def test_of_streams_that_are_gone_the_archive_is_read_from_the_cursor_on_and_then_the_new_ones(shop: Shop) -> None:
    known, other = shop.archive("a", 100, range(1, 8)), shop.archive("b", 110, range(1, 4))
    before = shop.server
    shop.seen["a"] = (100, 4)
    shop.empty()
    new = send(StreamWriter.open(shop.client, shop.keys, "a", "w"), range(1, 3))
    # Five were acknowledged behind the cursor, and the archive has three
    reader = shop.reader(before, a=5)
    entries = shop.read(reader)
    assert ids(entries) == [*known[4:], *other, *new]
    assert [one.payload.strip() for one in entries[:4]] == [b"a 5", b"a 6", b"a 7", b"b 1"]
    assert [one.stream for one in entries[:6]] == [BYGONE] * 6
    assert [one.ordinal for one in entries] == [0] * 6 + [1, 2]
    assert shop.lost["a"] == 2
    assert shop.arrears is not None
    assert shop.arrears.slots == {}


def test_what_is_in_both_is_read_once_from_its_stream(shop: Shop) -> None:
    writer = StreamWriter.open(shop.client, shop.keys, "a", "w")
    sent = send(writer, range(1, 9))
    shop.archive("a", writer.epoch, range(1, 7))
    shop.seen["a"] = (writer.epoch, 3)
    # On the server of the checkpoint, and where nobody knows which that was
    for server in (shop.server, ""):
        shop.seen["a"] = (writer.epoch, 3)
        entries = shop.read(shop.reader(server, {"a": 3}))
        assert ids(entries) == sent[3:]
        assert [one.ordinal for one in entries] == [4, 5, 6, 7, 8]
        assert shop.lost == {}


def test_slots_that_are_still_to_come_from_the_archive_count_as_being_there(shop: Shop) -> None:
    shop.archive("a", 100, range(1, 4))
    shop.archive("a", 200, range(1, 3))
    shop.archive("b", 110, range(1, 3))
    reader, told = shop.reader(), []
    reader.tell_slots(lambda slots: told.append(dict(slots.epochs)))
    assert len(shop.read(reader, 1)) == 1
    assert told[-1] == {"a": 200, "b": 110}
    shop.read(reader)
    reader._discovery.hasten()
    shop.read(reader)
    assert told[-1] == {}


def test_of_a_server_that_lost_the_end_of_a_stream_that_comes_from_the_archive_in_its_place(shop: Shop) -> None:
    shop.archive("a", 100, range(1, 9))
    before = shop.server
    shop.empty()
    # Given an older state of it: the checkpoint goes up to 2, the stream up to 5, and there a new writer went on
    for epoch, seqs in ((100, range(1, 6)), (200, range(1, 3))):
        shop.client.hset(shop.keys.slots, "a", f'{{"worker": "w", "epoch": {epoch}}}')
        for seq in seqs:
            shop.client.xadd(shop.keys.stream("a"), {"f": b"x"}, id=f"{epoch}-{seq}")
    shop.seen["a"] = (100, 2)
    entries = shop.read(shop.reader(before))
    assert ids(entries) == [*(("a", 100, seq) for seq in range(3, 9)), ("a", 200, 1), ("a", 200, 2)]
    assert [one.stream == BYGONE for one in entries] == [False] * 3 + [True] * 3 + [False] * 2


def test_what_was_trimmed_behind_a_checkpoint_that_is_spoiled_comes_from_the_archive(shop: Shop) -> None:
    stays, goes = (StreamWriter.open(shop.client, shop.keys, slot, "w") for slot in ("stays", "goes"))
    sent, gone = send(stays, range(1, 9)), send(goes, range(1, 4))
    shop.archive("stays", stays.epoch, range(1, 9))
    shop.archive("goes", goes.epoch, range(1, 4))
    goes.close()
    first = shop.reader()
    assert len(shop.read(first)) == 11
    upto = {"stays": f"{stays.epoch}-6", "goes": f"{goes.epoch}-3"}
    first.trim(upto, 0)
    assert first.sweep() == ["goes"]
    assert shop.client.xlen(shop.keys.stream("stays")) == 2
    # When somebody goes on from an older one
    shop.seen = {"stays": (stays.epoch, 2), "goes": (goes.epoch, 1)}
    entries = shop.read(shop.reader(shop.server, {"stays": 2, "goes": 1}))
    assert sorted(ids(entries)) == sorted([*sent[2:], *gone[1:]])
    # Then each counts for its stream, whatever became of that
    assert {one.slot: one.stream.born for one in entries} == {"stays": stays.epoch, "goes": OVER.born}
    assert [one.ordinal for one in entries if one.slot == "stays"] == [3, 4, 5, 6, 7, 8]
    assert not any(one.missed for one in entries)


def test_damage_and_segments_that_are_gone_are_told_and_counted(
    shop: Shop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "_HELD", 1)
    shop.archive("a", 100, range(1, 31), size=900)
    paths = segment_paths(shop.writer.folder)
    assert len(paths) > 8
    # Given a flipped bit in the first record, and a segment that goes while they are read
    with paths[0].open("r+b") as file:
        content = file.read()
        file.seek(content.index(b"a 1 "))
        file.write(b"A")
    reader = shop.reader()
    with caplog.at_level(logging.WARNING):
        entries = shop.read(reader, 1)
        paths[5].unlink()
        index_path(paths[5]).unlink()
        entries += shop.read(reader)
    whole = [one.seq for one in entries if not one.missed]
    assert entries[0] == Entry("a", 100, 1, b"", missed=1, stream=BYGONE)
    assert whole == sorted(whole)
    assert len(whole) + sum(one.missed for one in entries) == 30
    assert sum(one.missed for one in entries) > 1
    assert "30 fragments of 1 slots are in the archive alone" in caplog.text
    assert "its record is damaged" in caplog.text
    assert "of a went with the archive's oldest segments" in caplog.text


def test_an_archive_that_does_not_reach_back_to_the_cursor_says_so(
    data_client: redis.Redis, run_keys: RunKeys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(data_client, run_keys, tmp_path / "archive", ArchiveLimits(2000, 8000, False))
    archived = shop.archive("a", 100, range(1, 31), size=1000)
    dropped = shop.writer.dropped_entries
    assert dropped > 6
    shop.seen["a"] = (100, 5)
    with caplog.at_level(logging.WARNING):
        entries = shop.read(shop.reader())
    assert ids(entries) == archived[dropped:]
    assert "(of a after 100-5)" in caplog.text
    shop.writer.close()


def test_redis_away_in_their_midst_changes_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.archive("a", 100, range(1, 9))
    shop.client.hset(shop.keys.slots, "a", '{"worker": "w", "epoch": 100}')
    for seq in range(1, 6):
        shop.client.xadd(shop.keys.stream("a"), {"f": b"x"}, id=f"100-{seq}")
    given, failures = slot_entries, iter([0, 2])

    def failing(*words: Any) -> Iterator[Entry]:
        fails_after = next(failures, None)
        for number, entry in enumerate(given(*words)):
            if number == fails_after:
                raise StoreUnavailable("away")
            yield entry

    monkeypatch.setattr(module, "slot_entries", failing)
    reader, entries = shop.reader(), list[Entry]()
    while len(entries) < 10:
        try:
            entries += shop.read(reader, 1)
        except StoreUnavailable:
            entries += [Entry("away", *shop.seen.get("a", (0, 0)), b"")]
    assert [one.seq for one in entries if one.slot == "a"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one.seq for one in entries if one.slot == "away"] == [0, 2]
