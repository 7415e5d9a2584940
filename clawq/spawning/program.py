"""Run an exec'ed program to its end: a JSON request on its stdin, a JSON answer as the last line of its stdout.

For everything that needs torch or a simulator but is no actor: probing, evaluation, recording, tasks of plugins. The
program is ended, with everything it started, when its time is over or `stopped` says so, so that it never holds its
caller up. Its stderr goes to a bounded log file, and the end of that log into the error.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawq.json_text import parse_json
from clawq.spawning.failure import Failure, how_it_ended
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Child, Spawner, wait_readable

_MAX_ANSWER_BYTES = 4_000_000
_TICK_S = 0.25


def run_program(
    spawner: Spawner,
    program: str | Sequence[str],
    request: Mapping[str, Any],
    log_file: LogFile,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run one program to its end and return its answer.

    Args:
        spawner: starts it.
        program: a Python module, or a module and arguments; run by this interpreter.
        request: JSON-able; the program's stdin.
        log_file: where its stderr goes.
        timeout_s: it is ended when it takes longer.
        env: environment variables beside our own.
        stopped: asked a few times a second; it is ended when this is true.

    Returns:
        The JSON object on the last line of its stdout.

    Raises:
        Failure: it ended with another status than 0, gave no answer, took too long (kind `timeout`) or was stopped
            (kind `stopped`). An answer {"error": text, "kind": word} becomes a Failure with that text and word.
    """
    child = spawner.spawn(program, log_file, env, pipes=True)
    status = -1
    try:
        output = _converse(child, json.dumps(dict(request)).encode(), timeout_s, stopped)
        child.wait_exit(2.0)
    finally:
        status = child.end_tree()
        log_file.trim()
    return _answer(output, status, child.ooms, log_file.tail())


def _converse(child: Child, request: bytes, timeout_s: float, stopped: Callable[[], bool]) -> bytes:
    assert child.stdout is not None
    # A thread, because a program that does not read its stdin must not keep us from seeing the deadline.
    threading.Thread(target=_feed, args=(child, request), name="clawq-feed", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    stdout = child.stdout.fileno()
    output = bytearray()
    while True:
        if wait_readable([stdout], min(_TICK_S, deadline - time.monotonic())):
            chunk = os.read(stdout, 65_536)
            if not chunk:
                return bytes(output)
            output += chunk
            del output[:-_MAX_ANSWER_BYTES]
        if stopped():
            raise Failure("stopped", "was ended before it was done", "")
        if time.monotonic() >= deadline:
            child.dump_stacks()
            raise Failure("timeout", f"took longer than {timeout_s:.0f} s", child.log.tail())
        child.log.trim()


def _feed(child: Child, request: bytes) -> None:
    rest = memoryview(request + b"\n")
    with contextlib.suppress(OSError, ValueError):
        assert child.stdin is not None
        while rest:
            rest = rest[child.stdin.write(rest) :]
        child.stdin.close()


def _answer(output: bytes, status: int, ooms: int, log_tail: str) -> dict[str, Any]:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    try:
        answer = parse_json(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        raise Failure(str(answer.get("kind", "error")), str(answer["error"]), "")
    if status != 0:
        raise Failure(*how_it_ended(status, ooms), log_tail)
    if not isinstance(answer, dict):
        raise Failure("protocol", "gave no JSON answer", log_tail)
    return answer


__all__ = ["run_program"]
