"""An hour of the whole system at full rate: does anything grow?

ops/soak [--hours H] [--config FILE] [--more "KEY=VALUE ..."] [--again FOLDER] [--quick] [--commit]

`clawq up` with two actors that never wait for a simulator (the point environment), the learner and both servers as
fast as they go, archive, checkpoints and evaluations much more often than usual and all bounds small, so that within
the warm-up everything that has a bound reaches it. Every 5 s it is looked at from outside (`sampling.py`); at the end
each series is judged (`flatness.py`): median of the last quarter against that of the second one, and the slope. The run
is then stopped; its ledger must balance, and nothing may be left. Exit status 1 if a series is not flat (it is named).

Samples, verdicts and the run's own folder are kept in runs/soak-<time>/; `--again` judges such samples anew. The
picture is ops/bench/soak.png with `--commit`, else beside the samples.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from clawq.programs.audit import read_ledger
from clawq.registry import RUN_VARIABLE
from clawq.state import ServerState
from clawq.transport.client import connect
from clawq.transport.control import RunRegistry
from ops.bench.common import ROOT, Bench, clean_env, scratch, wait_for
from ops.bench.flatness import HEADLINE, Verdict, judge, names_of_faults
from ops.bench.plumbing import END_S, START_S, newest
from ops.bench.sampling import ROLES, Sampler, describe

PICTURE = ROOT / "ops" / "bench" / "soak.png"
SAMPLE_S = 5.0
RUN = "soak"
#: Verdict and points of each series.
Found = dict[str, tuple[Verdict, list[tuple[float, float]]]]
#: Full rate, and small bounds.
OVERRIDES = (
    "budget={}",
    "environment.options={}",
    "environment.num_envs=16",
    "rate_limit.samples_per_insert=null",
    "cores.slots=2",
    "actors.lease_s=1",
    "redis.data_memory_mb=96",
    "replay.capacity=100000",
    "learner.publish_interval_s=0.1",
    "learner.checkpoint_interval_s=5",
    "evaluation.interval_s=30",
    "archive={enabled: true, segment_bytes: 2000000, bytes: 40000000}",
    "record.animation=false",
)


def watch(bench: Bench, up: "subprocess.Popen[bytes]", folder: Path, kept: Path, seconds: float) -> list[Any]:
    """Sample for so long; returns (seconds, values) rows, which are in samples.jsonl too."""

    def trains() -> Any:
        if up.poll() is not None:
            raise RuntimeError(f"clawq up ended by itself with status {up.returncode}; see {kept}")
        return newest(kept) and ServerState.read(folder / "state")

    state: ServerState = wait_for("training", trains, START_S)
    record = RunRegistry(connect(state.broker_url)).get(RUN)
    assert record is not None
    clients = connect(state.broker_url), connect(state.data_url)
    sampler = Sampler(*clients, record.keys, kept / RUN, folder / "state", up.pid)
    rows: list[tuple[float, dict[str, float]]] = []
    begin_s = said_s = time.monotonic()
    with (kept / "samples.jsonl").open("w", encoding="utf-8") as out:
        while (now_s := time.monotonic()) < begin_s + seconds:
            if up.poll() is not None:
                raise RuntimeError(f"clawq up ended by itself with status {up.returncode}; see {kept}")
            values = sampler.look()
            rows.append((now_s - begin_s, values))
            out.write(json.dumps({"s": round(rows[-1][0], 2), **values}) + "\n")
            out.flush()
            if now_s - said_s > 60 or len(rows) == 2:
                said_s = now_s
                shown = ("env steps per s", "updates per s", "learner USS MB", "actor USS MB", "data used MB", "events")
                bench.say(f"{rows[-1][0]:.0f} s: " + ", ".join(f"{name} {values.get(name, 0):.5g}" for name in shown))
            time.sleep(max(0.0, now_s + SAMPLE_S - time.monotonic()))
    return rows


def read_samples(kept: Path) -> list[tuple[float, dict[str, float]]]:
    """What `watch` wrote."""
    lines = [json.loads(line) for line in (kept / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line.pop("s"), line) for line in lines]


def judge_all(rows: Sequence[tuple[float, Mapping[str, float]]]) -> Found:
    """Verdict and points of each series."""
    names = dict.fromkeys(name for _, values in rows for name in values)
    points = {name: [(at_s, values[name]) for at_s, values in rows if name in values] for name in names}
    return {name: (judge(describe(name), points[name]), points[name]) for name in names}


def left_behind(tree: Sequence[psutil.Process], folder: Path, shared: set[str]) -> list[str]:
    """What outlived the run: processes of its tree, sockets, shared memory, announcements."""
    gone_by_s = time.monotonic() + 5.0
    while (alive := [p for p in tree if p.is_running()]) and time.monotonic() < gone_by_s:
        time.sleep(0.1)
    left = [f"process {process.pid} {' '.join(process.cmdline())[:80]}" for process in alive]
    left += [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - shared if name.startswith("clawq")]
    for pattern in ("redis-*.json", "redis/*", "processes/*/*.progress"):
        left += [str(path.relative_to(folder)) for path in (folder / "state").glob(pattern)]
    return left + [str(path.relative_to(folder)) for path in (folder / "sockets").iterdir()]


def draw(path: Path, found: Found, title: str) -> None:
    """Every kind of series in a panel of its own; what is not flat is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ends = ("per s", "used MB", "RSS MB", "USS MB", "files open", "threads", "keys", "entries", "logs MB", "files")
    panels = {end: [name for name in found if name.endswith(end)] for end in ends}
    panels["entries"] += ["events"]
    panels["logs MB"] += ["run folder MB", "broker file MB"]
    figure, axes = pyplot.subplots(2, 5, figsize=(20, 7.5), sharex=True, layout="constrained")
    for axis, (end, names) in zip(axes.flat, panels.items(), strict=True):
        for name in names:
            verdict, points = found[name]
            label = name.removesuffix(end).strip() or name
            axis.plot(
                [at_s / 60 for at_s, _ in points],
                [value for _, value in points],
                "--" if verdict.fault else "-",
                label=f"{label} {verdict.change:+.1%}",
                linewidth=1,
            )
        axis.set_title({"logs MB": "files, MB"}.get(end, end), fontsize=10)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
        if points:
            axis.axvspan(0, points[-1][0] / 240, color="grey", alpha=0.1)
    for axis in axes[1]:
        axis.set_xlabel("minutes; grey: warm-up")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=80)


def run_one(bench: Bench, folder: Path, kept: Path, seconds: float) -> tuple[list[Any], int, list[str]]:
    """Start it, watch it, stop it; returns rows, the exit status, and what was left."""
    (folder / "sockets").mkdir()
    env = clean_env(folder, XDG_RUNTIME_DIR=str(folder / "sockets"))
    env.pop(RUN_VARIABLE, None)
    words = [str(Path(sys.executable).with_name("clawq")), "up", str(ROOT / bench.options.config), f"folder={kept}"]
    shared = set(os.listdir("/dev/shm"))
    with (kept / "output.log").open("wb") as log:
        up = subprocess.Popen(
            [*words, *OVERRIDES, *bench.options.more.split(), "--run", RUN], env=env, stdout=log, stderr=log, cwd=ROOT
        )
        tree: list[psutil.Process] = []
        try:
            rows = watch(bench, up, folder, kept, seconds)
            tree = psutil.Process(up.pid).children(recursive=True)
        finally:
            if up.poll() is None:
                up.terminate()
            try:
                status = up.wait(END_S)
            except subprocess.TimeoutExpired:
                up.kill()
                status = up.wait()
    return rows, status, left_behind(tree, folder, shared)


def main() -> int:
    bench = Bench("soak", __doc__, {"hours": "1", "config": "configs/point.yaml", "more": "", "again": ""})
    seconds = 180.0 if bench.quick else 3600.0 * float(bench.options.hours)
    kept = Path(bench.options.again or ROOT / "runs" / time.strftime("soak-%Y%m%d-%H%M%S"))
    if bench.options.again:
        rows, status, left = read_samples(kept), 0, list[str]()
    else:
        kept.mkdir(parents=True)
        with scratch() as folder:
            rows, status, left = run_one(bench, folder, kept, seconds)
    found = judge_all(rows)
    verdicts = [verdict for verdict, _ in found.values()]
    table = "\n".join([HEADLINE, *(verdict.line for verdict in verdicts)])
    (kept / "verdict.txt").write_text(table + "\n", encoding="utf-8")
    bench.say("\n" + table)
    faults = names_of_faults(verdicts)
    ledger = read_ledger(kept / RUN)
    wrong = ["no ledger was kept"] if ledger is None else ledger.problems()
    wrong += [f"left behind: {what}" for what in left] + ([f"clawq up ended with status {status}"] if status else [])
    judged = [verdict for verdict in verdicts if not verdict.series.told and verdict.series.bound is None]
    shown = ["env steps per s", "updates per s", "CPU us of actors per env step", "data used MB", "broker used MB"]
    shown += [f"{role} USS MB" for role in ROLES]
    bench.result(
        "largest_growth",
        max(max(verdict.change, verdict.trend) for verdict in judged if not verdict.series.falls),
        "share",
        "<= 0.05",
        minutes=rows[-1][0] / 60,
        not_flat=faults,
        wrong=wrong,
        series=len(verdicts),
        acknowledged=0 if ledger is None else ledger.acknowledged,
        **{name: [found[name][0].early, found[name][0].late] for name in shown if name in found},
    )
    title = (
        f"{bench.options.config}, {rows[-1][0] / 60:.0f} minutes at full rate; change: last quarter against the second"
    )
    draw(PICTURE if bench.commit else kept / "soak.png", found, title)
    for text in [*(f"not flat: {name}" for name in faults), *wrong]:
        bench.say(text)
    return 1 if faults or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
