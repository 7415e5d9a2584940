"""Snapshots of the ring: what comes back is what was there, bit for bit, whatever happened to the files meanwhile."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import fill, small_disk

from clawq.errors import CheckpointNotWritten, SnapshotInvalid
from clawq.programs.checkpoint import Checkpoints, load
from clawq.replay import columns, snapshot, snapshot_writer
from clawq.replay.layout import Layout
from clawq.replay.ring import ReplayRing
from clawq.replay.snapshot import Gap, Owner, check_fits, load_manifest, restore_rows
from clawq.replay.snapshot_writer import SnapshotWriter
from clawq.specs import ArraySpec
from clawq.testing.experience import SPEC, Chances, TrueSlot

OWNER = Owner("r1", "0123456789abcdef0123456789abcdef", SPEC.fingerprint)
CHUNK = 32


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 rows, and marks of as many, so that small rings have many."""
    for module in (snapshot, snapshot_writer, columns):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(snapshot, "CHUNK_ROWS", (CHUNK, CHUNK))


class Experience:
    """Actors that fill a ring."""

    def __init__(self, seed: int = 0, slots: int = 2) -> None:
        self.rng = np.random.default_rng(seed)
        ids = count(1)
        self.slots = [TrueSlot(f"w-{k}", 2, self.rng, ids) for k in range(slots)]

    def insert(self, ring: ReplayRing, fragments: int = 1) -> None:
        for _ in range(fragments):
            slot = self.slots[self.rng.integers(len(self.slots))]
            ring.insert(slot.fragment(int(self.rng.integers(1, 6)), int(self.rng.integers(9)))[0])


def content(ring: ReplayRing) -> dict[str, Any]:
    """All that a ring holds, by position."""
    slots = np.arange(ring.oldest, ring.head) % ring.capacity
    named = {**snapshot.row_columns(ring), "links": ring.links, "valid": ring.valid}
    arrays = {name: one.numpy()[slots] for name, one in named.items()}
    layout = ring.layout()
    fragments = [
        (
            p.slot,
            p.epoch,
            p.seq,
            p.produced,
            p.start,
            p.steps,
            p.envs,
            p.tail,
            p.worker,
            p.created_ms,
            p.running.tolist(),
        )
        for p in layout.placed
    ]
    newest = {p.slot: p for p in layout.placed}
    seams = {slot: {key: one.tolist() for key, one in p.last_obs.items()} for slot, p in newest.items()}
    return {"state": ring.state, "newest": ring.newest, "placed": fragments, "seams": seams, **arrays}


def copied(layout: Layout) -> Layout:
    return Layout.of_state(layout.state_dict())


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert value.tobytes() == found[name].tobytes(), name
        else:
            assert value == found[name], name


def assert_same(found: ReplayRing, expected: ReplayRing) -> None:
    assert_equal(content(found), content(expected))
    ok, why = found.check_valid()
    assert ok, why


def restored(folder: Path, name: str, layout: Layout, capacity: int) -> tuple[ReplayRing, list[Gap]]:
    ring = ReplayRing(SPEC, capacity)
    ring.restore(copied(layout))
    manifest = load_manifest(folder, name)
    check_fits(manifest, ring, OWNER, folder / name)
    gaps = restore_rows(ring, folder, manifest)
    ring.restored([(gap.first, gap.end) for gap in gaps])
    return ring, gaps


def written(tmp_path: Path, fragments: int = 40, capacity: int = 300) -> tuple[ReplayRing, SnapshotWriter, str]:
    ring = ReplayRing(SPEC, capacity)
    Experience().insert(ring, fragments)
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    return ring, writer, writer.write(writer.cut())


def test_a_ring_comes_back_bit_for_bit_and_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ring, actors = ReplayRing(SPEC, 200), Experience()
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    actors.insert(ring, 100)
    assert ring.head > 3 * ring.capacity
    name = writer.write(writer.cut())
    found, gaps = restored(tmp_path, name, ring.layout(), 200)
    assert gaps == []
    assert_same(found, ring)
    # And both go on in the same way, over the seams between the fragments
    for _ in range(30):
        slot = actors.slots[actors.rng.integers(2)]
        fragment = slot.fragment(3)[0]
        assert ring.insert(fragment) == found.insert(fragment)
    assert_same(found, ring)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_inserted_voided_written_and_restored_the_content_is_equal(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power will fail here, and it takes most of the time
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(60, 260))
    actors = Experience(seed, int(rng.integers(1, 5)))
    ring = ReplayRing(SPEC, capacity)
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    kept: list[tuple[str, Layout, dict[str, Any]]] = []
    for _ in range(120):
        action = rng.choice(
            ["insert", "void", "advance", "write", "restore", "epoch"], p=[0.5, 0.1, 0.1, 0.2, 0.05, 0.05]
        )
        slot = actors.slots[rng.integers(len(actors.slots))]
        if action == "insert":
            actors.insert(ring, int(rng.integers(1, 8)))
        elif action == "epoch":
            slot.begin_epoch()
        elif action == "void":
            seq = max(1, slot.seq - int(rng.integers(12)))
            ring.void(slot.name, slot.epoch, int(rng.integers(2)), seq, int(rng.integers(4)))
        elif action == "advance" and (settled := writer.due()) is not None:
            writer.advance(settled)
        elif action == "write":
            kept = [*kept, (writer.write(writer.cut()), copied(ring.layout()), content(ring))][-2:]
            writer.keep([name for name, _, _ in kept])
        elif action == "restore" and kept:
            # As after a crash: from one of those that are kept, into a new ring with a new writer.
            name, layout, before = kept[rng.integers(len(kept))]
            ring = ReplayRing(SPEC, capacity)
            ring.restore(copied(layout))
            manifest = load_manifest(tmp_path, name)
            gaps = restore_rows(ring, tmp_path, manifest)
            writer = SnapshotWriter(ring, tmp_path, OWNER)
            writer.adopt(manifest, gaps)
            ring.restored()
            assert gaps == []
            assert_equal(content(ring), before)
    for name, layout, before in kept:
        found, gaps = restored(tmp_path, name, layout, capacity)
        assert gaps == []
        assert_equal(content(found), before)
    assert ring.head > 2 * capacity


def test_a_ring_that_holds_nothing_yet_has_a_snapshot_too(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    writer = SnapshotWriter(ReplayRing(SPEC, 300), folder, OWNER)
    assert load_manifest(folder, writer.write(writer.cut())).rows == ()


def test_a_ring_of_another_capacity_takes_what_fits(tmp_path: Path) -> None:
    ring, _, name = written(tmp_path)
    before = content(ring)
    for capacity in (200, 900):
        found, gaps = restored(tmp_path, name, ring.layout(), capacity)
        assert gaps == []
        rows = found.head - found.oldest
        assert rows == min(capacity, ring.head - ring.oldest)
        for key, value in content(found).items():
            if isinstance(value, np.ndarray):
                assert value.tobytes() == before[key][-rows:].tobytes(), key
        ok, why = found.check_valid()
        assert ok, why


def test_a_chunk_is_written_once_and_old_files_go_with_the_snapshots_that_need_them(tmp_path: Path) -> None:
    ring, actors = ReplayRing(SPEC, 300), Experience()
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    names: list[str] = []
    written_at: dict[str, int] = {}
    for _ in range(20):
        actors.insert(ring, 6)
        names.append(writer.write(writer.cut()))
        writer.keep(names[-2:])
        kept = [load_manifest(tmp_path, name) for name in names[-2:]]
        needed = {*names[-2:]}.union(*(one.files() for one in kept))
        there = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        assert needed <= there.keys()
        for piece in kept[-1].rows[:-1]:
            assert piece.count <= CHUNK
            name = piece.name("rows")
            assert written_at.setdefault(name, there[name]) == there[name]
    # What is there is the ring, and little more
    size = sum(path.stat().st_size - 4096 for path in tmp_path.glob("*.bin"))
    assert size < 2.5 * 300 * ring.bytes_per_row


@pytest.mark.parametrize("kind", ["rows", "marks"])
@pytest.mark.parametrize("damage", ["garbled", "shorter", "missing", "other header"])
def test_a_damaged_or_missing_chunk_costs_its_own_rows_and_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    ring, _, name = written(tmp_path)
    piece = getattr(load_manifest(tmp_path, name), kind)[3]
    path = tmp_path / piece.name(kind)
    raw = bytearray(path.read_bytes())
    raw[-70 if damage == "garbled" else 20] ^= 0x40
    path.write_bytes(raw[:-1] if damage == "shorter" else raw)
    if damage == "missing":
        path.unlink()
    found, gaps = restored(tmp_path, name, ring.layout(), 300)
    [gap] = gaps
    assert (gap.first, gap.end) == (piece.first, piece.end)
    assert path.name in gap.why
    # Then exactly the rows in the gap, and those that lead into it, are void; all others are what they were
    rows = ring.sampleable_rows()
    after = rows + ring.links_of(rows % 300)[:, 0]
    lost = ((rows >= gap.first) & (rows < gap.end)) | ((after >= gap.first) & (after < gap.end))
    assert np.array_equal(found.sampleable_rows(), rows[~lost])
    ok, why = found.check_valid()
    assert ok, why
    # And the next snapshot is whole again
    again = ReplayRing(SPEC, 300)
    again.restore(copied(ring.layout()))
    manifest = load_manifest(tmp_path, name)
    writer = SnapshotWriter(again, tmp_path, OWNER)
    writer.adopt(manifest, restore_rows(again, tmp_path, manifest))
    again.restored([(gap.first, gap.end)])
    assert_same(again, found)
    third, gaps = restored(tmp_path, writer.write(writer.cut()), found.layout(), 300)
    assert gaps == []
    assert_same(third, found)


def test_a_damaged_manifest_is_refused_and_so_is_another_format(tmp_path: Path) -> None:
    _, _, name = written(tmp_path)
    path = tmp_path / name
    text = path.read_text()
    path.write_text(text.replace('"head":', '"head": 1', 1))
    with pytest.raises(SnapshotInvalid, match="damaged"):
        load_manifest(tmp_path, name)
    path.write_text(text.replace('"format":1', '"format":7'))
    with pytest.raises(SnapshotInvalid, match="format 7; this clawq reads format 1"):
        load_manifest(tmp_path, name)
    path.unlink()
    with pytest.raises(SnapshotInvalid, match="cannot be read: No such file"):
        load_manifest(tmp_path, name)


@pytest.mark.parametrize(
    ("owner", "told"),
    [
        (replace(OWNER, run="r2", tag="f" * 32), "is of run r1, not of r2"),
        (replace(OWNER, spec="f" * 16), "made with another environment spec"),
    ],
)
def test_a_snapshot_of_another_run_or_spec_is_refused(tmp_path: Path, owner: Owner, told: str) -> None:
    ring, _, name = written(tmp_path)
    with pytest.raises(SnapshotInvalid, match=told):
        check_fits(load_manifest(tmp_path, name), ring, owner, tmp_path / name)


def test_a_snapshot_of_other_columns_is_refused_by_the_name_of_the_column(tmp_path: Path) -> None:
    _, _, name = written(tmp_path)
    other = ReplayRing(SPEC, 300, extras={"picks": ArraySpec((2,), "int64")})
    with pytest.raises(
        SnapshotInvalid, match=r"column extras.picks is not there in the snapshot, and int64\[2\] in the"
    ):
        check_fits(load_manifest(tmp_path, name), other, OWNER, tmp_path / name)


def test_rows_overwritten_before_they_were_written_are_a_gap_and_nobody_waits(tmp_path: Path) -> None:
    ring, actors = ReplayRing(SPEC, 300), Experience()
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    actors.insert(ring, 5)
    writer.write(writer.cut())
    actors.insert(ring, 40)
    cut, layout, before = writer.cut(), copied(ring.layout()), content(ring)
    # When the learner goes on for half a ring before the saver comes to it
    head = ring.head
    while ring.head < head + 150:
        actors.insert(ring)
    name = writer.write(cut)
    assert writer.skipped > 0
    found, gaps = restored(tmp_path, name, layout, 300)
    [gap] = gaps
    assert layout.oldest <= gap.first < gap.end == ring.oldest
    assert gap.why == snapshot.NOT_WRITTEN
    valid = before["valid"][gap.end - layout.oldest :]
    assert np.array_equal(found.valid_slots.take(np.arange(gap.end, found.head) % 300), valid)
    ok, why = found.check_valid()
    assert ok, why


@pytest.mark.parametrize("chunk", [CHUNK, 4096])
def test_a_learner_that_goes_on_while_rows_are_copied_costs_those_that_it_overwrote_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_ROWS", (chunk, chunk))
    ring, actors = ReplayRing(SPEC, 300), Experience()
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    while ring.head < 1000:
        actors.insert(ring, 5)
    cut, layout, before = writer.cut(), copied(ring.layout()), content(ring)

    class Slow:
        """A column that is read while the learner inserts."""

        def __init__(self, column: Any) -> None:
            self.column = column

        def read(self, at: int, rows: int) -> Any:
            found = self.column.read(at, rows)
            actors.insert(ring)
            return found

    def slow(ring: ReplayRing) -> dict[str, Any]:
        found = snapshot.row_columns(ring)
        first = next(iter(found))
        return {**found, first: Slow(found[first])}

    with monkeypatch.context() as patch:
        patch.setattr(snapshot_writer, "row_columns", slow)
        name = writer.write(cut)
    found, gaps = restored(tmp_path, name, layout, 300)
    assert 0 < writer.skipped == sum(gap.end - gap.first for gap in gaps)
    assert gaps[-1].end <= ring.oldest < layout.oldest + 150
    there = np.setdiff1d(np.arange(layout.oldest, found.head), [at for gap in gaps for at in range(gap.first, gap.end)])
    for one, column in snapshot.row_columns(found).items():
        assert np.array_equal(column.numpy()[there % 300], before[one][there - layout.oldest]), one


def test_a_disk_that_refuses_is_told_and_the_next_snapshot_has_what_the_refused_one_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, actors = ReplayRing(SPEC, 300), Experience()
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    actors.insert(ring, 20)
    first, layout = writer.write(writer.cut()), copied(ring.layout())
    actors.insert(ring, 10)
    slot = actors.slots[0]
    ring.void(slot.name, slot.epoch, 0, 1, 0)
    refused, waiting = writer.cut(), writer.cut()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointNotWritten, match=r"No space left on device\. Older checkpoints are intact"):
            writer.write(refused)
    # One that was taken before that was known lacks the marks of the refused one
    with pytest.raises(CheckpointNotWritten, match="the one before it could not be written"):
        writer.write(waiting)
    assert not list(tmp_path.glob("*.tmp"))
    assert restored(tmp_path, first, layout, 300)[1] == []
    found, gaps = restored(tmp_path, writer.write(writer.cut()), ring.layout(), 300)
    assert gaps == []
    assert_same(found, ring)


@pytest.fixture
def half_a_megabyte(tmp_path: Path) -> Iterator[Path]:
    """A file system of that size."""
    with small_disk(tmp_path / "small", "512k") as folder:
        yield folder


def test_a_full_disk_leaves_the_older_snapshot_and_goes_on_when_there_is_room(half_a_megabyte: Path) -> None:
    disk = half_a_megabyte
    ring, actors = ReplayRing(SPEC, 300), Experience()
    writer = SnapshotWriter(ring, disk, OWNER)
    actors.insert(ring, 20)
    name, layout, before = writer.write(writer.cut()), copied(ring.layout()), content(ring)
    ballast = fill(disk)
    actors.insert(ring, 10)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        writer.write(writer.cut())
    found, gaps = restored(disk, name, layout, 300)
    assert gaps == []
    assert_equal(content(found), before)
    ballast.unlink()
    second = writer.write(writer.cut())
    writer.keep([second])
    assert_same(restored(disk, second, ring.layout(), 300)[0], ring)


WRITER = """
import sys
from pathlib import Path
import numpy as np
import torch
import test_snapshot as t
from clawq.programs.checkpoint import Checkpoints
from clawq.errors import CheckpointNotWritten, SnapshotInvalid
from clawq.programs.checkpoint import Checkpoints, load
from clawq.replay import columns, snapshot, snapshot_writer

for module in (snapshot, snapshot_writer, t.columns):
    module.BLOCK = 8
snapshot.CHUNK_ROWS = (32, 32)
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder, keep=2)
actors = t.Experience(int(sys.argv[2]))
ring = t.ReplayRing(t.SPEC, 600)
writer = t.SnapshotWriter(ring, folder / "ring", t.OWNER)
step = 0
while True:
    step += 1
    actors.insert(ring, 10)
    name = writer.write(writer.cut())
    rows = {str(i): torch.from_numpy(one.copy()) for i, one in enumerate(t.arrays_of(t.content(ring)))}
    checkpoints.save({"layout": ring.layout().state_dict(), "rows": rows}, step, None, name)
    writer.keep(checkpoints.rings())
    print(step, flush=True)
"""


def arrays_of(found: dict[str, Any]) -> list[Any]:
    return [value for value in found.values() if isinstance(value, np.ndarray)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_every_checkpoint_with_its_whole_ring(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(seed)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for _ in range(4 + 3 * seed):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    checkpoints = Checkpoints(tmp_path)
    assert len(checkpoints.paths()) >= 2
    for path in checkpoints.paths():
        kept = load(path)
        found, gaps = restored(tmp_path / "ring", kept.ring, Layout.of_state(kept.state["layout"]), 600)
        assert gaps == []
        expected = [one.numpy() for one in kept.state["rows"].values()]
        assert [one.tobytes() for one in arrays_of(content(found))] == [one.tobytes() for one in expected]
    # And whoever goes on sweeps what the killed one left
    writer = SnapshotWriter(found, tmp_path / "ring", OWNER)
    writer.adopt(load_manifest(tmp_path / "ring", kept.ring), [])
    (tmp_path / "ring" / "rows-000000000000-0123456789abcdef.tmp").write_bytes(b"left")
    writer.keep(checkpoints.rings())
    needed = checkpoints.rings().union(*(load_manifest(tmp_path / "ring", one).files() for one in checkpoints.rings()))
    assert {one.name for one in (tmp_path / "ring").iterdir()} == needed


def test_rows_overwritten_while_they_are_copied_are_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, actors = ReplayRing(SPEC, 300), Experience()
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    actors.insert(ring, 40)
    cut, layout, before = writer.cut(), copied(ring.layout()), content(ring)
    read, hurried = ring.packed.read, iter([True])

    def interrupted(at: int, rows: int) -> Any:
        # The learner overwrites a part of the first chunk while the saver copies it.
        if next(hurried, False):
            while ring.oldest == layout.oldest:
                actors.insert(ring)
        return read(at, rows)

    monkeypatch.setattr(ring.packed, "read", interrupted)
    found, gaps = restored(tmp_path, writer.write(cut), layout, 300)
    [gap] = gaps
    assert (gap.first, gap.end) == (layout.oldest, ring.oldest)
    packed, rows = next(iter(snapshot.row_columns(ring))), slice(gap.end - gap.first, None)
    assert content(found)[packed][rows].tobytes() == before[packed][rows].tobytes()


def test_tail_rows_at_the_end_of_a_chunk_are_not_taken_for_settled(tmp_path: Path) -> None:
    actor = TrueSlot("w", 4, np.random.default_rng(0), count(1), chances=Chances(0, 0))
    ring = ReplayRing(SPEC, 300)
    ring.insert(actor.fragment(7)[0])
    assert ring.head == CHUNK > ring.settled
    writer = SnapshotWriter(ring, tmp_path, OWNER)
    name = writer.write(writer.cut())
    # When a resumed learner goes on, the next fragment takes the place of the tail rows
    again = ReplayRing(SPEC, 300)
    again.restore(copied(ring.layout()))
    manifest = load_manifest(tmp_path, name)
    writer = SnapshotWriter(again, tmp_path, OWNER)
    writer.adopt(manifest, restore_rows(again, tmp_path, manifest))
    again.restored()
    again.insert(actor.fragment(7)[0])
    assert again.head == CHUNK + 28
    found, gaps = restored(tmp_path, writer.write(writer.cut()), again.layout(), 300)
    assert gaps == []
    assert_same(found, again)
