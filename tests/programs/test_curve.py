import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clawq.errors import UserError
from clawq.metrics import JsonlWriter
from clawq.programs.curve import MAX_POINTS, curve, distinct_evaluations, read_metrics, smoothed, thinned


def write_run(folder: Path, lines: int = 60) -> None:
    writer = JsonlWriter(folder)
    for k in range(lines):
        metrics = {"episode/return": -6.0 + k / 20, "env_steps": 500.0 * k}
        if k >= 20:
            metrics |= {
                "eval/mean_return": -5.0 if k < 40 else -2.0,
                "eval/std_return": 0.5,
                "eval/version": 3.0 if k < 40 else 9.0,
                "eval/success": 0.25,
            }
        writer.write(k, float(k), metrics)
    writer.close()


def test_the_program_draws_a_png(tmp_path: Path) -> None:
    write_run(tmp_path)
    asked = {"folder": str(tmp_path), "out": str(tmp_path / "curve.png")}
    done = subprocess.run(
        [sys.executable, "-m", "clawq.programs.curve"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == {"file": str(tmp_path / "curve.png"), "points": 60, "evaluations": 2}
    with Image.open(tmp_path / "curve.png") as png:
        assert png.format == "PNG"
        assert png.size[0] > 600
        assert len(png.convert("RGB").getcolors(1 << 20) or []) > 20


def test_evaluations_are_counted_once_though_every_line_repeats_them(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert [row["wall_s"] for row in distinct_evaluations(read_metrics(tmp_path))] == [20.0, 40.0]


def test_torn_lines_and_the_older_file_are_read(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.1.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "wall_s": 9.0, "episode/return": null}\n{"step": 10, "wa')
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 9]


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "wall_s": 1.0}\n'])
def test_without_returns_there_is_one_line_why(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match="no curve to draw"):
        curve({"folder": str(tmp_path), "out": str(tmp_path / "curve.png")})


def test_long_runs_are_thinned_and_keep_their_end() -> None:
    rows: list[dict[str, Any]] = [{"k": k} for k in range(10 * MAX_POINTS + 3)]
    kept = thinned(rows)
    assert len(kept) <= MAX_POINTS + 1
    assert kept[0] == rows[0]
    assert kept[-1] == rows[-1]
    assert thinned([]) == []


def test_smoothing_is_a_running_mean() -> None:
    assert smoothed([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]
