"""Real processes for the watchdog to look at, in a registry of the test's own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clawq_process import Clawq

from clawq.procfs import Identity
from clawq.registry import TAG_VARIABLE, Record, Registration, Registry
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Child, Spawner
from clawq.watchdog.policy import Policy

#: Quick, for tests.
QUICK = Policy(period_s=0.1, courtesy_s=0.0, settle_s=0.3, grace_s=0.5, recycle_s=3.0, death_s=5.0)

#: What a child does first: it says when it is ready, and has a progress to show.
_HEAD = "import os, signal, subprocess, sys, time\nfrom clawq import progress\nmine = progress.mine()\n"


class Kennel:
    """Starts children and strangers, and ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.registry = folder, Registry()
        self.spawner = Spawner()
        self.children: list[Child] = []
        self.strangers: list[subprocess.Popen[bytes]] = []

    def child(self, code: str, limits: Mapping[str, float] | None = None, role: str = "actor", **more: Any) -> Child:
        """A registered child that runs `code`, returned when it has printed its first line (`ready`)."""
        name = f"child{len(self.children)}"
        (self.folder / f"{name}.py").write_text(f"{_HEAD}{code}\n")
        env = {"PYTHONPATH": os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])}
        known = Registration(role, f"place-{name}", limits or {"step": 0.5}, **more)
        log = LogFile(self.folder / f"{name}.log")
        child = self.spawner.spawn(name, log, env, pipes=True, registration=known)
        self.children.append(child)
        assert child.stdout is not None
        child.words = child.stdout.readline().decode().split()  # type: ignore[attr-defined]
        assert child.words, log.tail()  # type: ignore[attr-defined]
        return child

    def record(self, child: Child, **changes: Any) -> Record:
        """The record of a child, changed in the registry if wanted."""
        record = self.registry.get(child.tag)
        assert record is not None
        changed = replace(record, **changes)
        self.registry.add(changed)
        return changed

    def stranger(self, tag: str | None = None) -> "subprocess.Popen[bytes]":
        """A process that nobody registered."""
        env = {**os.environ} if tag is None else {**os.environ, TAG_VARIABLE: tag}
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
        self.strangers.append(process)
        return process

    def close(self) -> None:
        for child in self.children:
            child.end_tree()
        for stranger in self.strangers:
            stranger.kill()
            stranger.communicate()


@pytest.fixture
def kennel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kennel]:
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    kennel = Kennel(tmp_path)
    yield kennel
    kennel.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Clawq]:
    """Starts commands, in the same state folder as the kennel."""
    home = Clawq(tmp_path)
    yield home
    home.close()


@pytest.fixture
def quick() -> Policy:
    return QUICK


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether that pid is a living process."""

    def look(pid: int) -> bool:
        identity = Identity.of(pid)
        return identity is not None and identity.alive

    return look
