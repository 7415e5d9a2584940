"""The archive on disk: what was written comes back, whatever a crash or a bad disk does to the files."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clawq.core import Entry
from clawq.errors import ArchiveDamaged, ArchiveUnfit
from clawq.testing.experience import RUN, TrueSlot
from clawq.transport import archive_writer
from clawq.transport.archive import Archive
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.codec import encode
from clawq.transport.segment_index import index_path, segment_paths

SMALL = ArchiveLimits(segment_bytes=20_000)


def made(count: int, slots: int = 3, seed: int = 0, start_ms: int = 1_000_000) -> list[Entry]:
    """Fragments of several slots as they come off the streams, their headers' times growing."""
    rng, ids = np.random.default_rng(seed), itertools.count(1)
    actors = [TrueSlot(f"w.{i}", 2, rng, ids, epoch=1000 + i) for i in range(slots)]
    entries = []
    for index in range(count):
        actor = actors[int(rng.integers(slots))]
        fragment, _ = actor.fragment(int(rng.integers(3, 12)))
        fragment = replace(fragment, meta=replace(fragment.meta, created_ms=start_ms + 10 * index))
        entries.append(Entry(actor.name, actor.epoch, actor.seq, bytes(encode(fragment))))
    return entries


def written(folder: Path, entries: list[Entry], limits: ArchiveLimits = SMALL) -> Path:
    writer = ArchiveWriter(folder, RUN, limits)
    for entry in entries:
        assert writer.append(entry)
    writer.close()
    return folder


def held(archive: Archive) -> dict[str, list[tuple[int, int, bytes]]]:
    """Slot -> what the archive gives of it, in its order."""
    return {
        slot: [(one.record.epoch, one.record.seq, archive.read(one)) for one in archive.records(slot)]
        for slot in archive.slots()
    }


def expected(entries: list[Entry]) -> dict[str, list[tuple[int, int, bytes]]]:
    slots = sorted({entry.slot for entry in entries})
    return {slot: [(e.epoch, e.seq, e.payload) for e in entries if e.slot == slot] for slot in slots}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`full(n)`: the disk takes n bytes more and no further; None: it has room again."""
    left: list[int | None] = [None]
    real = os.pwrite

    def pwrite(fd: int, content: memoryview, offset: int) -> int:
        if left[0] is None:
            return real(fd, content, offset)
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(fd, content[: left[0]], offset)
        left[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", pwrite)
    return lambda room: left.__setitem__(0, room)


def test_what_was_written_comes_back_from_many_segments(tmp_path: Path) -> None:
    entries = made(100)
    archive = Archive(written(tmp_path / "a", entries), RUN)
    assert len(archive.segments) > 3
    assert held(archive) == expected(entries)
    assert archive.entries == 100
    assert archive.size_bytes == sum(len(entry.payload) for entry in entries)
    assert archive.cursors() == {slot: f"{of[-1][0]}-{of[-1][1]}" for slot, of in expected(entries).items()}
    found = archive.find(entries[77].slot, entries[77].epoch, entries[77].seq)
    assert found is not None
    assert archive.read(found) == entries[77].payload
    assert archive.find("w.0", 1000, 10_000) is None
    assert archive.find("nobody", 1, 1) is None


def test_columns_are_compressed_and_noise_is_stored_as_it_is(tmp_path: Path) -> None:
    noise = Entry("w.0", 1, 1, np.random.default_rng(0).bytes(50_000))
    zeros = Entry("w.0", 1, 2, bytes(50_000))
    archive = Archive(written(tmp_path / "a", [noise, zeros]))
    raw, packed = (one.record for one in archive.records("w.0"))
    assert raw.stored == 50_000
    assert packed.stored < 1_000
    assert held(archive) == expected([noise, zeros])
    plain = Archive(written(tmp_path / "b", [zeros], ArchiveLimits(compress=False)))
    assert next(plain.records("w.0")).record.stored == 50_000


def test_a_lost_or_damaged_index_is_made_again_from_the_segment(tmp_path: Path) -> None:
    entries = made(70)
    folder = written(tmp_path / "a", entries)
    first, second, *_ = segment_paths(folder)
    index_path(first).unlink()
    content = bytearray(index_path(second).read_bytes())
    content[-3] ^= 1
    index_path(second).write_bytes(content)
    assert held(Archive(folder, RUN)) == expected(entries)
    # And the next writer writes it again
    ArchiveWriter(folder, RUN, SMALL).close()
    assert index_path(first).exists()


@pytest.mark.parametrize("cut", [1, 30, 57, 400])
def test_a_torn_last_record_is_cut_off_and_written_again(tmp_path: Path, cut: int) -> None:
    entries = made(30)
    folder = written(tmp_path / "a", entries, ArchiveLimits())
    [segment] = segment_paths(folder)
    os.truncate(segment, segment.stat().st_size - cut)
    # A reader that looks meanwhile sees all but the last one
    assert Archive(folder).entries == 29
    writer = ArchiveWriter(folder, RUN, SMALL)
    assert "torn end" in writer.losses[0]
    last = entries[-1]
    before = [entry for entry in entries[:-1] if entry.slot == last.slot][-1]
    assert writer.cursors()[last.slot] == f"{before.epoch}-{before.seq}"
    assert writer.append(last)
    writer.close()
    assert held(Archive(folder)) == expected(entries)


@pytest.mark.parametrize("where", ["head", "name", "body"])
def test_a_damaged_record_in_the_middle_loses_only_itself_and_is_told(tmp_path: Path, where: str) -> None:
    entries = made(30)
    # Not compressed: a decompressor would notice by itself
    folder = written(tmp_path / "a", entries, ArchiveLimits(compress=False))
    [segment] = segment_paths(folder)
    hit = Archive(folder).find(entries[12].slot, entries[12].epoch, entries[12].seq)
    assert hit is not None
    at = {"head": hit.record.offset + 20, "name": hit.record.body - 1, "body": hit.record.body + 5}[where]
    with segment.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    archive = Archive(folder)
    others = [entry for entry in entries if entry is not entries[12]]
    for entry in others:
        found = archive.find(entry.slot, entry.epoch, entry.seq)
        assert found is not None
        assert archive.read(found) == entry.payload
    found = archive.find(hit.record.slot, hit.record.epoch, hit.record.seq)
    if where == "body":
        assert found is not None
        with pytest.raises(ArchiveDamaged, match=f"{hit.record.slot} {hit.record.epoch}-{hit.record.seq}"):
            archive.read(found)
        assert hit.record.name in archive.check()[0]
    else:
        assert found is None
        assert "are damaged" in archive.losses[0]
    writer = ArchiveWriter(folder, RUN, SMALL)
    assert len(writer.losses) == 1
    assert not writer.append(entries[-1])
    writer.close()


def test_a_segment_without_its_header_still_gives_its_records(tmp_path: Path) -> None:
    entries = made(70)
    folder = written(tmp_path / "a", entries)
    for path in (segment_paths(folder)[1], segment_paths(folder)[-1]):
        index_path(path).unlink(missing_ok=True)
        with path.open("r+b") as file:
            file.write(b"\x00" * 25)
    archive = Archive(folder, RUN)
    assert held(archive) == expected(entries)
    assert "does not begin as a segment" in archive.losses[0]
    writer = ArchiveWriter(folder, RUN, SMALL)
    assert not any(writer.append(entry) for entry in entries)
    assert writer.append(Entry("w.9", 5, 1, b"more"))
    writer.close()
    assert Archive(folder, RUN).entries == 71


def test_the_oldest_segments_go_when_there_is_a_bound_and_are_counted(tmp_path: Path) -> None:
    entries = made(160)
    most = 60_000
    limits = ArchiveLimits(segment_bytes=20_000, total_bytes=most)
    writer = ArchiveWriter(tmp_path / "a", RUN, limits)
    for entry in entries:
        writer.append(entry)
        largest = sum(path.stat().st_size for path in segment_paths(tmp_path / "a"))
        assert largest <= most + 5_000  # by at most a record, with which a segment passes its size
    assert writer.dropped_entries > 50
    writer.close()
    archive = Archive(tmp_path / "a", RUN)
    assert archive.entries == 160 - writer.dropped_entries
    assert archive.dropped[0] == writer.dropped_entries
    assert {slot: of[-1] for slot, of in held(archive).items()} == {s: of[-1] for s, of in expected(entries).items()}
    # And what went is known to have been written, though its records are gone
    again = ArchiveWriter(tmp_path / "a", RUN, limits)
    assert (again.entries, again.dropped_entries) == (160, writer.dropped_entries)
    again.close()


def test_a_slot_whose_records_all_went_is_not_written_twice(tmp_path: Path) -> None:
    limits = ArchiveLimits(segment_bytes=20_000, total_bytes=40_000)
    early = Entry(
        "early", 1, 1, bytes(encode(TrueSlot("early", 2, np.random.default_rng(0), itertools.count()).fragment(5)[0]))
    )
    folder = written(tmp_path / "a", [early, *made(80)], limits)
    assert "early" not in Archive(folder).slots()
    writer = ArchiveWriter(folder, RUN, limits)
    assert writer.cursors()["early"] == "1-1"
    writer.close()


def test_a_full_disk_changes_nothing_and_the_entry_may_come_again(
    tmp_path: Path, full: Callable[[int | None], None]
) -> None:
    entries = made(60)
    writer = ArchiveWriter(tmp_path / "a", RUN, SMALL)
    for index, entry in enumerate(entries):
        # Given a disk that is full in the midst of every third record, and of every head of a segment
        if index % 3 == 0:
            full(index * 7 % 300)
            with pytest.raises(OSError, match="No space"):
                writer.append(entry)
            assert writer.cursors().get(entry.slot) != f"{entry.epoch}-{entry.seq}"
        full(None)
        assert writer.append(entry)
    writer.close()
    assert len(segment_paths(tmp_path / "a")) > 2
    assert held(Archive(tmp_path / "a")) == expected(entries)
    assert Archive(tmp_path / "a").check() == []


def test_a_stream_that_began_anew_under_lower_ids_is_archived_too(tmp_path: Path) -> None:
    entries = made(20, slots=1)
    again = [replace_id(entry, 900) for entry in made(5, slots=1, seed=1)]
    folder = written(tmp_path / "a", [*entries, *again])
    writer = ArchiveWriter(folder, RUN, SMALL)
    assert writer.cursors() == {"w.0": f"900-{again[-1].seq}"}
    assert not writer.append(again[0])
    writer.close()
    assert held(Archive(folder)) == expected([*entries, *again])


def replace_id(entry: Entry, epoch: int) -> Entry:
    return Entry(entry.slot, epoch, entry.seq, entry.payload)


def test_missing_numbers_are_counted(tmp_path: Path) -> None:
    entries = made(40, slots=1)
    writer = ArchiveWriter(tmp_path / "a", RUN, SMALL)
    for entry in [*entries[:10], *entries[14:]]:
        writer.append(entry)
    assert writer.gap_fragments == 4
    writer.close()


def test_an_archive_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", made(3))
    with pytest.raises(ArchiveUnfit, match="not of ffff"):
        Archive(folder, "f" * 32)
    with pytest.raises(ArchiveUnfit):
        ArchiveWriter(folder, "f" * 32, SMALL)


def test_an_archive_has_one_writer(tmp_path: Path) -> None:
    first = ArchiveWriter(tmp_path / "a", RUN, SMALL)
    with pytest.raises(ArchiveUnfit, match="another learner"):
        ArchiveWriter(tmp_path / "a", RUN, SMALL)
    first.close()
    ArchiveWriter(tmp_path / "a", RUN, SMALL).close()


def test_only_what_is_synced_counts_as_durable(tmp_path: Path) -> None:
    now = [0.0]
    writer = ArchiveWriter(tmp_path / "a", RUN, SMALL, clock=lambda: now[0])
    [entry] = made(1, slots=1)
    writer.append(entry)
    writer.sync_if_due()
    assert writer.durable_cursors() == {}
    now[0] = archive_writer.SYNC_S
    writer.sync_if_due()
    assert writer.durable_cursors() == writer.cursors() == {"w.0": "1000-1"}
    writer.close()


def test_an_archive_is_read_while_it_is_written_and_its_oldest_segments_go(tmp_path: Path) -> None:
    entries = made(100)
    writer = ArchiveWriter(tmp_path / "a", RUN, SMALL)
    for entry in entries[:40]:
        writer.append(entry)
    archive = Archive(tmp_path / "a", RUN)
    assert held(archive) == expected(entries[:40])
    for index, entry in enumerate(entries[40:], 41):
        writer.append(entry)
        if index % 7 == 0:
            archive.refresh()
            assert held(archive) == expected(entries[:index])
    archive.refresh()
    assert held(archive) == expected(entries)
    first = archive.segments[0].path
    fresh = Archive(tmp_path / "a", RUN)
    first.unlink()
    index_path(first).unlink()
    seen = 0
    for slot in fresh.slots():
        for located in fresh.records(slot):
            if located.path == first:
                with pytest.raises(ArchiveDamaged, match="cannot be read"):
                    fresh.read(located)
                seen += 1
    archive.refresh()
    assert archive.segments[0].path != first
    writer.close()


def test_garbage_in_the_folder_is_no_segment(tmp_path: Path) -> None:
    entries = made(30)
    folder = written(tmp_path / "a", entries)
    (folder / "segment-1.clq").write_bytes(b"no number of ours")
    (folder / "notes.txt").write_text("hello")
    assert held(Archive(folder, RUN)) == expected(entries)
    shutil.rmtree(folder)
    assert Archive(folder, RUN).entries == 0
