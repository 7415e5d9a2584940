"""What is known of a run that is not (any more) on this Redis: that it ended, when, how, and what can be done with it.

A run folder tells: `report.json` is written at a run's end, `run.json` at its beginning. Commands that need a run at
work say this instead of "there is no run".
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawq.config import RunConfig
from clawq.errors import UserError
from clawq.programs.damaged import damaged, read_object

#: Where run folders are unless the configuration says otherwise.
RUNS = Path(RunConfig.model_fields["folder"].default)


def folder_of(word: str) -> Path | None:
    """The run folder that a user means by a path, or by a name below `runs/`; None if there is none."""
    for folder in (Path(word), RUNS / word):
        if (folder / "run.json").is_file():
            return folder
    return None


def how_it_ended(word: str) -> str | None:
    """What to say of a run that is asked for and is not at work; None if nothing here knows of it."""
    folder = folder_of(word)
    if folder is None:
        return None
    report = folder / "report.json"
    onward = f"Go on with it: `clawq up --resume {folder}`"
    look = f"look into it: `clawq log ls {folder}`, `clawq log ledger {folder}`"
    try:
        with damaged(report, f"{onward}; {look}"):
            facts = read_object(report)
            ended = str(facts["ended"])
        at = _clock(report.stat().st_mtime)
    except FileNotFoundError:
        since = _clock((folder / "run.json").stat().st_mtime)
        return (
            f"run {word} is not at work on this Redis, and has left no report: it was killed, or its Redis is another "
            f"one (its learner began {since}). {onward}; {look}"
        )
    if facts.get("resumable", True):
        return f"run {word} was stopped on {at} ({ended}). {onward}; {look}"
    more = f"With more budget it goes on: `clawq up --resume {folder} {_more(facts, folder)}`"
    return f"run {word} has ended on {at}: {ended}. {more}; {look}"


def refuse_ended(word: str) -> None:
    """UserError if that run is known to be over."""
    told = how_it_ended(word)
    if told is not None:
        raise UserError(told)


def _more(facts: Mapping[str, Any], folder: Path) -> str:
    """An override that gives twice the budget by which the run ended."""
    try:
        budget = dict(read_object(folder / "run.json")["config"]["budget"])
        name = "env_steps" if str(facts["ended"]).endswith("env steps") else "seconds"
        return f"budget.{name}={2 * budget[name]:g}" if name == "seconds" else f"budget.{name}={2 * budget[name]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "budget.seconds=..."


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


__all__ = ["RUNS", "folder_of", "how_it_ended", "refuse_ended"]
