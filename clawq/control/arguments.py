"""The arguments of the built-in tasks, judged before anything is done with them.

Whoever reaches the broker can put a task into a queue, with any JSON for its arguments. A lease of a million hours
would take a slot for ever, a request could name another Redis than the worker's: what no coordinator of ours sends is
refused with a UserError, which says what is allowed. Pure.
"""

import math
import re
from typing import Any

from clawq.errors import UserError
from clawq.json_text import is_whole
from clawq.transport.keys import check_name
from clawq.transport.texts import shown

#: Longest lease and longest program, seconds; most episodes of one evaluation.
LONGEST_LEASE_S, LONGEST_PROGRAM_S, MOST_EPISODES = 60.0, 1e7, 1_000_000
#: Longest word, as of a label or a path.
_LONGEST_WORD = 1000
#: What a recording may be told (see clawq.programs.record); run and Redis are the worker's to say.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.(gif|mp4)")
_RECORDING = frozenset({"out", "trained", "untrained", "seed", "episodes"})


def check_lease(run_id: Any, seconds: Any) -> None:
    """Raise UserError unless these are arguments of a lease."""
    _check_run_id(run_id)
    _check_seconds("seconds", seconds, LONGEST_LEASE_S)


def check_evaluation(run_id: Any, version: Any, episodes: Any, seed: Any, timeout_s: Any, *words: Any) -> None:
    """Raise UserError unless these are arguments of an evaluation; `words` are its label and id."""
    _check_run_id(run_id)
    _check_whole("version", version)
    _check_episodes(episodes)
    _check_whole("seed", seed)
    _check_seconds("timeout_s", timeout_s, LONGEST_PROGRAM_S)
    for word in words:
        _check_word("label and evaluation", word)


def check_recording(run_id: Any, request: Any, timeout_s: Any) -> None:
    """Raise UserError unless these are arguments of a recording."""
    _check_run_id(run_id)
    _check_seconds("timeout_s", timeout_s, LONGEST_PROGRAM_S)
    if not isinstance(request, dict) or not set(request) <= _RECORDING:
        raise UserError(f"request must be an object with {', '.join(sorted(_RECORDING))}, not {shown(request)}")
    out = request.get("out", "x.gif")
    if not isinstance(out, str) or not _FILE.fullmatch(out):
        raise UserError(f"out must be a file name that ends in .gif or .mp4, without a folder, not {shown(out)}")
    _check_whole("seed", request.get("seed", 0))
    _check_episodes(request.get("episodes", 1))
    for side in ("trained", "untrained"):
        weights = request.get(side)
        if not (weights is None or is_whole(weights)):
            raise UserError(f"{side} must be a weights version, not {shown(weights)}: nothing on the wire names a file")


def _check_run_id(run_id: Any) -> None:
    if not isinstance(run_id, str):
        raise UserError(f"run_id must be the name of a run, not {shown(run_id)}")
    try:
        check_name(run_id)
    except ValueError:
        raise UserError(f"run_id must be the name of a run, not {shown(run_id)}") from None


def _check_seconds(name: str, value: Any, most: float) -> None:
    number = type(value) in (int, float) and (type(value) is int or math.isfinite(value))
    if not number or not 0 < value <= most:
        raise UserError(f"{name} must be above 0 and at most {most:.0f} s, not {shown(value)}")


def _check_whole(name: str, value: Any) -> None:
    if not is_whole(value):
        raise UserError(f"{name} must be a whole number from 0 on, not {shown(value)}")


def _check_episodes(value: Any) -> None:
    if not (is_whole(value) and 0 < value <= MOST_EPISODES):
        raise UserError(f"episodes must be 1 to {MOST_EPISODES}, not {shown(value)}")


def _check_word(name: str, value: Any) -> None:
    if not (isinstance(value, str) and len(value) <= _LONGEST_WORD and "\0" not in value):
        raise UserError(f"{name} must be a text of at most {_LONGEST_WORD} letters, not {shown(value)}")


__all__ = ["LONGEST_LEASE_S", "MOST_EPISODES", "check_evaluation", "check_lease", "check_recording"]
