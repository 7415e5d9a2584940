"""What every benchmark shares: its options, the facts of the machine, one JSON line for each result.

A script makes a `Bench`, measures, and calls `result` for each line. Figures are medians over repeats; a ratio is
measured in one run, its two sides taking turns, and is the median of the ratios of the turns. Lines are printed;
`--commit` also appends them to `ops/bench/results.jsonl`. The load average before and after is in each line: on a busy
machine a figure says little, a ratio of CPU times more.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "ops" / "bench" / "results.jsonl"
#: Packages whose versions are part of a result.
PACKAGES = ("clawq", "torch", "numpy", "redis", "hiredis", "celery", "gymnasium", "gymnasium-robotics", "mujoco")


class Bench:
    """One run of one benchmark script.

    Args:
        name: of the script.
        text: what `--help` says.
        more: options of this script alone: name -> default.

    Attributes:
        quick: short and rough, to see that it works.
        commit: keep the figures.
        options: all options, `more` among them.
    """

    def __init__(self, name: str, text: str | None, more: Mapping[str, str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="short and rough")
        parser.add_argument("--commit", action="store_true", help=f"append the lines to {RESULTS.relative_to(ROOT)}")
        for option, default in (more or {}).items():
            parser.add_argument(f"--{option}", default=default)
        self.options = options = parser.parse_args()
        self.quick: bool = options.quick
        self.commit: bool = options.commit
        self._name = name
        # A `timeout` must not leave what was started: end through every `finally`.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        self._before = os.getloadavg()
        self._facts = machine_facts()

    def pick(self, full: int, quick: int) -> int:
        """The one of two sizes that this run uses."""
        return quick if self.quick else full

    def result(self, line: str, value: float, unit: str, target: str | None = None, **facts: Any) -> None:
        """One line: print it, and keep it if that was asked for.

        Args:
            line: what was measured, unique within the script.
            value: the figure.
            unit: of the figure.
            target: what it should be, in words.
            facts: samples, sizes and other numbers that help to judge the figure.
        """
        row = {
            "bench": self._name,
            "line": line,
            "value": rounded(value),
            "unit": unit,
            "target": target,
            **{name: rounded(fact) for name, fact in facts.items()},
            "quick": self.quick,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "load_before": rounded(self._before),
            "load_after": rounded(os.getloadavg()),
            "machine": self._facts,
        }
        shown = {name: fact for name, fact in row.items() if name != "machine"}
        print(json.dumps(shown, ensure_ascii=False), flush=True)
        if self.commit:
            with RESULTS.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")

    def ratio(self, line: str, pairs: Sequence[tuple[float, float]], target: str, **facts: Any) -> None:
        """A result that is the median of first / second over the turns."""
        ratios = [first / second for first, second in pairs]
        self.result(line, statistics.median(ratios), "ratio", target, samples=ratios, **facts)

    def describe(self) -> str:
        """The machine in one sentence."""
        facts = self._facts
        versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "redis", "mujoco", "clawq"))
        return f"{facts['cpu']}, {facts['cores']} cores; {versions}, {facts['server']}; commit {facts['commit']}."

    def say(self, text: str) -> None:
        """A line for whoever watches, on stderr."""
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)


def machine_facts() -> dict[str, Any]:
    """What the figures were measured on; no names of hosts or folders."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "server": _server(),
        "commit": _commit(),
    }


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for run folders, state and sockets, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="clawq-bench-") as folder:
        yield Path(folder)


def clean_env(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a `clawq` that meets no other clawq of this machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLAWQ_")}
    if "CLAWQ_REDIS_SERVER" in os.environ:
        env["CLAWQ_REDIS_SERVER"] = os.environ["CLAWQ_REDIS_SERVER"]
    return {**env, "CLAWQ_STATE_DIR": str(folder / "state"), **more}


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (the next larger one, never interpolated)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def wait_for(what: str, ready: Callable[[], Any], timeout_s: float, pause_s: float = 0.05) -> Any:
    """Look until `ready` gives something; TimeoutError with `what` otherwise."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := ready()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {what} within {timeout_s:g} s")
        time.sleep(pause_s)
    return found


def rounded(value: Any) -> Any:
    """Four significant digits, in whatever holds the numbers."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 1000 else round(value)
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    return value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _server() -> str:
    from clawq.transport.server import find_server

    binary = find_server()
    return f"{binary.path.name} {'.'.join(map(str, binary.version))}"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "clawq", "plugins", "configs")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
