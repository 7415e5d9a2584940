"""What a worker reads from its own host."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clawq.control.celery_settings import make_app
from clawq.control.settings import HostSettings, slot_name, worker_name
from clawq.control.worker import check_pool, default_pool
from clawq.errors import UserError
from clawq.transport.keys import NAME_PATTERN


def test_urls_runs_and_folders_come_from_the_environment(tmp_path: Path) -> None:
    env = {
        "CLAWQ_BROKER_URL": "redis://a",
        "CLAWQ_DATA_URL": "redis://b",
        "CLAWQ_RUNS": "one, two,",
        "CLAWQ_STATE_DIR": str(tmp_path),
        "CLAWQ_REMOTE_CONTROL": "1",
    }
    settings = HostSettings.from_host(env)
    assert settings.require_urls() == ("redis://a", "redis://b")
    assert settings.runs == frozenset({"one", "two"})
    assert settings.log_folder == tmp_path / "logs"
    assert settings.remote_control
    assert (settings.stall_s, settings.worker_stall_s) == (None, 60.0)


def test_nothing_known_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    settings = HostSettings.from_host({"CLAWQ_STATE_DIR": str(tmp_path)})
    assert settings.runs is None
    with pytest.raises(UserError, match="clawq redis start"):
        settings.require_urls()


def test_a_value_that_cannot_be_understood_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CLAWQ_STALL_TIMEOUT_S='soon'"):
        HostSettings.from_host({"CLAWQ_STATE_DIR": str(tmp_path), "CLAWQ_STALL_TIMEOUT_S": "soon"})


@pytest.mark.parametrize("threads", ["0.5", "0", "-1", "two"])
def test_threads_are_a_whole_number(tmp_path: Path, threads: str) -> None:
    with pytest.raises(UserError, match=f"CLAWQ_ACTOR_THREADS='{threads}' is not a whole number"):
        HostSettings.from_host({"CLAWQ_STATE_DIR": str(tmp_path), "CLAWQ_ACTOR_THREADS": threads})
    assert HostSettings.from_host({"CLAWQ_STATE_DIR": str(tmp_path), "CLAWQ_ACTOR_THREADS": "2"}).actor_threads == 2


def test_a_log_level_is_refused_by_the_worker_not_by_its_actors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CLAWQ_LOG_LEVEL='banana' is no log level; it may be DEBUG"):
        HostSettings.from_host({"CLAWQ_STATE_DIR": str(tmp_path), "CLAWQ_LOG_LEVEL": "banana"})


def test_a_bare_celery_worker_tells_a_mistake_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "clawq.control.app", "worker"],
        env={**os.environ, "CLAWQ_STALL_TIMEOUT_S": "x"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["clawq worker: CLAWQ_STALL_TIMEOUT_S='x' is not a number larger than 0"]


@pytest.mark.parametrize("worker", ["w1", "name with spaces", "ünïcode", "a/b:c", "x" * 300, "-"])
def test_slot_names_can_stand_in_keys_and_file_names(worker: str) -> None:
    name = slot_name(worker, 3, place="host")
    assert NAME_PATTERN.fullmatch(name)
    assert "/" not in name
    assert name.endswith("-3")


def test_slots_are_named_after_the_acl_user_whose_streams_they_are(tmp_path: Path) -> None:
    def place(url: str) -> str:
        env = {"CLAWQ_BROKER_URL": url, "CLAWQ_DATA_URL": url, "CLAWQ_STATE_DIR": str(tmp_path)}
        return HostSettings.from_host(env).place

    assert place("rediss://arm-1:pw@h/0") == "arm-1"
    assert slot_name("x" * 300, 3, place="arm-1").startswith("arm-1-")
    for nobody in ("redis://h/0", "redis://:pw@h/0", "redis://learner:pw@h/0", "unix:///s?db=0"):
        assert place(nobody) == socket.gethostname().partition(".")[0]


def test_two_bare_celery_workers_do_not_share_slots() -> None:
    assert worker_name("celery@host", 12) != worker_name("celery@host", 13)
    assert worker_name("mine@host", 12) == "mine"


def test_C16_windows_gets_threads_and_prefork_is_refused_there_with_the_reason() -> None:
    pool, reason = default_pool("win32")
    assert pool in ("threads", "solo")
    assert "Windows" in reason
    with pytest.raises(UserError, match="Windows"):
        check_pool("prefork", platform="win32")
    assert check_pool("prefork", platform="linux") == "prefork"
    with pytest.raises(UserError, match="threads, prefork, solo"):
        check_pool("gevent")


def test_C16_a_bare_celery_worker_on_windows_uses_threads() -> None:
    assert make_app("redis://localhost", platform="win32").conf.worker_pool == "threads"
    assert make_app("redis://localhost", platform="linux").conf.worker_pool == "prefork"


def test_importing_the_app_and_all_that_a_worker_needs_loads_neither_torch_nor_a_simulator() -> None:
    code = (
        "import sys; import clawq.control.worker; from clawq.control.app import app, register_tasks\n"
        "register_tasks(app); assert 'clawq.evaluate' in app.tasks\n"
        "assert not {'torch', 'gymnasium', 'mujoco', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
