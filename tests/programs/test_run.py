"""Run folders: made once, opened again, never taken for something else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawq.config import Redis, RunConfig
from clawq.errors import CheckpointInvalid, UserError
from clawq.programs.daemon import check_same_spec
from clawq.programs.run import create_run, new_run_id, only_up, only_writer, open_run, prepare_new_folder, refusing
from clawq.state import named_urls
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


def test_a_run_of_another_environment_is_told_by_what_differs(tmp_path: Path) -> None:
    made = create_run(config(tmp_path), "r1", SPEC)
    check_same_spec(made, SPEC)
    with pytest.raises(UserError, match=r"made in another environment .*: max_episode_steps: 20 there, 7 here\. Set"):
        check_same_spec(made, point_spec(PointOptions(max_episode_steps=7)))


@pytest.mark.parametrize(("fresh", "born", "stays"), [(True, False, False), (False, False, True), (True, True, True)])
def test_a_run_that_is_refused_before_it_began_leaves_no_folder_and_no_other_goes(
    tmp_path: Path, fresh: bool, born: bool, stays: bool
) -> None:
    folder = tmp_path / "r1"
    if born:
        create_run(config(tmp_path), "r1", SPEC)
    else:
        folder.mkdir()
    with pytest.raises(UserError, match="cannot be"), refusing(folder, fresh):
        raise UserError("it cannot be")
    assert folder.exists() == stays


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
    with pytest.raises(UserError, match=r"cannot be written: Not a directory.*folder=PATH"):
        create_run(config(tmp_path / "file"), "r1", SPEC)


def test_what_is_no_run_folder_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run\.json"):
        open_run(tmp_path, None)
    (tmp_path / "run.json").write_text(json.dumps({"id": "x"}))
    with pytest.raises(CheckpointInvalid, match="is damaged"):
        open_run(tmp_path, None)


def test_two_runs_that_begin_in_the_same_second_get_two_folders(tmp_path: Path) -> None:
    first, second = (prepare_new_folder(config(tmp_path), 0.0) for _ in range(2))
    assert first[0] != second[0]
    assert second[1].is_dir()
    assert second[0] == f"{first[0]}-2"


def test_a_run_folder_has_one_writer_whatever_redis_it_uses(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\nfrom clawq.programs.run import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1])):\n    print('mine', flush=True)\n    input()"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(UserError, match=f"in use by another learner .pid {other.pid} on"), only_writer(tmp_path):
            pass
        # `clawq up` holds it apart from the learner that it starts
        with only_up(tmp_path), pytest.raises(UserError, match="in use by another `clawq up`"), only_up(tmp_path):
            pass
        # And a writer that was killed holds nothing up
        other.kill()
        other.wait()
        with only_writer(tmp_path):
            pass


def test_passwords_do_not_get_into_a_run_folder_and_are_asked_for_again(tmp_path: Path) -> None:
    urls = {"broker_url": "redis://:sEcReT@there:1/0", "data_url": "redis://there:2/0?password=sEcReT"}
    made = create_run(config(tmp_path).model_copy(update={"redis": Redis.model_validate(urls)}), "r1", SPEC)
    for file in made.folder.iterdir():
        assert not file.is_file() or "sEcReT" not in file.read_text(), file
    kept = open_run(made.folder, None).config.redis
    assert kept.broker_url == "redis://:***@there:1/0"
    # When it is resumed, the environment names the whole URLs, or the user is asked for them
    with pytest.raises(UserError, match="CLAWQ_BROKER_URL"):
        named_urls(kept, {})
    assert named_urls(kept, {"CLAWQ_DATA_URL": "redis://:x@there/0"}) == ("redis://:x@there/0",) * 2
