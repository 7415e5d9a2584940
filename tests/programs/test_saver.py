"""Checkpoints beside the loop: trimming only behind what is on disk, refusals told, worse things raised."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawq.programs.checkpoint import Checkpoints, read_header
from clawq.programs.saver import Saver, Snapshot
from clawq.replay import snapshot as replay_snapshot
from clawq.replay.ring import ReplayRing
from clawq.replay.snapshot import Owner, load_manifest
from clawq.replay.snapshot_writer import SnapshotWriter
from clawq.testing.experience import SPEC, TrueSlot


def snapshot(updates: int, **more: Any) -> Snapshot:
    return Snapshot(1, {"updates": updates, **more}, {"slot": f"1-{updates}"})


def nothing() -> None:
    """There is nothing to be synced."""


def test_cursors_are_told_once_a_plain_checkpoint_is_on_disk(tmp_path: Path) -> None:
    told: list[Any] = []
    checkpoints = Checkpoints(tmp_path / "c")
    synced: list[int] = []

    def sync() -> None:
        synced.append(len(checkpoints.paths()))

    saver = Saver(checkpoints, sync, lambda cursors: told.append((dict(cursors), len(checkpoints.paths()))))
    saver.save(snapshot(1))
    saver.save(snapshot(2), score=1.0)
    assert list(saver.refusals(wait=True)) == []
    assert not saver.busy
    # The scored one says nothing: it may be older than what was trimmed already.
    assert told == [({"slot": "1-1"}, 1)]
    assert checkpoints.best() is not None
    # What they point at was on disk before each of them.
    assert synced == [0, 1]
    saver.close()


def test_a_score_that_comes_late_does_not_put_the_newest_checkpoint_back(tmp_path: Path) -> None:
    checkpoints, told = Checkpoints(tmp_path / "c"), list[Any]()
    saver = Saver(checkpoints, nothing, told.append)
    candidate = snapshot(5, cursors="1-10")
    # No update was made meanwhile, but fragments were committed, and trimming goes up to them.
    saver.save(replace(snapshot(5, cursors="1-90"), cursors={"slot": "1-90"}))
    saver.save(candidate, score=3.0)
    assert list(saver.refusals(wait=True)) == []
    assert told == [{"slot": "1-90"}]
    loaded = checkpoints.load_latest()
    assert loaded is not None
    assert (loaded.state["cursors"], loaded.score, checkpoints.best()) == ("1-90", 3.0, loaded.path)
    saver.close()


def test_a_disk_that_refuses_is_told_and_the_next_one_is_tried(tmp_path: Path) -> None:
    told: list[Any] = []
    (tmp_path / "c").write_text("a file where the folder should be")
    saver = Saver(Checkpoints(tmp_path / "c"), nothing, told.append)
    saver.save(snapshot(1))
    (refusal,) = saver.refusals(wait=True)
    assert "was not written" in str(refusal)
    assert told == []
    (tmp_path / "c").unlink()
    saver.save(snapshot(2))
    assert list(saver.refusals(wait=True)) == []
    assert told == [{"slot": "1-2"}]
    saver.close()


def test_a_state_that_cannot_be_saved_is_a_bug_and_raised(tmp_path: Path) -> None:
    saver = Saver(Checkpoints(tmp_path / "c"), nothing, lambda cursors: None)
    saver.save(snapshot(1, bad=object()))
    with pytest.raises(TypeError):
        list(saver.refusals(wait=True))
    saver.close()


def unheard(cursors: Mapping[str, str]) -> None:
    """Nobody trims."""


def ring_of(fragments: int) -> ReplayRing:
    ring, actor = ReplayRing(SPEC, 5000), TrueSlot("w", 4, np.random.default_rng(0), count(1))
    for _ in range(fragments):
        ring.insert(actor.fragment(20)[0])
    return ring


def test_a_score_that_comes_later_keeps_the_ring_of_its_checkpoint(tmp_path: Path) -> None:
    ring, checkpoints = ring_of(10), Checkpoints(tmp_path / "c", keep=2)
    rings = SnapshotWriter(ring, tmp_path / "c" / "ring", Owner("r1", "0" * 32, SPEC.fingerprint))
    saver = Saver(checkpoints, nothing, unheard, rings)
    first = replace(snapshot(1), ring=rings.cut())
    saver.save(first)
    saver.save(replace(first, ring=None), score=1.0)
    assert list(saver.refusals(wait=True)) == []
    scored = read_header(checkpoints.paths()[0])
    assert scored.score == 1.0
    assert load_manifest(tmp_path / "c" / "ring", scored.ring).head == ring.head
    # And of the best one that is not among the newest only the weights are kept
    for updates in (2, 3):
        saver.save(replace(snapshot(updates), ring=rings.cut()))
    assert list(saver.refusals(wait=True)) == []
    assert len(checkpoints.paths()) == 3
    assert {path.name for path in (tmp_path / "c" / "ring").glob("ring-*")} == checkpoints.rings()
    saver.close()


def test_chunks_are_on_disk_before_a_checkpoint_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_snapshot, "CHUNK_ROWS", (1024, 1024))
    ring = ring_of(10)
    rings = SnapshotWriter(ring, tmp_path / "ring", Owner("r1", "0" * 32, SPEC.fingerprint))
    saver = Saver(Checkpoints(tmp_path), nothing, unheard, rings)
    saver.write_ahead()
    assert list(saver.refusals(wait=True)) == []
    assert not (tmp_path / "ring").exists()
    actor = TrueSlot("v", 4, np.random.default_rng(1), count(5000))
    while ring.settled < 2048:
        ring.insert(actor.fragment(20)[0])
    saver.write_ahead()
    assert list(saver.refusals(wait=True)) == []
    assert len(list((tmp_path / "ring").glob("rows-*.bin"))) == 2
    saver.close()


def test_a_refused_snapshot_refuses_its_checkpoint_so_that_nothing_is_trimmed_behind_it(tmp_path: Path) -> None:
    told: list[Any] = []
    ring, checkpoints = ring_of(10), Checkpoints(tmp_path / "c")
    (tmp_path / "ring").write_text("a file where the folder should be")
    rings = SnapshotWriter(ring, tmp_path / "ring", Owner("r1", "0" * 32, SPEC.fingerprint))
    saver = Saver(checkpoints, nothing, told.append, rings)
    saver.save(replace(snapshot(1), ring=rings.cut()))
    [refusal] = saver.refusals(wait=True)
    assert "the snapshot of the replay ring was not written" in str(refusal)
    assert told == []
    assert checkpoints.paths() == []
    (tmp_path / "ring").unlink()
    saver.save(replace(snapshot(2), ring=rings.cut()))
    assert list(saver.refusals(wait=True)) == []
    assert told == [{"slot": "1-2"}]
    saver.close()
