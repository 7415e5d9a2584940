"""Runs the `clawq` command as users do: in a process of its own, with a home of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from processes import outliving

ROOT = Path(__file__).parents[2]


class Clawq:
    """One home: state folder and run folder below `folder`; starts commands there."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.env = {**os.environ, "CLAWQ_STATE_DIR": str(folder / "state"), "COLUMNS": "200", **env}
        self.started: list[Command] = []

    def start(self, *words: str, prefix: Sequence[str] = (), **env: str) -> "Command":
        """Start `clawq WORDS`, after the words of `prefix` (which must become that command by exec)."""
        command = Command([*prefix, sys.executable, "-m", "clawq.cli.main", *words], self.folder, {**self.env, **env})
        self.started.append(command)
        return command

    def call(self, *words: str, timeout_s: float = 60.0, **env: str) -> "Command":
        """Run `clawq WORDS` to its end."""
        command = self.start(*words, **env)
        command.wait(timeout_s)
        return command

    def up(self, config: str, run: str, *overrides: str, **env: str) -> "Command":
        """Start `clawq up` with a configuration of the repository."""
        return self.start("up", str(ROOT / "configs" / config), f"folder={self.runs}", *overrides, "--run", run, **env)

    def report(self, run: str) -> dict[str, Any]:
        """The report of a run that has ended."""
        report: dict[str, Any] = json.loads((self.runs / run / "report.json").read_text())
        return report

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """What a run has written to metrics.jsonl so far."""
        file = self.runs / run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def status(self, run: str) -> dict[str, Any]:
        """`clawq status RUN --json`; empty if there is no such run yet."""
        command = self.call("status", run, "--json")
        if command.status != 0:
            return {}
        facts: dict[str, Any] = json.loads(command.output)[0]
        return facts

    def logs(self, run: str) -> str:
        """The ends of all logs of a run, for failures."""
        files = (self.runs / run / "logs").glob("*.log")
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def close(self) -> None:
        """End whatever is still running."""
        for command in self.started:
            command.kill_tree()


class Command:
    """One running (or ended) command."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str]) -> None:
        self._out = folder / f"out-{time.monotonic_ns()}.txt"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self.process.poll()

    def tree(self) -> list[psutil.Process]:
        """It and all that it started."""
        try:
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, timeout_s: float) -> int:
        """Its exit status; fails with its output if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:.0f} s:\n{self.output[-5000:]}") from None

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> tuple[int, float, list[psutil.Process]]:
        """Signal it; returns its status, the seconds that took, and what outlived it."""
        tree, began = self.tree(), time.monotonic()
        self.process.send_signal(number)
        status = self.wait(timeout_s)
        took_s = time.monotonic() - began
        return status, took_s, outliving(tree, 2.0)

    def kill_tree(self) -> None:
        """Kill it and all that it started."""
        for process in reversed(self.tree()):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
