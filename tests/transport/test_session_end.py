"""The check in tests/conftest.py that nothing is left behind must itself be able to fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SUPPORT = CONFTEST.parent / "support"

FOLDER = "clawq-nested-"
#: Leaves one of each kind.
LEAVES = """
import os, socket, subprocess, sys, tempfile
from pathlib import Path

def test_process():
    # A grandchild in a session of its own, whose parent is gone: no tree leads to it.
    inner = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(8)'])"
    subprocess.run([sys.executable, "-c", inner], check=True, start_new_session=True)

def test_socket_folder():
    tempfile.mkdtemp(prefix="clawq-0-1-", dir=os.environ["XDG_RUNTIME_DIR"])

def test_listening_socket():
    global kept
    kept = socket.create_server(("127.0.0.1", 0))

def test_shared_memory():
    Path("/dev/shm/clawq-test-left").write_text("x")
"""


@pytest.fixture
def session(tmp_path: Path) -> Path:
    # Its folders have other names: sessions that happen to be at work on this machine are none that it meets.
    text = CONFTEST.read_text().replace('"clawq-tests-"', f'"{FOLDER}"')
    (tmp_path / "conftest.py").write_text(text)
    return tmp_path


def run(session: Path, text: str) -> "subprocess.CompletedProcess[str]":
    (session / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])}
    return subprocess.run(command, cwd=session, env=env, capture_output=True, text=True, check=False)


def test_a_session_that_leaves_something_fails_and_names_it(session: Path) -> None:
    try:
        done = run(session, LEAVES)
    finally:
        Path("/dev/shm/clawq-test-left").unlink(missing_ok=True)
    assert done.returncode != 0, done.stdout
    assert "the tests left behind" in done.stdout
    for kind in ("process", "socket folder", "listening socket", "shared memory"):
        assert f"  {kind} " in done.stdout


def test_shared_memory_of_a_session_beside_it_is_not_its_own(session: Path) -> None:
    # Given another session: a living process, and its folder
    beside = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = Path(f"/tmp/{FOLDER}{beside.pid}-x")
    folder.mkdir()
    try:
        done = run(session, "def test(): open('/dev/shm/clawq-test-beside', 'w').close()\n")
        assert done.returncode == 0, done.stdout
        # It was told, so that it does not take ours for its own
        assert (folder / "met").exists()
    finally:
        beside.communicate(b"\n")
        shutil.rmtree(folder)
        Path("/dev/shm/clawq-test-beside").unlink(missing_ok=True)


def test_a_session_with_real_servers_leaves_nothing(session: Path) -> None:
    done = run(session, "def test_it(data_client, broker_client): assert data_client.ping() and broker_client.ping()\n")
    assert done.returncode == 0, done.stdout
