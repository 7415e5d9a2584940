"""Exec'ed programs: they answer, or it is said why not; none outlives its time."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawq.spawning.failure import Failure
from clawq.spawning.logfile import LogFile
from clawq.spawning.program import run_program
from clawq.spawning.spawner import TAG_VARIABLE, Spawner, kill_tagged

Run = Callable[..., dict[str, Any]]
READ = "import json, os, sys, time; request = json.load(sys.stdin)\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    spawner = Spawner()

    def run(code: str, request: dict[str, Any] | None = None, timeout_s: float = 20.0, **more: Any) -> dict[str, Any]:
        (tmp_path / "tiny_program.py").write_text(READ + code)
        env = {"PYTHONPATH": str(tmp_path)}
        log = LogFile(tmp_path / "program.log")
        return run_program(spawner, "tiny_program", request or {}, log, timeout_s, env, **more)

    return run


def test_the_last_line_of_stdout_is_the_answer_whatever_else_is_printed(run: Run) -> None:
    code = "print('noise'); print(json.dumps({'twice': 2 * request['n']}))"
    assert run(code, {"n": 4}) == {"twice": 8}


def test_a_large_request_reaches_the_program(run: Run) -> None:
    text = "x" * 3_000_000
    assert run("print(json.dumps({'size': len(request['text'])}))", {"text": text}) == {"size": len(text)}


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (
            "print(json.dumps({'error': 'no such env', 'kind': 'PluginNotFound'})); sys.exit(2)",
            "PluginNotFound",
            "no such",
        ),
        ("raise RuntimeError('broken')", "died", "RuntimeError: broken"),
        ("os.kill(os.getpid(), 11)", "died", "signal 11"),
        ("print('only words')", "protocol", "no JSON answer"),
    ],
)
def test_a_bad_end_is_told_in_words(run: Run, code: str, kind: str, text: str) -> None:
    with pytest.raises(Failure, match=text) as caught:
        run(code)
    assert caught.value.kind == kind


def test_a_program_that_takes_too_long_is_ended_with_its_children_and_its_stack_is_told(
    run: Run, tmp_path: Path
) -> None:
    tag = tmp_path / "tag"
    code = (
        "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tag)!r}, 'w').write(os.environ[{TAG_VARIABLE!r}]); time.sleep(600)"
    )
    with pytest.raises(Failure, match="tiny_program") as caught:
        # Long enough for an interpreter to start on a busy machine.
        run(code, timeout_s=5.0)
    assert caught.value.kind == "timeout"
    assert kill_tagged(TAG_VARIABLE, tag.read_text()) == 0, "nobody was left to kill"


def test_a_program_can_be_stopped_even_if_it_never_reads_its_request(run: Run, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(Failure) as caught:
        run("", {"text": "x" * 3_000_000}, stopped=lambda: time.monotonic() - began > 1.0)
    assert caught.value.kind == "stopped"
    assert time.monotonic() - began < 5.0


def test_a_log_keeps_its_end_and_its_bound(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "some" / "x.log", limit_bytes=1000)
    fd = log.open()
    os.write(fd, b"line\n" * 500 + b"last\n")
    log.trim()
    os.write(fd, b"after\n")
    os.close(fd)
    assert log.path.read_text() == "after\n"
    assert log.path.with_name("x.log.1").read_text().endswith("last\n")
    assert log.tail() == "after"
    assert LogFile(tmp_path / "none.log").tail() == ""


def test_the_tail_of_a_log_is_of_the_newest_child_only(tmp_path: Path) -> None:
    for text in (b"error: of yesterday\n", b"error: of today\n"):
        log = LogFile(tmp_path / "x.log")
        fd = log.open()
        os.write(fd, text)
        os.close(fd)
    assert log.tail() == "error: of today"
