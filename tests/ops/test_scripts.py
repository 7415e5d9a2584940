"""The set-up scripts where they may not do what they want: what a newcomer is told."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *sorted(path for path in (ROOT / "ops").iterdir() if path.is_file()),
    ROOT / ".ci" / "run",
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the set-up scripts read, without an environment."""
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("bench", "decisions", "__pycache__"))
    for name in ("constraints.txt", "pyproject.toml", "plugins/clawq-hands/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def program(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def run(script: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", script], capture_output=True, text=True, env={**os.environ, **env}, timeout=60, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_executable_short_and_plain_sh(script: Path) -> None:
    assert script.stat().st_mode & stat.S_IXUSR
    assert script.read_text().startswith("#!/bin/sh\n# ")
    assert len(script.read_text().splitlines()) <= 40
    subprocess.run(["sh", "-n", script], check=True, timeout=10)


def test_a_python_that_is_too_old_is_told_and_nothing_is_made(copy: Path) -> None:
    program(copy / "bin" / "python3", '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0; exit 1')
    path = f"{copy / 'bin'}:{os.environ['PATH']}"
    told = run(copy / "ops" / "setup", PYTHON="python3", PATH=path)
    assert told.returncode == 1
    assert "clawq needs Python 3.11 or newer, and found Python 3.9.2." in told.stderr
    assert not (copy / ".venv").exists()


def test_a_python_without_venv_is_told_and_leaves_no_half_environment(copy: Path) -> None:
    program(copy / "bin" / "python3", '[ "$1" = -m ] && mkdir -p .venv/bin && exit 1; exit 0')
    told = run(copy / "ops" / "setup", PYTHON=str(copy / "bin" / "python3"))
    assert told.returncode == 1
    assert "apt install python3-venv" in told.stderr
    assert not (copy / ".venv").exists()


def test_set_up_installs_once_and_again_only_when_a_pin_has_changed(copy: Path) -> None:
    program(copy / ".venv" / "bin" / "python", 'echo "$@" >> calls')
    for _ in range(2):
        assert run(copy / "ops" / "setup").returncode == 0
    pip, compiling = (copy / "calls").read_text().splitlines()
    assert pip == "-m pip install --no-compile -c constraints.txt -e .[dev,picture] -e plugins/clawq-hands"
    assert compiling.startswith("-m compileall")
    (copy / "constraints.txt").write_text("click==8.1.8\n")
    assert run(copy / "ops" / "setup").returncode == 0
    assert len((copy / "calls").read_text().splitlines()) == 4


def test_a_failed_set_up_is_tried_again(copy: Path) -> None:
    program(copy / ".venv" / "bin" / "python", 'echo "$@" >> calls; exit 1')
    for _ in range(2):
        assert run(copy / "ops" / "setup").returncode == 1
    assert len((copy / "calls").read_text().splitlines()) == 2


@pytest.fixture
def bare(copy: Path) -> dict[str, str]:
    """A Linux machine without the drawing libraries, where we are nobody and may not become root."""
    program(copy / ".venv" / "bin" / "python", "exit 1")
    for name in ("sh", "dirname", "env"):
        found = shutil.which(name)
        assert found is not None
        (copy / "bin").mkdir(exist_ok=True)
        (copy / "bin" / name).symlink_to(found)
    program(copy / "bin" / "uname", "echo Linux")
    program(copy / "bin" / "id", "echo 1000")
    program(copy / "bin" / "sudo", "exit 1")
    program(copy / "bin" / "apt-get", 'echo "$@" >> "$CALLS"')
    return {"PATH": str(copy / "bin"), "CALLS": str(copy / "calls")}


def test_without_root_the_drawing_libraries_are_named_and_it_goes_on(copy: Path, bare: dict[str, str]) -> None:
    told = run(copy / "ops" / "setup-rendering", **bare)
    assert told.returncode == 0
    assert "sudo apt install libosmesa6 libegl1 libegl-mesa0 libgl1" in told.stderr
    assert not (copy / "calls").exists()


def test_as_root_they_are_installed_one_by_one_and_a_missing_one_stops_nothing(
    copy: Path, bare: dict[str, str]
) -> None:
    program(copy / "bin" / "id", "echo 0")
    program(copy / "bin" / "apt-get", 'echo "$@" >> "$CALLS"; case "$*" in *libosmesa6*) exit 100;; esac')
    told = run(copy / "ops" / "setup-rendering", **bare)
    assert told.returncode == 0
    assert "could not install libosmesa6" in told.stderr
    calls = (copy / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["-qq", "libosmesa6", "libegl1", "libegl-mesa0", "libgl1"]


def test_with_the_libraries_there_nothing_is_installed(copy: Path, bare: dict[str, str]) -> None:
    program(copy / ".venv" / "bin" / "python", "exit 0")
    program(copy / "bin" / "id", "echo 0")
    told = run(copy / "ops" / "setup-rendering", **bare)
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")
    assert not (copy / "calls").exists()


def test_without_root_a_redis_with_tls_is_named_and_the_tests_go_on(copy: Path, bare: dict[str, str]) -> None:
    told = run(copy / "ops" / "setup-tls", **bare, REDIS_WITH_TLS=str(copy / "missing"))
    assert told.returncode == 0
    assert "sudo apt install redis-tools" in told.stderr
    assert not (copy / "calls").exists()


def test_where_a_redis_with_tls_cannot_be_installed_it_is_told_once_and_not_tried_again(
    copy: Path, bare: dict[str, str]
) -> None:
    program(copy / "bin" / "id", "echo 0")
    program(copy / "bin" / "timeout", 'shift; exec "$@"')
    program(copy / "bin" / "apt-get", 'echo "$@" >> "$CALLS"; exit 100')
    for name in ("mkdir", "touch"):
        (copy / "bin" / name).symlink_to(str(shutil.which(name)))
    told, again = (run(copy / "ops" / "setup-tls", **bare, REDIS_WITH_TLS=str(copy / "missing")) for _ in range(2))
    assert (told.returncode, again.returncode) == (0, 0)
    assert "could not install redis-tools; the tests of TLS will be skipped" in told.stderr
    assert len((copy / "calls").read_text().splitlines()) == 2


def test_a_redis_with_tls_that_is_there_is_used_by_the_tests_alone(copy: Path) -> None:
    program(copy / "there", "exit 0")
    (copy / ".venv").mkdir()
    told = run(copy / "ops" / "setup-tls", REDIS_WITH_TLS=str(copy / "there"))
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")
    assert (copy / ".venv" / "redis-tls" / "redis-server").resolve() == copy / "there"
