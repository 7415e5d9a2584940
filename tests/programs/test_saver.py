"""Checkpoints beside the loop: trimming only behind what is on disk, refusals told, worse things raised."""

from pathlib import Path
from typing import Any

import pytest

from clawq.programs.checkpoint import Checkpoints
from clawq.programs.saver import Saver, Snapshot


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
