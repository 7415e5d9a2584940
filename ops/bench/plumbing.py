"""Env steps/s and updates/s of the whole system as a ratio to the same code over a socket pair.

python ops/bench/plumbing.py [--quick] [--commit]

A is `clawq up configs/hand_reach.yaml`: real Celery worker, two Redis servers, learner, coordinator, one actor. B is
`ops/bench/twin.py` with the same configuration: the same learner and actor code in two processes over one socket pair.
They take turns (A B, B A, ...). Each is measured in the same way, from outside: two lines of its metrics.jsonl, the
first a while after the first update, and the CPU time of its whole process tree between them.
"""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from ops.bench.common import ROOT, Bench, clean_env, median, scratch, wait_for
from ops.bench.hands import HAND

#: From the first update to the begin of the measurement, seconds: torch is loaded, weights have arrived.
WARM_UP_S = 6.0
START_S = 240.0
END_S = 30.0
OVERRIDES = ("budget.seconds=null", "evaluation.interval_s=null", "record.animation=false", "cores.slots=1")


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at a running system."""

    wall_s: float
    env_steps: float
    updates: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two looks."""

    env_steps_per_s: float
    updates_per_s: float
    env_steps_per_cpu_s: float


def newest(folder: Path) -> dict[str, Any] | None:
    """The last whole line of a run's metrics, once it trains."""
    for file in folder.glob("*/metrics.jsonl"):
        lines = file.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole:
            row: dict[str, Any] = json.loads(whole[-1])
            return row if row.get("updates", 0) > 0 else None
    return None


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and everything below it that lives."""
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def look(process: "subprocess.Popen[bytes]", folder: Path, after_s: float) -> Seen:
    """Wait for the first metrics line after that time of the run's clock."""

    def due() -> dict[str, Any] | None:
        if process.poll() is not None:
            raise RuntimeError(f"it ended by itself with status {process.returncode}; see {folder}")
        row = newest(folder)
        return row if row is not None and row["wall_s"] > after_s else None

    row = wait_for("metrics", due, START_S)
    return Seen(row["wall_s"], row["env_steps"], row["updates"], cpu_seconds(process.pid))


def run_one(words: list[str], folder: Path, seconds: float) -> Rates:
    """Start it, measure it, end it."""
    runs = folder / f"runs-{time.monotonic_ns()}"
    command = [*words, str(HAND), f"folder={runs}", *OVERRIDES]
    log = (folder / "output.log").open("ab")
    process = subprocess.Popen(command, env=clean_env(folder), stdout=log, stderr=log, cwd=ROOT)
    try:
        warm = look(process, runs, 0.0)
        first = look(process, runs, warm.wall_s + WARM_UP_S)
        last = look(process, runs, first.wall_s + seconds)
    except BaseException:
        sys.stderr.write((folder / "output.log").read_text(errors="replace")[-3000:])
        raise
    finally:
        end(process)
        log.close()
    span_s, env_steps = last.wall_s - first.wall_s, last.env_steps - first.env_steps
    updates = last.updates - first.updates
    return Rates(env_steps / span_s, updates / span_s, env_steps / (last.cpu_s - first.cpu_s))


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    bench = Bench("plumbing", __doc__)
    seconds, turns = float(bench.pick(30, 10)), bench.pick(3, 1)
    whole = [str(Path(sys.executable).with_name("clawq")), "up"]
    twin = [sys.executable, str(Path(__file__).with_name("twin.py"))]
    pairs: list[tuple[Rates, Rates]] = []
    with scratch() as folder:
        for number in range(turns):
            order = (whole, twin) if number % 2 == 0 else (twin, whole)
            found = {id(words): run_one(words, folder, seconds) for words in order}
            pairs.append((found[id(whole)], found[id(twin)]))
            bench.say(f"turn {number + 1} of {turns}: {pairs[-1]}")
    for line in ("env_steps_per_s", "updates_per_s"):
        bench.ratio(
            line,
            [(getattr(ours, line), getattr(theirs, line)) for ours, theirs in pairs],
            ">= 0.9",
            whole=median([getattr(ours, line) for ours, _ in pairs]),
            twin=median([getattr(theirs, line) for _, theirs in pairs]),
            seconds=seconds,
        )
    bench.ratio(
        "env_steps_per_cpu_s",
        [(ours.env_steps_per_cpu_s, theirs.env_steps_per_cpu_s) for ours, theirs in pairs],
        "-",
        whole=median([ours.env_steps_per_cpu_s for ours, _ in pairs]),
        twin=median([theirs.env_steps_per_cpu_s for _, theirs in pairs]),
    )


if __name__ == "__main__":
    main()
