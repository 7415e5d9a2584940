"""One configuration, seed after seed: final evaluation, what it took, and the curves.

python ops/bench/seeds.py [--config hand_reach] [--seeds 5] [--folder DIR] [--quick] [--commit]

`clawq up configs/CONFIG.yaml seed=S` for S = 0, 1, ..., one after another, each as a process of its own with its own
Redis. Prints a markdown table; with `--commit` it goes to `ops/bench/CONFIG_seeds.md`, and the evaluations over env
steps and time to `ops/bench/CONFIG_seeds.png`. With `--folder` the run folders are kept there, and a seed that is there
already is not run again. `--quick`: one seed, 20 s.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clawq.programs.curve import distinct_evaluations, read_metrics
from ops.bench.common import ROOT, Bench, clean_env, median, scratch

#: Wall time of one seed at the most, seconds: the budget is the configuration's.
LIMIT_S = 7200.0
HEAD = (
    "| seed | env steps | updates | final mean return | success | wall time, s |",
    "| ---: | ---: | ---: | ---: | ---: | ---: |",
)


def run_seed(config: str, seed: int, folder: Path, quick: bool) -> Path:
    """The run folder of one seed; the run is made if it is not there."""
    runs = folder / f"seed-{seed}"
    if not quick and (found := list(runs.glob("*/report.json"))):
        return found[0].parent
    short = ["budget.seconds=20", "evaluation.final_episodes=5"] if quick else []
    words = [f"configs/{config}.yaml", f"folder={runs}", f"seed={seed}", "record.animation=false", *short]
    clawq = str(Path(sys.executable).with_name("clawq"))
    with (folder / "output.log").open("wb") as log:
        status = subprocess.run(
            [clawq, "up", *words], env=clean_env(folder), stdout=log, stderr=log, cwd=ROOT, timeout=LIMIT_S, check=False
        ).returncode
    if status:
        raise RuntimeError(f"seed {seed} ended with status {status}:\n{(folder / 'output.log').read_text()[-3000:]}")
    return next(runs.glob("*/report.json")).parent


def row_of(seed: int, run: Path) -> dict[str, float]:
    """The facts of one run."""
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    numbers, evaluation = report["numbers"], report["final_evaluation"] or {}
    success = evaluation.get("success")
    return {
        "seed": seed,
        "env_steps": numbers["env_steps"],
        "updates": numbers["updates"],
        "mean_return": float(evaluation.get("mean_return", float("nan"))),
        "success": float("nan") if success is None else float(success),
        "seconds": report["seconds"],
    }


def table(rows: list[dict[str, float]]) -> str:
    """Markdown."""
    lines = [
        f"| {row['seed']:.0f} | {row['env_steps']:.0f} | {row['updates']:.0f} | {row['mean_return']:.3f} | "
        f"{row['success']:.2f} | {row['seconds']:.0f} |"
        for row in rows
    ]
    returns, successes = [row["mean_return"] for row in rows], [row["success"] for row in rows]
    foot = f"Median return {median(returns):.3f}, least {min(returns):.3f}; median success {median(successes):.2f}."
    return "\n".join([*HEAD, *lines, "", foot, ""])


def draw(config: str, runs: list[Path], out: Path) -> None:
    """Success (or return, where there is none) of the evaluations of all seeds, over env steps and over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    found = [distinct_evaluations(read_metrics(run)) for run in runs]
    key, label = ("eval/success", "success") if "eval/success" in found[0][-1] else ("eval/mean_return", "mean return")
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, along, name in zip(panels, ("step", "wall_s"), ("env steps", "wall time, s"), strict=True):
        for seed, rows in enumerate(found):
            seen = [row for row in rows if along in row]
            axes.plot(
                [row[along] for row in seen], [row[key] for row in seen], marker="o", markersize=3, label=f"seed {seed}"
            )
        axes.set_xlabel(name)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel(f"{label}, deterministic policy")
    panels[0].legend(frameon=False)
    figure.suptitle(f"configs/{config}.yaml")
    figure.savefig(out, dpi=110)


def main() -> None:
    bench = Bench("seeds", __doc__, {"config": "hand_reach", "seeds": "5", "folder": ""})
    config, seeds = bench.options.config, range(1 if bench.quick else int(bench.options.seeds))
    rows, runs = [], []
    with ExitStack() as stack:
        folder = Path(bench.options.folder) if bench.options.folder else stack.enter_context(scratch())
        folder.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            before = os.getloadavg()[0]
            runs.append(run_seed(config, seed, folder, bench.quick))
            rows.append(row_of(seed, runs[-1]))
            facts: dict[str, Any] = {name: rows[-1][name] for name in ("env_steps", "updates", "success", "seconds")}
            bench.result(
                f"{config}_seed_{seed}", rows[-1]["mean_return"], "final mean return", target=None, load=before, **facts
            )
        text = f"# configs/{config}.yaml, seed after seed\n\n{bench.describe()}\n\n{table(rows)}"
        print(text)
        if bench.commit and not bench.quick:
            (ROOT / "ops" / "bench" / f"{config}_seeds.md").write_text(text, encoding="utf-8")
            draw(config, runs, ROOT / "ops" / "bench" / f"{config}_seeds.png")


if __name__ == "__main__":
    main()
