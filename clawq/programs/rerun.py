"""`clawq replay`: a learner trained from a recorded log, without simulator, worker, Celery or actors.

Exactly: with the run's own configuration, what its schedule says is done again, record by record. On a CPU that gives
the same weights bit for bit, and that is checked against every checkpoint on the way (networks, optimisers, normaliser,
limiter, sampler, ring) and against the final weights.

Otherwise: with another configuration, algorithm or seed, or a part of the log, the fragments come in the recorded
order; updates as a rate limiter allows or, without one, in the recorded number after each fragment. What was tuned live
is left out then: the configuration is the user's.

The result is a run folder of its own: metrics, TensorBoard, checkpoint, weights, report.
"""

import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save_file

from clawq.config import RunConfig
from clawq.errors import ExperienceGone, UserError
from clawq.metrics import open_writers
from clawq.programs.learner import choose_device
from clawq.programs.lesson import Exact, Free, Stopped
from clawq.programs.memory import Machine, forecast
from clawq.programs.recording import Display, Pupil, Recording
from clawq.programs.resume import learning_changes
from clawq.programs.run import Run, create_run, prepare_new_folder, write_json
from clawq.programs.span import Span, parse_mark


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be replayed.

    Attributes:
        overrides: `key=value` words.
        seed: another seed.
        begin: see clawq.programs.span.
        end: the like.
        name: of the new run; None = made from the recorded one's and the time.
    """

    overrides: tuple[str, ...] = ()
    seed: int | None = None
    begin: str | None = None
    end: str | None = None
    name: str | None = None


def rerun(recording: Recording, order: Order, display: Display, stop: threading.Event) -> dict[str, Any]:
    """Replay; returns the report (also in report.json).

    Raises:
        UserError: an override, the span or the ring cannot be.
        ExperienceGone: the log has lost a fragment that is needed; the text says what it holds.
        LearnerError: learning cannot go on.
    """
    overrides = order.overrides if order.seed is None else (*order.overrides, f"seed={order.seed}")
    config, span = recording.changed(overrides), span_of(recording, order)
    changed = learning_changes(recording.session["config"], config.model_dump(mode="json"))
    run = new_run(recording, config, order, any(word.startswith("folder=") for word in overrides))
    try:
        return _learn_again(recording, run, span, changed, display, stop)
    except (UserError, ExperienceGone):
        # Nothing came of it: no folder is left, and its name is free for the next try.
        if not list(run.checkpoints.glob("*.ckpt")):
            shutil.rmtree(run.folder, ignore_errors=True)
        raise


def _learn_again(
    recording: Recording, run: Run, span: Span, changed: list[str], display: Display, stop: threading.Event
) -> dict[str, Any]:
    config = run.config
    gpu = choose_device(config.learner.device) != "cpu"
    forecast(config, run.spec, gpu=gpu, server=0, streams=0).check(Machine.here())
    exact = span.whole and not changed
    display.say(f"replay of {recording.run.id} in {run.folder}")
    display.say("as it was recorded" if exact else f"otherwise than recorded: {'; '.join(changed) or 'a part of it'}")
    with ExitStack() as stack:
        writers = open_writers(config.metrics, run.folder)
        stack.callback(writers.close)
        pupil = Pupil(run, recording, writers, lambda numbers: display.show({"run": run.id, **numbers}))
        stack.callback(pupil.close)
        save_file(pupil.parts.updater.algorithm.weights(), run.weights / "untrained.safetensors")
        lesson: Exact | Free = Exact(recording, pupil, stop) if exact else Free(recording, pupil, stop, span)
        began_s, ended = time.monotonic(), "the end of the range" if span.end else "the end of the recording"
        pupil.trainer.stage = "replaying"
        try:
            lesson.learn()
        except Stopped:
            ended = "stopped by the user"
        facts = {"ended": ended, "seconds": round(time.monotonic() - began_s, 2), "changed": changed}
        pupil.trainer.stage = "ended"
        report = finish(recording, run, pupil, facts)
        report |= lesson.verdict(run.weights / "final.safetensors")
        write_json(run.folder / "report.json", report)
    return report


def span_of(recording: Recording, order: Order) -> Span:
    """The part of the log that was asked for; UserError if that is no place in it."""
    if order.begin is None and order.end is None:
        return Span()
    first_ms = recording.first_ms()
    begin, end = (None if text is None else parse_mark(text, first_ms) for text in (order.begin, order.end))
    if begin is not None and end is not None and begin.kind == end.kind and begin.value >= end.value:
        raise UserError(f"--from {order.begin} is not before --to {order.end}: nothing lies between")
    return Span(begin, end)


def new_run(recording: Recording, config: RunConfig, order: Order, elsewhere: bool) -> Run:
    """A run folder beside the recorded one's, unless it was wanted elsewhere."""
    folder = config.folder if elsewhere else str(recording.run.folder.parent)
    config = config.model_copy(
        update={
            "folder": folder,
            "learner": config.learner.model_copy(update={"snapshot": "never"}),
            "archive": config.archive.model_copy(update={"enabled": False}),
        }
    )
    if order.name is not None:
        return create_run(config, order.name, recording.run.spec)
    named = config.model_copy(update={"name": f"{recording.run.id[:30].rstrip('.-_')}-replay".replace(".", "_")})
    run_id, _ = prepare_new_folder(named, time.time())
    return create_run(config, run_id, recording.run.spec)


def finish(recording: Recording, run: Run, pupil: Pupil, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Last numbers, checkpoint and weights; returns the report."""
    trainer, seconds = pupil.trainer, max(1e-9, float(facts["seconds"]))
    trainer.gauge()
    if trainer.parts.updater.updates > 0:
        trainer.checkpoint(wait=True)
    save_file(trainer.parts.updater.algorithm.weights(), run.weights / "final.safetensors")
    numbers = trainer.numbers()
    return {
        "run": run.id,
        "folder": str(run.folder),
        "replay_of": recording.run.id,
        **facts,
        "fragments": trainer.parts.intake.fragments,
        "updates": trainer.parts.updater.updates,
        "updates_per_s": round(trainer.parts.updater.updates / seconds, 1),
        "losses": {name[6:]: value for name, value in numbers.items() if name.startswith("train/") and "loss" in name},
        "numbers": numbers,
    }
