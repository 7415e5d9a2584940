"""The hand run, seed after seed: final evaluation and what it took.

python ops/bench/seeds.py [--quick] [--commit]

`clawq up configs/hand_reach.yaml seed=S` for S = 0..4, one after another, each as a process of its own with its own
Redis. Prints a markdown table; with `--commit` it goes to `ops/bench/hand_reach_seeds.md`. `--quick`: one seed, 20 s.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ops.bench.common import ROOT, Bench, clean_env, median, scratch
from ops.bench.hands import HAND

TABLE = ROOT / "ops" / "bench" / "hand_reach_seeds.md"
SEEDS = range(5)
LIMIT_S = 900.0
HEAD = (
    "| seed | env steps | updates | final mean return | success | wall time, s | load average |",
    "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def run_seed(seed: int, folder: Path, quick: bool) -> dict[str, Any]:
    """One run; its report."""
    short = ["budget.seconds=20", "evaluation.final_episodes=5"] if quick else []
    words = [str(HAND), f"folder={folder / 'runs'}", f"seed={seed}", "record.animation=false", *short]
    clawq = str(Path(sys.executable).with_name("clawq"))
    with (folder / "output.log").open("wb") as log:
        status = subprocess.run(
            [clawq, "up", *words], env=clean_env(folder), stdout=log, stderr=log, cwd=ROOT, timeout=LIMIT_S, check=False
        ).returncode
    if status:
        raise RuntimeError(f"seed {seed} ended with status {status}:\n{(folder / 'output.log').read_text()[-3000:]}")
    report: dict[str, Any] = json.loads(next((folder / "runs").glob("*/report.json")).read_text())
    return report


def row_of(seed: int, report: dict[str, Any], load: tuple[float, float]) -> dict[str, float]:
    """The facts of one run; `load` is the 1-minute average before and after."""
    numbers, evaluation = report["numbers"], report["final_evaluation"] or {}
    success = evaluation.get("success")
    return {
        "seed": seed,
        "env_steps": numbers["env_steps"],
        "updates": numbers["updates"],
        "mean_return": float(evaluation.get("mean_return", float("nan"))),
        "success": float("nan") if success is None else float(success),
        "seconds": report["seconds"],
        "load_before": load[0],
        "load_after": load[1],
    }


def table(rows: list[dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        f"| {row['seed']:.0f} | {row['env_steps']:.0f} | {row['updates']:.0f} | {row['mean_return']:.3f} | "
        f"{row['success']:.2f} | {row['seconds']:.0f} | {row['load_before']:.1f} → {row['load_after']:.1f} |"
        for row in rows
    ]
    returns, successes = [row["mean_return"] for row in rows], [row["success"] for row in rows]
    foot = f"Median return {median(returns):.3f}, least {min(returns):.3f}; median success {median(successes):.2f}."
    return "\n".join([*HEAD, *lines, "", foot, ""])


def main() -> None:
    bench = Bench("seeds", __doc__)
    rows = []
    for seed in SEEDS[:1] if bench.quick else SEEDS:
        before = os.getloadavg()[0]
        with scratch() as folder:
            report = run_seed(seed, folder, bench.quick)
        rows.append(row_of(seed, report, (before, os.getloadavg()[0])))
        facts = {name: rows[-1][name] for name in ("env_steps", "updates", "success", "seconds")}
        bench.result(f"seed_{seed}", rows[-1]["mean_return"], "final mean return", None, **facts)
    text = f"# configs/hand_reach.yaml, seed after seed\n\n{bench.describe()}\n\n{table(rows)}"
    print(text)
    if bench.commit and not bench.quick:
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
