"""Snapshots of the ring: what comes back is what was there, bit for bit, whatever happened to the files meanwhile."""

import os
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawq.replay import snapshot, snapshot_writer
from clawq.replay.layout import Layout
from clawq.replay.ring import ReplayRing
from clawq.replay.snapshot import Gap, Owner, check_fits, load_manifest, restore_rows
from clawq.replay.snapshot_writer import SnapshotWriter
from clawq.testing.experience import SPEC, TrueSlot

OWNER = Owner("r1", "0123456789abcdef0123456789abcdef", SPEC.fingerprint)
CHUNK = 32


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 32 rows, and marks of as many, so that small rings have many."""
    for module in (snapshot, snapshot_writer):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr("clawq.replay.columns.BLOCK", 8)
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
    columns = {**snapshot.row_columns(ring), "links": ring.links, "valid": ring.valid}
    arrays = {name: one.numpy()[slots] for name, one in columns.items()}
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
