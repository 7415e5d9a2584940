"""Fixtures that all tests share: two real Redis servers, a fresh run in each test, and a check for what is left behind.

The servers live for the session, on unix sockets below a folder of the session. Each test has its own run tag, so that
tests never see one another's keys. When the session ends, no process, socket or shared memory that a test made may be
left; if there is one, the session fails and names it. What another session beside it makes is none of its business.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
from leftovers import command_line, in_use, marked_processes, note_shared_memory, shared_memory
from sessions import MET, Session
from waiting import wait_for

from clawq.transport.client import connect
from clawq.transport.control import delete_run
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.server import EmbeddedRedis

#: Every process that a test starts inherits this, whatever becomes of its parents.
_MARK = "CLAWQ_TEST_SESSION"
#: Sessions have a folder each, named after their pid.
_FOLDER = "clawq-tests-"
_ENDING_S = 3.0
#: Before any test is imported.
_SHARED, _MADE = shared_memory(), note_shared_memory()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session if it leaves a process, socket or shared memory."""
    mark = uuid.uuid4().hex
    sockets = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir="/tmp"))
    session = Session(sockets, _FOLDER, os.getpid())
    session.meet()
    ours = {
        _MARK: mark,
        "XDG_RUNTIME_DIR": str(sockets),
        # Nothing of a test stands in the state of whoever runs it; and only tests of the watchdog start one.
        "CLAWQ_STATE_DIR": tempfile.mkdtemp(prefix="clawq-tests-state-", dir="/tmp"),
        "CLAWQ_WATCHDOG": "0",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    yield
    left = [f"process {p.pid}: {command_line(p)}" for p in marked_processes(_MARK, mark, _ENDING_S)]
    left += [f"socket folder {path.name}" for path in sockets.iterdir() if path.name != MET]
    left += [f"listening socket {c.laddr}" for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    new = {name: made_s for name, made_s in shared_memory().items() if name not in _SHARED and not in_use(name)}
    # It does not tell who made it: what a child of this session made may be of another one that was at work then.
    left += [f"shared memory {name}" for name, s in new.items() if name in _MADE or session.was_alone(s)]
    session.part()
    shutil.rmtree(sockets, ignore_errors=True)
    shutil.rmtree(ours["CLAWQ_STATE_DIR"], ignore_errors=True)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    assert not left, "the tests left behind:\n  " + "\n  ".join(left)


@pytest.fixture(autouse=True)
def plain_torch() -> None:
    """Every test begins with all floating-point numbers, whatever ran in this process before, and with one thread.

    Nothing here is large enough for two, and two wait for one another at every step where other processes have work.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def redis_servers(nothing_left_behind: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Broker and data server of the session."""
    servers = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), data_memory_mb=512)
    yield servers
    servers.stop()


@pytest.fixture
def data_client(redis_servers: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A client of the data server."""
    client = connect(redis_servers.data_url)
    yield client
    client.close()


@pytest.fixture
def broker_client(redis_servers: EmbeddedRedis) -> Iterator[redis.Redis]:
    """A client of the broker."""
    client = connect(redis_servers.broker_url)
    yield client
    client.close()


@pytest.fixture
def run_keys(data_client: redis.Redis) -> Iterator[RunKeys]:
    """Keys under a fresh tag; whatever the test wrote under it is deleted afterwards."""
    keys = RunKeys(new_tag())
    yield keys
    delete_run(data_client, keys)


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """Servers of this test alone, to be stopped, killed or filled; the data server has 32 MB."""
    servers = EmbeddedRedis.start(tmp_path / "own", data_memory_mb=32)
    yield servers
    servers.stop()


@pytest.fixture
def restart_data() -> Callable[[EmbeddedRedis], None]:
    """Kill the data server and start an empty one in its place, at the same URL."""

    def restart(servers: EmbeddedRedis) -> None:
        old = servers.processes[1]
        old.kill()
        old.wait()
        # The arguments hold the id of the parent, which is still this process.
        servers.processes[1] = subprocess.Popen(
            old.args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: _answers(servers.data_url), "the new data server answers")

    return restart


def _answers(url: str) -> bool:
    client = connect(url, timeout_s=1.0)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(condition, what, timeout_s=10)`: wait for something that other processes do."""
    return wait_for
