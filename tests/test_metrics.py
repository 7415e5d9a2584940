"""Metric writers and the catalogue."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from clawq.errors import PluginNotFound
from clawq.metrics import CATALOGUE, JsonlWriter, TensorBoardWriter, Writers, describe, open_writers
from clawq.types import Metrics


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Recorder:
    """A writer that remembers, and fails when told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.failing = False
        self.closed = 0

    def write(self, step: int, wall_s: float, metrics: Metrics) -> None:
        if self.failing:
            raise OSError("disk full")
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1
        if self.failing:
            raise OSError("still full")


def test_each_write_is_one_line_that_a_reader_sees_at_once(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path)
    writer.write(10, 1.23456, {"eval/success": 0.5, "train/loss": float("nan")})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 10, "wall_s": 1.235, "eval/success": 0.5, "train/loss": None}]
    writer.close()
    writer.close()


def test_a_resumed_run_appends_after_a_torn_line_without_losing_its_own(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"ste')
    writer = JsonlWriter(tmp_path)
    writer.write(2, 0.0, {})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[2:] == ['{"step":2,"wall_s":0.0}']


def test_the_jsonl_file_is_bounded_and_keeps_one_older_part(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path, max_bytes=1000)
    for step in range(200):
        writer.write(step, 0.0, {"updates": 1.0})
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["metrics.1.jsonl", "metrics.jsonl"]
    assert all(file.stat().st_size < 1100 for file in files)
    steps = [row["step"] for file in files for row in lines(file)]
    assert steps == list(range(steps[0] if isinstance(steps[0], int) else 0, 200))


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    writer = TensorBoardWriter(tmp_path)
    writer.write(7, 0.0, {"eval/success": 0.25, "train/loss": float("inf")})
    writer.close()
    writer.close()
    [file] = (tmp_path / "tb").iterdir()
    events = [event for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    assert [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value] == [
        (7, "eval/success", 0.25)
    ]


def test_tensorboard_files_are_bounded_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, max_bytes=2000)
    for step in range(500):
        writer.write(step, float(step), {"some/name": float(step)})
    writer.close()
    files = sorted((tmp_path / "tb").iterdir(), key=lambda file: file.name[-6:])
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) < 3 * 2000
    assert files[-1].stat().st_size > 0


def test_the_tensorboard_writer_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from clawq.metrics import TensorBoardWriter\n"
        "writer = TensorBoardWriter(Path(sys.argv[1])); writer.write(1, 0.0, {'a': 1.0}); writer.close()\n"
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=30, check=False).returncode == 0


def test_a_failing_writer_is_dropped_with_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Recorder(), Recorder()
    writers = Writers({"bad": bad, "good": good})
    writers.write(1, 0.0, {})
    bad.failing = True
    with caplog.at_level(logging.WARNING):
        writers.write(2, 0.0, {})
        writers.write(3, 0.0, {})
    assert (good.steps, bad.steps) == ([1, 2, 3], [1])
    assert [record.getMessage() for record in caplog.records] == [
        "metric writer 'bad' is dropped: OSError: disk full",
    ]
    assert writers.names == ["good"]


def test_closing_closes_all_writers_even_if_one_fails_and_only_once(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Recorder(), Recorder()
    bad.failing = True
    writers = Writers({"good": good, "bad": bad})
    writers.close()
    writers.close()
    assert (good.closed, bad.closed) == (1, 1)
    assert "still full" in caplog.text


def test_a_writer_that_cannot_be_made_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writers = open_writers(["jsonl"], tmp_path / "absent" / "folder")
    assert writers.names == []
    assert "jsonl" in caplog.text


def test_named_writers_are_opened_and_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    writers = open_writers(["jsonl", "tensorboard"], tmp_path)
    assert writers.names == ["jsonl", "tensorboard"]
    writers.close()
    with pytest.raises(PluginNotFound, match="jsonl, tensorboard"):
        open_writers(["csv"], tmp_path)


def test_the_catalogue_describes_families_and_every_entry_is_told() -> None:
    assert describe("drops/stale") is CATALOGUE["drops/*"]
    assert describe("policy_lag/mean") is CATALOGUE["policy_lag/mean"]
    assert describe("policy_lag/median") is None
    assert all(metric.unit and metric.meaning and metric.healthy for metric in CATALOGUE.values())
