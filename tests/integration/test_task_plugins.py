"""Tasks of somebody else's package run on ordinary workers."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clawq.control.celery_settings import send_command

if TYPE_CHECKING:
    from tests.integration.conftest import Bench

MODULE = """
from pathlib import Path
from celery import shared_task

def write(path, text):
    Path(path).write_text(text)

@shared_task(name="lab.late", acks_late=True)
def late(path):
    from celery import current_task
    Path(path).write_text(f"{current_task.name} {current_task.acks_late}")

def ask(path, number):
    from clawq.control.pool_process import pool_process
    answer = pool_process().run_program("lab_program", {"number": number}, 20.0)
    Path(path).write_text(str(answer["double"]))
"""
PROGRAM = "import json, sys; json.dump({'double': 2 * json.load(sys.stdin)['number']}, sys.stdout)"
ENTRY_POINTS = """[clawq.tasks]
write = lab_plugin:write
late = lab_plugin:late
ask = lab_plugin:ask
broken = lab_plugin_that_is_not_there:task
"""


@pytest.mark.parametrize("pool", ["threads", "prefork"])
def test_a_plugins_tasks_run_on_an_ordinary_worker_and_a_broken_one_stops_nobody(
    bench: "Bench", tmp_path: Path, pool: str
) -> None:
    site = tmp_path / "site"
    metadata = site / "lab_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "lab_plugin.py").write_text(MODULE)
    (site / "lab_program.py").write_text(PROGRAM)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    worker = bench.worker(pool, PYTHONPATH=str(site))
    plain, late, asked = tmp_path / "plain", tmp_path / "late", tmp_path / "asked"
    send_command(bench.sender, "clawq.write", path=str(plain), text="hello")
    send_command(bench.sender, "clawq.broken")
    send_command(bench.sender, "lab.late", path=str(late))
    send_command(bench.sender, "clawq.ask", path=str(asked), number=21)
    bench.wait_for(lambda: plain.exists() and late.exists() and asked.exists(), "the tasks")
    assert (plain.read_text(), late.read_text(), asked.read_text()) == ("hello", "lab.late True", "42")
    bench.wait_for(lambda: "lab_plugin_that_is_not_there" in worker.text(), "the broken one to be named")
    assert worker.stop()[0] == 0
