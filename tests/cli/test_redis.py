"""`clawq redis start | stop | status` with real servers and processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    assert [line.split()[0] for line in told.stdout.splitlines()] == ["broker", "data"]
    assert "67.1 MB at most" in told.stdout.splitlines()[1]
    assert host.clawq("start").returncode == 2
    assert host.clawq("stop").stdout == "stopped\n"
    assert process.wait(10) == 0
    assert ServerState.read(host.state) is None
    assert host.clawq("status").returncode == 2
    assert host.clawq("stop").returncode == 0


def test_with_tcp_the_urls_for_other_machines_are_printed_and_work_and_status_hides_the_password(host: Host) -> None:
    process = host.start("--tcp")
    assert process.stdout is not None
    process.stdout.readline()
    broker = process.stdout.readline().split("'")[1]
    data = process.stdout.readline().split("'")[1]
    assert connect(broker).ping()
    assert connect(data).ping()
    password = data.split(":")[2].partition("@")[0]
    assert len(password) >= 20
    assert password not in host.clawq("status").stdout


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
