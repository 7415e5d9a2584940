"""What `clawq up` decides and says by itself; whole runs are in tests/integration/test_up.py."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from clawq.config import RunConfig
from clawq.errors import UserError
from clawq.programs.daemon import Order, log_to, run_daemon
from clawq.programs.local import Household, LocalRun, core_plan, last_words, run_local


def config(folder: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "t", "folder": str(folder), "environment": {"name": "point"}, "algorithm": {"name": "td3"}, **sections}
    )


def test_a_log_level_that_there_is_not_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWQ_LOG_LEVEL", "banana")
    with pytest.raises(UserError, match="it may be DEBUG, INFO"):
        run_local(LocalRun(config(tmp_path), ()), None, threading.Event(), Household())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="it may be DEBUG, INFO"):
        run_daemon(Order(config(tmp_path)), threading.Event(), print)
    assert not list(tmp_path.iterdir())


def test_a_learner_that_was_killed_is_told_with_how_to_go_on(tmp_path: Path) -> None:
    assert last_words(-9, False, "", tmp_path) == "the learner was killed by signal 9"
    (tmp_path / "run.json").touch()
    told = f"the learner was killed by signal 9; go on with `clawq up --resume {tmp_path}`"
    assert last_words(-9, False, "", tmp_path) == told
    assert last_words(-9, True, "", tmp_path) == told
    assert last_words(-11, False, "Fatal Python error", tmp_path).startswith("Fatal Python error\nthe learner was")
    assert last_words(-15, True, "", tmp_path) == "stopped before the run began"
    assert last_words(4, False, "error: too many", tmp_path) == "error: too many"


def test_a_service_goes_on_with_a_run_that_has_begun_and_begins_one_that_has_not(tmp_path: Path) -> None:
    order = Order(config(tmp_path), "r1")
    assert order.or_resumed() == order
    # A folder alone is no run
    (tmp_path / "r1" / "logs").mkdir(parents=True)
    assert order.or_resumed() == order
    (tmp_path / "r1" / "run.json").touch()
    assert order.or_resumed().resume == tmp_path / "r1"


def test_a_gpu_is_planned_for_whether_it_is_named_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawq.programs.local.available_cores", lambda: 16)
    monkeypatch.setattr("clawq.programs.local.device_here", lambda wanted: "cuda:0" if wanted == "auto" else wanted)
    threads = {d: core_plan(config(tmp_path, learner={"device": d})).learner_threads for d in ("auto", "cpu", "cuda:0")}
    assert threads == {"auto": 2, "cpu": 4, "cuda:0": 2}


def test_a_run_by_rounds_gets_as_many_slots_as_its_rounds_have_seats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawq.programs.local.available_cores", lambda: 2)
    sync = {"actors": 3, "quota_steps": 8}
    assert core_plan(config(tmp_path)).slots == 1
    assert core_plan(config(tmp_path, sync=sync)).slots == 3
    assert core_plan(config(tmp_path, sync=sync, cores={"slots": 2})).slots == 2


@pytest.mark.parametrize("name", ["nowhere.hdf5", "text.hdf5"])
def test_bad_demonstrations_are_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.hdf5").write_text("hello")
    wanted = config(tmp_path / "runs", replay={"demonstrations": {"path": str(tmp_path / name)}})
    with pytest.raises(UserError, match=r"^replay\.demonstrations: .*(neither an HDF5 file|cannot be read as HDF5)"):
        run_local(LocalRun(wanted, ()), None, threading.Event(), Household())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^replay\.demonstrations: "):
        run_daemon(Order(wanted), threading.Event(), print)
    assert not (tmp_path / "runs").exists()


def test_a_learners_own_log_is_bounded_too(tmp_path: Path) -> None:
    root, raising = logging.getLogger(), logging.raiseExceptions
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    try:
        log_to(tmp_path / "learner.log", "INFO", limit_bytes=10_000)
        for number in range(1000):
            logging.info("line %d of what a learner of many weeks has to say", number)
        files = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
        assert set(files) == {"learner.log", "learner.log.1"}
        assert max(files.values()) <= 10_000
        assert "line 999" in (tmp_path / "learner.log").read_text()
    finally:
        for made in root.handlers:
            made.close()
        root.handlers, logging.raiseExceptions = handlers, raising
        root.setLevel(level)
