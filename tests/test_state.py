"""The host's state file, with real processes as owners."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawq.config import Redis
from clawq.errors import UserError
from clawq.state import ServerState, process_start, resolve_urls, state_dir


@pytest.fixture
def owner() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_what_was_written_is_read_by_others_and_only_the_user_may_read_it(tmp_path: Path) -> None:
    state = ServerState.of("unix:///b", "unix:///d")
    file = state.write(tmp_path / "new" / "state")
    assert ServerState.read(tmp_path / "new" / "state") == state
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_dead_owner_announces_nothing(tmp_path: Path, owner: "subprocess.Popen[bytes]") -> None:
    ServerState.of("b", "d", owner.pid).write(tmp_path)
    assert ServerState.read(tmp_path) is not None
    owner.kill()
    # Already as a zombie, before it is reaped.
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    assert ServerState.read(tmp_path) is None
    owner.wait()
    assert ServerState.read(tmp_path) is None


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    mine = process_start(os.getpid())
    assert mine is not None
    ServerState("b", "d", os.getpid(), mine + "9", 0.0).write(tmp_path)
    assert ServerState.read(tmp_path) is None


def test_a_second_live_owner_is_refused_and_a_dead_one_replaced(
    tmp_path: Path, owner: "subprocess.Popen[bytes]"
) -> None:
    ServerState.of("b", "d", owner.pid).write(tmp_path)
    mine = ServerState.of("b2", "d2")
    with pytest.raises(UserError, match=f"process {owner.pid}"):
        mine.write(tmp_path)
    owner.kill()
    owner.wait()
    mine.write(tmp_path)
    mine.write(tmp_path)
    assert ServerState.read(tmp_path) == mine


def test_only_the_owner_or_nobody_is_forgotten(tmp_path: Path, owner: "subprocess.Popen[bytes]") -> None:
    ServerState.of("b", "d", owner.pid).write(tmp_path)
    ServerState.forget(tmp_path)
    assert ServerState.read(tmp_path) is not None
    ServerState.forget(tmp_path, owner.pid)
    ServerState.forget(tmp_path, owner.pid)
    assert list(tmp_path.glob("redis-*")) == []
    ServerState.forget(tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"broker_url": "b"}', '{"unknown": 1}', "\udcff"])
def test_a_damaged_file_announces_nothing(tmp_path: Path, text: str) -> None:
    file = ServerState.of("b", "d").write(tmp_path)
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert ServerState.read(tmp_path) is None
    ServerState.of("b", "d").write(tmp_path)
    assert ServerState.read(tmp_path) is not None


def test_a_process_that_is_gone_cannot_be_announced(owner: "subprocess.Popen[bytes]") -> None:
    owner.kill()
    owner.wait()
    with pytest.raises(ProcessLookupError):
        ServerState.of("b", "d", owner.pid)


def test_urls_come_from_the_configuration_then_the_environment_then_the_state_file(tmp_path: Path) -> None:
    nowhere = {"CLAWQ_STATE_DIR": str(tmp_path)}
    assert resolve_urls(Redis(), nowhere) is None
    ServerState.of("unix:///b", "unix:///d").write(tmp_path)
    assert resolve_urls(None, nowhere) == ("unix:///b", "unix:///d")
    named = {**nowhere, "CLAWQ_BROKER_URL": "redis://b", "CLAWQ_DATA_URL": "redis://d"}
    assert resolve_urls(Redis(), named) == ("redis://b", "redis://d")
    configured = Redis(broker_url="redis://cb", data_url="redis://cd")
    assert resolve_urls(configured, named) == ("redis://cb", "redis://cd")


def test_one_url_stands_for_both_servers() -> None:
    assert resolve_urls(Redis(data_url="redis://d"), {}) == ("redis://d", "redis://d")
    assert resolve_urls(None, {"CLAWQ_BROKER_URL": "redis://b"}) == ("redis://b", "redis://b")


def test_the_state_folder_follows_clawqs_variable_then_xdg_then_home() -> None:
    assert state_dir({"CLAWQ_STATE_DIR": "/x"}) == Path("/x")
    assert state_dir({"XDG_STATE_HOME": "/s"}) == Path("/s/clawq")
    assert state_dir({}) == Path.home() / ".local/state/clawq"
