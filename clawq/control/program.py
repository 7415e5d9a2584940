"""Run an exec'ed program under a task: a JSON request on stdin, a JSON answer as the last line of stdout.

For everything that needs torch or a simulator but is no actor: evaluation, recording, and the tasks of plugins. The
program is ended, with everything it started, when its time is over or the worker shuts down, so that it never holds a
worker up. Its stderr goes to a bounded log file.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from clawq.control.actor_process import Failure
from clawq.control.pool_process import PoolProcess, pool_process
from clawq.control.spawner import Child, wait_readable

_MAX_ANSWER_BYTES = 4_000_000


def run_program(
    program: str | Sequence[str],
    request: Mapping[str, Any],
    timeout_s: float,
    run: Mapping[str, Any] | None = None,
    log_name: str | None = None,
) -> dict[str, Any]:
    """Run one program to its end and return its answer.

    Args:
        program: a Python module, or a module and arguments; run by this interpreter.
        request: JSON-able; the program's stdin.
        timeout_s: it is ended when it takes longer.
        run: the run it works for ({"tag", "config", ...}); sets its threads and the tag in its environment.
        log_name: name of its log file; default: made from the module.

    Returns:
        The JSON object on the last line of its stdout.

    Raises:
        Failure: it ended with another status than 0, gave no answer, took too long (`timeout`), or the worker is
            ending (`worker_stopping`). An answer {"error": ..., "kind": ...} becomes a Failure with that text.
    """
    place = pool_process()
    module = program if isinstance(program, str) else program[0]
    log_file = place.log_file(log_name or f"{place.identity.worker}-{module.rpartition('.')[2]}")
    env = place.child_env(dict(run)) if run is not None else {}
    child = place.spawner.spawn(program, log_file, env, pipes=True)
    try:
        output = _converse(child, json.dumps(dict(request)).encode(), timeout_s, place)
        child.wait_exit(2.0)
    finally:
        log_file.trim()
        status = child.end_tree()
    return _answer(output, status, log_file.tail())


def _converse(child: Child, request: bytes, timeout_s: float, place: PoolProcess) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    # A thread, because a program that does not read its stdin must not keep us from seeing the deadline.
    threading.Thread(target=_feed, args=(child, request), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    stdout, shutdown = child.stdout.fileno(), place.identity.shutdown.fileno()
    output = bytearray()
    while True:
        ready = wait_readable([stdout, shutdown], min(0.5, max(0.0, deadline - time.monotonic())))
        if shutdown in ready:
            raise Failure("worker_stopping", "was ended because the worker is ending", "")
        if stdout in ready:
            chunk = os.read(stdout, 65_536)
            if not chunk:
                return bytes(output)
            output += chunk
            del output[:-_MAX_ANSWER_BYTES]
        if time.monotonic() >= deadline:
            child.dump_stacks()
            raise Failure("timeout", f"took longer than {timeout_s:.0f} s", child.log.tail())
        child.log.trim()


def _feed(child: Child, request: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        if child.stdin is not None:
            child.stdin.write(request + b"\n")
            child.stdin.close()


def _answer(output: bytes, status: int, log_tail: str) -> dict[str, Any]:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        raise Failure(str(answer.get("kind", "error")), str(answer["error"]), "")
    if status != 0:
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        raise Failure("died", how, log_tail)
    if not isinstance(answer, dict):
        raise Failure("protocol", "gave no JSON answer", log_tail)
    return answer


__all__ = ["run_program"]
