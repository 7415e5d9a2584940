"""Run folders: made once, opened again, never taken for something else."""

import json
from pathlib import Path

import pytest

from clawq.config import RunConfig
from clawq.errors import CheckpointInvalid, UserError
from clawq.programs.run import create_run, new_run_id, open_run
from clawq.testing.point import PointOptions, point_spec

SPEC = point_spec(PointOptions())


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate({"name": "test", "folder": str(folder), "environment": {"name": "point"}})


def test_a_run_is_opened_as_it_was_made(tmp_path: Path) -> None:
    made = create_run(config(tmp_path), "r1", SPEC)
    opened = open_run(tmp_path / "r1", None)
    assert (opened.id, opened.tag, opened.config) == (made.id, made.tag, made.config)
    assert opened.spec.fingerprint == SPEC.fingerprint
    assert (tmp_path / "r1" / "config.yaml").exists()


def test_two_runs_have_different_tags(tmp_path: Path) -> None:
    assert create_run(config(tmp_path), "r1", SPEC).tag != create_run(config(tmp_path), "r2", SPEC).tag


def test_a_folder_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    create_run(config(tmp_path), "r1", SPEC)
    with pytest.raises(UserError, match=r"exists already.*--resume"):
        create_run(config(tmp_path), "r1", SPEC)


@pytest.mark.parametrize("run_id", ["", "A", "../x", "a b", "-a", "x" * 81])
def test_names_that_cannot_be_folders_and_queues_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        create_run(config(tmp_path), run_id, SPEC)


def test_a_made_name_is_a_good_name(tmp_path: Path) -> None:
    assert create_run(config(tmp_path), new_run_id(config(tmp_path), 0.0), SPEC).id.startswith("test-s0-")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the run folder"):
        create_run(config(tmp_path / "file"), "r1", SPEC)


def test_what_is_no_run_folder_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run\.json"):
        open_run(tmp_path, None)
    (tmp_path / "run.json").write_text(json.dumps({"id": "x"}))
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        open_run(tmp_path, None)
