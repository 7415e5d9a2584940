"""The registry of processes and their progress, with real processes."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clawq import progress
from clawq.procfs import Identity, open_if, read_stat
from clawq.registry import Record, Registration, Registry, describe
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Spawner

Eventually = Callable[..., None]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    return Registry()


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def program(folder: Path, code: str) -> dict[str, str]:
    (folder / "small.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_R5_a_program_does_not_begin_before_it_is_registered(registry: Registry, tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom clawq.registry import Registry, TAG_VARIABLE\n"
        "record = Registry().get(os.environ[TAG_VARIABLE])\n"
        "print(record.pid == os.getpid(), record.role, record.place, record.limits, record.run, flush=True)\n"
        "sys.stdin.read()\n"
    )
    env = {**program(tmp_path, code), "CLAWQ_RUN": "ab" * 16}
    known = Registration("actor", "slot-0", {"step": 3.0})
    child = Spawner().spawn("small", LogFile(tmp_path / "log"), env, pipes=True, registration=known)
    assert child.stdout is not None
    assert child.stdout.readline().decode().split() == ["True", "actor", "slot-0", "{'step':", "3.0}", "ab" * 16]
    [record] = registry.records()
    assert record.identity == Identity.of(child.pid)
    assert record.parent == Identity.of(os.getpid())
    assert stat.S_IMODE(registry._file(record.tag).stat().st_mode) == 0o600
    child.end_tree(why="it was in the way")
    assert registry.records() == [], "removed when it was reaped"
    assert [(death.place, death.how.splitlines()[0]) for death in registry.deaths()] == [
        ("slot-0", "it was in the way")
    ]
    assert sorted(path.name for path in registry.folder.iterdir()) == ["deaths.jsonl"]


def test_R5_a_program_whose_parent_died_before_it_was_registered_never_begins(tmp_path: Path) -> None:
    env = {**os.environ, **program(tmp_path, "print('began')\n")}
    held, release = os.pipe()
    command = [sys.executable, "-m", "clawq.spawning.launch", "small"]
    process = subprocess.Popen(
        command, env={**env, "CLAWQ_RELEASE_FD": str(held)}, pass_fds=(held,), stdout=subprocess.PIPE
    )
    os.close(held)
    os.close(release)
    assert process.communicate(timeout=30.0)[0] == b""
    assert process.returncode == 1


def test_progress_is_seen_from_outside_even_of_a_stopped_process(
    registry: Registry, tmp_path: Path, eventually: Eventually
) -> None:
    code = (
        "import sys\nfrom clawq import progress\nmine = progress.mine()\n"
        "for line in sys.stdin:\n    mine.moved(line.strip()); mine.worked(1, 1); print(mine.stop_wanted, flush=True)\n"
    )
    child = Spawner().spawn("small", LogFile(tmp_path / "log"), program(tmp_path, code), pipes=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        file = registry.progress_file(child.tag)
        first = progress.read(file)
        assert first is not None
        assert (first.phase, first.counter) == ("exec", 0)
        child.stdin.write(b"step\n")
        assert child.stdout.readline() == b"False\n"
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: getattr(read_stat(child.pid), "state", "") == "T", "it to be stopped")
        second = progress.read(file)
        assert second is not None
        assert (second.phase, second.counter, second.works, second.busy) == ("step", 1, 1, 1)
        assert second.at_s >= first.at_s
        progress.ask_to_stop(file)
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write(b"send\n")
        assert child.stdout.readline() == b"True\n"
    finally:
        child.end_tree()


def test_a_reused_pid_is_another_process(stranger: "subprocess.Popen[bytes]") -> None:
    real = Identity.of(stranger.pid)
    assert real is not None
    forged = replace(real, start_ticks=real.start_ticks + 1)
    assert real.alive
    assert not forged.alive
    assert open_if(forged) is None
    pidfd = open_if(real)
    assert pidfd is not None
    os.close(pidfd)


def test_records_that_nobody_can_read_are_left_out_and_thrown_away_when_they_are_old(
    registry: Registry, stranger: "subprocess.Popen[bytes]"
) -> None:
    record = describe(stranger.pid, "ab" * 16, Registration("redis", "x"), {"CLAWQ_DATA_URL": "unix:///d"})
    assert isinstance(record, Record)
    registry.add(record)
    torn = registry.folder / f"{'cd' * 16}.json"
    torn.write_text('{"tag": "cd')
    assert registry.records() == [record]
    assert torn.exists()
    os.utime(torn, (1.0, 1.0))
    assert registry.records() == [record]
    assert not torn.exists()


def test_where_no_watchdog_cleans_up_old_records_of_the_dead_are_swept(
    registry: Registry, stranger: "subprocess.Popen[bytes]"
) -> None:
    living = describe(stranger.pid, "ab" * 16, Registration("redis", "x"), {})
    assert living is not None
    dead = replace(living, tag="cd" * 16, identity=replace(living.identity, start_ticks=1))
    elsewhere = replace(living, tag="ef" * 16, identity=replace(living.identity, namespace=1))
    for record in (living, dead, elsewhere):
        registry.add(record)
    registry.prepare("01" * 16)
    registry.sweep()
    assert len(registry.records()) == 3, "not before a day has passed"
    registry.sweep(older_than_s=-1.0)
    assert {record.tag for record in registry.records()} == {living.tag, elsewhere.tag}
    assert not list(registry.folder.glob("*.progress"))


def test_deaths_and_unfit_places_are_kept_and_bounded(registry: Registry, stranger: "subprocess.Popen[bytes]") -> None:
    record = describe(stranger.pid, "ab" * 16, Registration("actor", "slot-0"), {})
    assert record is not None
    registry.add(record)
    for number in range(300):
        registry.bury(record, f"death {number} " + "x" * 1500)
    deaths = registry.deaths()
    assert deaths[-1].how.startswith("death 299 ")
    assert (registry.folder / "deaths.jsonl").stat().st_size < 300_000
    assert registry.unfit() == {}
    registry.condemn("slot-0", "the kernel holds it")
    assert registry.unfit() == {"slot-0": "the kernel holds it"}
    registry.pardon("slot-0")
    assert registry.unfit() == {}


def test_a_state_folder_that_cannot_be_written_costs_the_watchdogs_eyes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "file"))
    child = Spawner().spawn("small", LogFile(tmp_path / "log"), program(tmp_path, "print('began')\n"), pipes=True)
    assert child.stdout is not None
    assert child.stdout.read() == b"began\n"
    assert child.wait_exit(20.0)
    assert child.end_tree() == 0
