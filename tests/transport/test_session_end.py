"""The check in tests/conftest.py that nothing is left behind must itself be able to fail."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
    # Nor is what it leaves on purpose given time to end by itself.
    text = text.replace("_ENDING_S = 3.0", "_ENDING_S = 0.2")
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


@pytest.fixture
def beside() -> Iterator[Path]:
    """The folder of another session, which a living process stands for."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = Path(f"/tmp/{FOLDER}{process.pid}-x")
    folder.mkdir()
    yield folder
    process.communicate(b"\n")
    shutil.rmtree(folder)


#: Four pieces of shared memory: before and after the other session ends, by this process and by a child.
BESIDE = """
import os, subprocess, time
from pathlib import Path
from sessions import Session

PIECE = "/dev/shm/clawq-beside-"
Path(PIECE + "import").touch()

def test_it():
    subprocess.run(["touch", PIECE + "child"], check=True)
    os.mkdir(PIECE + "folder")
    Session(Path({folder!r}), {prefix!r}, {pid}).part()
    time.sleep(0.1)  # longer than a tick of the clock of files
    subprocess.run(["touch", PIECE + "later"], check=True)
"""


def test_of_shared_memory_only_what_may_be_of_a_session_beside_it_is_passed_over(session: Path, beside: Path) -> None:
    pid = int(beside.name.removeprefix(FOLDER).partition("-")[0])
    try:
        done = run(session, BESIDE.format(folder=str(beside), prefix=FOLDER, pid=pid))
    finally:
        for path in Path("/dev/shm").glob("clawq-beside-*"):
            path.rmdir() if path.is_dir() else path.unlink()
    assert done.returncode != 0, done.stdout
    named = re.findall("shared memory clawq-beside-([a-z]+)", done.stdout)
    assert set(named) == {"import", "folder", "later"}, done.stdout
    # The other one was told, so that it does not take ours for its own
    assert list((beside / "met").iterdir())


def test_a_session_with_real_servers_leaves_nothing(session: Path) -> None:
    done = run(session, "def test_it(data_client, broker_client): assert data_client.ping() and broker_client.ping()\n")
    assert done.returncode == 0, done.stdout
