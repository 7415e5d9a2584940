"""`clawq redis start | stop | status` with real servers and processes."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clawq.state import ServerState
from clawq.transport.client import connect


class Host:
    """One host's state folder, and the command line on it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        hidden = ("CLAWQ_BROKER_URL", "CLAWQ_DATA_URL")
        self.env = {name: value for name, value in os.environ.items() if name not in hidden}
        self.env["CLAWQ_STATE_DIR"] = str(self.state)
        self.started: list[subprocess.Popen[str]] = []

    def clawq(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "clawq.cli.main", "redis", *arguments],
            capture_output=True, text=True, env=self.env, timeout=60, check=False,
        )  # fmt: skip

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start servers and wait for the line that says they run."""
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "clawq.cli.main", "redis", "start", "--memory-mb", "64", *arguments],
            stdout=subprocess.PIPE, text=True, env=self.env,
        )  # fmt: skip
        self.started.append(process)
        assert process.stdout is not None
        assert "Redis runs" in process.stdout.readline()
        return process


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for process in host.started:
        process.terminate()
        process.communicate(timeout=30)


def test_started_servers_are_found_checked_and_stopped(host: Host) -> None:
    process = host.start()
    state = ServerState.read(host.state)
    assert state is not None
    assert connect(state.data_url).ping()
    told = host.clawq("status")
    assert told.returncode == 0
    assert [line.split()[0] for line in told.stdout.splitlines() if line[0] != " "] == ["broker", "data"]
    broker, data = told.stdout.split("data   ")
    assert "on disk (append-only file)" in broker
    for words in ("67.1 MB at most", "MB used", "noeviction", "1 connected", "in memory only", "version"):
        assert words in data
    assert host.clawq("start").returncode == 2
    assert host.clawq("stop").stdout == "stopped\n"
    assert process.wait(10) == 0
    assert ServerState.read(host.state) is None
    assert host.clawq("status").returncode == 2
    assert host.clawq("stop").returncode == 0


def test_with_tcp_the_urls_for_other_machines_are_printed_and_work_and_status_hides_the_password(host: Host) -> None:
    listening = ("--bind", "0.0.0.0", "--port", str(two_free_ports()))
    process = host.start(*listening)
    assert process.stdout is not None
    process.stdout.readline()
    broker = process.stdout.readline().split("'")[1]
    data = process.stdout.readline().split("'")[1]
    assert connect(broker).ping()
    assert connect(data).ping()
    password = data.split(":")[2].partition("@")[0]
    assert len(password) >= 20
    assert password not in host.clawq("status").stdout
    assert process.stdout.readline() == "  export CLAWQ_REDIS_SECURITY='password'\n"
    assert stat.S_IMODE((host.state / "redis" / "password").stat().st_mode) == 0o600
    # The same password and port again after a restart: nobody has to be told anew.
    assert host.clawq("stop").returncode == 0
    again = host.start(*listening)
    assert again.stdout is not None
    again.stdout.readline()
    assert again.stdout.readline().split("'")[1] == broker


def two_free_ports() -> int:
    """The first of two."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return port
            except (OSError, OverflowError):
                continue


def test_tcp_is_for_this_machine_unless_another_address_is_named(host: Host) -> None:
    host.start("--tcp")
    state = ServerState.read(host.state)
    assert state is not None
    assert "@127.0.0.1:" in state.data_url
    listening = {c.laddr.ip for p in psutil.Process(state.pid).children() for c in p.net_connections("inet")}
    assert listening == {"127.0.0.1"}


def test_no_other_machine_is_let_in_without_a_password(host: Host) -> None:
    told = host.clawq("start", "--bind", "0.0.0.0", "--no-password")
    assert (told.returncode, "without a password is open to everybody" in told.stderr) == (2, True)


def test_a_server_that_would_delete_keys_is_shown_as_unusable(host: Host) -> None:
    host.start()
    state = ServerState.read(host.state)
    assert state is not None
    connect(state.data_url).config_set("maxmemory-policy", "allkeys-lru")
    told = host.clawq("status")
    assert told.returncode == 3
    assert "Set `maxmemory-policy noeviction`" in told.stdout
    assert "on disk (append-only file)" in told.stdout, "the other one is shown all the same"


def test_users_are_made_and_their_servers_started_with_them(host: Host, tmp_path: Path) -> None:
    users = tmp_path / "users"
    made = host.clawq("acl", str(users), "--worker", "arm-1", "--worker", "arm-2")
    assert made.returncode == 0, made.stderr
    assert "learner, watchdog, viewer, admin, arm-1, arm-2" in made.stdout
    host.start("--tcp", "--acl", str(users))
    lines = (users / "arm-1.env").read_text().splitlines()
    worker: Any = connect(lines[1].partition("=")[2].strip("'"))
    assert worker.ping()
    assert stat.S_IMODE((users / "arm-1.env").stat().st_mode) == 0o600


def test_a_server_that_ends_by_itself_ends_the_command(host: Host) -> None:
    process = host.start()
    state = ServerState.read(host.state)
    assert state is not None
    connect(state.data_url).shutdown(nosave=True)
    assert process.wait(30) == 3
    assert ServerState.read(host.state) is None


def test_servers_of_a_run_are_not_stopped_under_it(host: Host) -> None:
    ServerState.of("unix:///b", "unix:///d", owner="run demo").write(host.state)
    told = host.clawq("stop")
    assert told.returncode == 2
    assert "belong to run demo" in told.stderr
