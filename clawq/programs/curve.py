"""`python -m clawq.programs.curve`: the learning curve of a run, from its metrics.jsonl.

    request   {"folder": run folder, "out": PNG file}
    answer    {"file", "points", "evaluations"}

Returns over wall time and over env steps: what actors got while they explored (smoothed), and each evaluation.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clawq.errors import UserError
from clawq.json_text import parse_json
from clawq.programs.request import Answer, answer_request

#: A drawn line has at most so many points; more lines of metrics are thinned out.
MAX_POINTS = 2_000
#: Training returns are averaged over so many points of the line, one after the other.
SMOOTHING = 15

Row = dict[str, Any]


def curve(request: dict[str, Any]) -> Answer:
    """Answer a curve request.

    Raises:
        UserError: there are no metrics to draw.
    """
    folder, out = Path(request["folder"]), Path(request["out"])
    rows = read_metrics(folder)
    training = thinned([row for row in rows if _number(row, "episode/return") is not None])
    evaluations = distinct_evaluations(rows)
    if not training and not evaluations:
        raise UserError(f"{folder / 'metrics.jsonl'} holds no returns yet, so there is no curve to draw")
    draw(training, evaluations, folder.name, out)
    return {"file": str(out), "points": len(training), "evaluations": len(evaluations)}


def read_metrics(folder: Path) -> list[Row]:
    """The rows of metrics.jsonl (and of the older file, if it was rotated), oldest first; torn lines are left out."""
    rows: list[Row] = []
    for name in ("metrics.1.jsonl", "metrics.jsonl"):
        path = folder / name
        if not path.exists():
            continue
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = parse_json(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and _number(row, "wall_s") is not None:
                    rows.append(row)
    if not rows:
        raise UserError(f"{folder / 'metrics.jsonl'} is missing or empty, so there is no curve to draw")
    return rows


def distinct_evaluations(rows: Sequence[Row]) -> list[Row]:
    """The first row of each evaluation (its numbers are repeated in every row after it)."""
    found: list[Row] = []
    last: tuple[Any, Any] | None = None
    for row in rows:
        if _number(row, "eval/mean_return") is None:
            continue
        identity = (row.get("eval/version"), row["eval/mean_return"])
        if identity != last:
            found.append(row)
        last = identity
    return found


def thinned(rows: Sequence[Row]) -> list[Row]:
    """At most MAX_POINTS rows, evenly chosen, the last one among them."""
    stride = max(1, math.ceil(len(rows) / MAX_POINTS))
    return [*rows[:-1][::stride], rows[-1]] if rows else []


def smoothed(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Running mean over the last `width` values (fewer at the beginning)."""
    total = np.cumsum([0.0, *values])
    return [float(total[i] - total[max(0, i - width)]) / min(i, width) for i in range(1, len(total))]


def draw(training: Sequence[Row], evaluations: Sequence[Row], title: str, out: Path) -> None:
    """Draw the curve into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(panels, ("wall_s", "env_steps"), ("wall time, s", "env steps"), strict=True):
        drawn = [row for row in training if _number(row, key) is not None]
        if drawn:
            values = [float(row["episode/return"]) for row in drawn]
            at = [float(row[key]) for row in drawn]
            axes.plot(at, values, color="#9db4c8", linewidth=0.8)
            axes.plot(at, smoothed(values), color="#2f5d8a", linewidth=1.6, label="training (exploring), smoothed")
        marked = [row for row in evaluations if _number(row, key) is not None]
        if marked:
            spread = [_number(row, "eval/std_return") or 0.0 for row in marked]
            axes.errorbar(
                [float(row[key]) for row in marked],
                [float(row["eval/mean_return"]) for row in marked],
                yerr=spread,
                color="#c2571a",
                marker="o",
                markersize=4,
                linewidth=1.4,
                capsize=2,
                label="evaluation, mean ± std",
            )
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("episode return")
    panels[0].legend(loc="best", frameon=False)
    figure.suptitle(_with_success(title, evaluations))
    temporary = out.with_name(f".{out.name}.part")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(out)


def _with_success(title: str, evaluations: Sequence[Row]) -> str:
    success = _number(evaluations[-1], "eval/success") if evaluations else None
    return title if success is None else f"{title}: success {success:.0%} in the last evaluation"


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


if __name__ == "__main__":
    answer_request(curve)
