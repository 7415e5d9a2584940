"""What a learner is taken through again: exactly as it was recorded, or the same fragments in another way.

See `clawq.programs.rerun`, which drives it.
"""

import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from clawq.errors import CheckpointInvalid, ScheduleInvalid, UserError
from clawq.programs import checkpoint, learning, quarantine
from clawq.programs.difference import first_difference
from clawq.programs.intake import valid_steps
from clawq.programs.recording import Pupil, Recording
from clawq.programs.schedule import (
    FragmentCommitted,
    LiveChange,
    Record,
    RowsVoided,
    UpdatesTried,
    WeightsPublished,
)
from clawq.programs.span import Span, within
from clawq.replay.consumer import with_notices
from clawq.replay.validation import Fault

#: How often numbers are shown and written, seconds.
SHOW_S = 1.0
#: Parts of a checkpoint that an exact replay must meet again.
COMPARED = ("algorithm", "limiter", "sampler", "staleness", "ring", "updates", "skipped_updates", "env_steps")


class Stopped(Exception):
    """Somebody asked for the end; caught here."""


class _Lesson:
    """What both ways have in common: looking after progress and the wish to stop."""

    def __init__(self, recording: Recording, pupil: Pupil, stop: threading.Event) -> None:
        self._recording, self._pupil, self._stop = recording, pupil, stop
        self._parts = pupil.parts
        self._shown_s = self._checkpointed_s = time.monotonic()

    def _look(self) -> None:
        if self._stop.is_set():
            raise Stopped
        now_s, trainer = time.monotonic(), self._pupil.trainer
        self._parts.budget.start(now_s)
        if now_s - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            trainer.gauge()
            if now_s - self._checkpointed_s >= self._parts.config.learner.checkpoint_interval_s:
                self._checkpointed_s = now_s
                trainer.checkpoint()


class Exact(_Lesson):
    """Does again what was done, and compares."""

    def __init__(self, recording: Recording, pupil: Pupil, stop: threading.Event) -> None:
        super().__init__(recording, pupil, stop)
        self._recorded = recorded_states(recording.run.checkpoints)
        self._ended = False
        #: How the next recorded state differs so far: before it there may be records that count nothing (a version).
        self._unlike: str | None = None
        self.identical_upto: int | None = None
        self.difference: str | None = None

    def learn(self) -> None:
        """Follow the schedule to its end."""
        parts, recording = self._parts, self._recording
        records = recording.as_configured(
            "It can be replayed exactly up to there only; give a range or another configuration to replay it otherwise"
        )
        learning.apply(records, recording.fetch, parts, recording.examiner, after=self._after)
        self._ended = True
        if self._unlike is not None:
            self.difference = self.difference or f"at update {self._parts.updater.updates}: {self._unlike}"

    def _after(self, record: Record) -> None:
        match record:
            case FragmentCommitted():
                self._parts.intake.fragments += 1
                self._pupil.trainer.publishing.version = record.version
            case WeightsPublished() | UpdatesTried():
                self._pupil.trainer.publishing.version = record.version
        self._compare()
        self._look()

    def _compare(self) -> None:
        updater, intake = self._parts.updater, self._parts.intake
        while self._recorded:
            path, at = self._recorded[0]
            here = (updater.updates, updater.skipped, intake.env_steps)
            if here[0] < at[0] or here[1] < at[1] or here[2] < at[2]:
                return
            if here == at and self.difference is None:
                self._unlike = self._difference_from(path)
                if self._unlike is not None:
                    return
                self.identical_upto = updater.updates
            elif self.difference is None:
                passed = f"its checkpoint at update {at[0]} was made at {at}, which the replay passed by at {here}"
                self.difference = passed if self._unlike is None else f"at update {at[0]}: {self._unlike}"
            self._recorded.pop(0)
            self._unlike = None

    def _difference_from(self, path: Path) -> str | None:
        recorded, mine = checkpoint.load(path).state, self._pupil.trainer.state.state_dict()
        known = [name for name in COMPARED if name in recorded]
        return first_difference({n: recorded[n] for n in known}, {n: mine[n] for n in known})

    def verdict(self, weights: Path) -> dict[str, Any]:
        """What the comparison says."""
        final = self._recording.run.weights / "final.safetensors"
        facts: dict[str, Any] = {"mode": "exact", "identical_upto": self.identical_upto, "difference": self.difference}
        if self._ended and final.is_file():
            found = first_difference(dict(load_file(final)), dict(load_file(weights)))
            facts["final_weights"] = "identical" if found is None else found
            if found is None and self.difference is None:
                facts["identical_upto"] = self._parts.updater.updates
        if self._ended and self._recorded and self.difference is None and facts.get("final_weights") != "identical":
            facts["difference"] = (
                f"at its end: the schedule ends at update {self._parts.updater.updates}, before the checkpoint at "
                f"update {self._recorded[-1][1][0]}; the rest of it is lost"
            )
        if self._pupil.device != "cpu":
            facts["note"] = "bit for bit is promised on a CPU only"
        recorded = str(self._recording.session.get("torch", ""))
        if recorded and recorded != str(torch.__version__):
            facts["note"] = f"recorded with torch {recorded}, replayed with {torch.__version__}"
        return facts


class Free(_Lesson):
    """The recorded fragments in their order, learned from in another way."""

    def __init__(self, recording: Recording, pupil: Pupil, stop: threading.Event, span: Span) -> None:
        super().__init__(recording, pupil, stop)
        self._span, self._progress = span, 0.0
        parts = self._parts
        self._limited = parts.config.rate_limit.samples_per_insert is not None and parts.config.sync is None

    def learn(self) -> None:
        """Go through the span; UserError if there is nothing in it."""
        recording = self._recording
        for numbered in within(recording.records(), self._span, recording.locate):
            self._take(numbered.record)
            self._look()
        if self._parts.intake.fragments == 0:
            fragments, steps = recording.extent()
            raise UserError(
                f"there is no fragment in that range; the run learned from {fragments} fragments, with {steps} env "
                f"steps (fragment:1 to fragment:{fragments}); {recording.log.describe()}"
            )

    def _take(self, record: Record) -> None:
        parts, trainer = self._parts, self._pupil.trainer
        match record:
            case FragmentCommitted():
                trainer.publishing.version = record.version
                self._insert(record)
            case UpdatesTried():
                self._progress, trainer.publishing.version = record.progress, record.version
                for _ in range(0 if self._limited else record.count):
                    self._update()
            case WeightsPublished():
                trainer.publishing.version = record.version
                learning.advance(parts, record.version)
            case RowsVoided():
                parts.ring.void(record.slot, record.epoch, record.notice.env, record.notice.seq, record.notice.t)
            case LiveChange() if record.kind == quarantine.CHANGE:
                quarantine.again(parts, record.facts)

    def _insert(self, record: FragmentCommitted) -> None:
        parts, recording = self._parts, self._recording
        entry = recording.fetch(record.slot, record.epoch, record.seq)
        found = recording.examiner.examine(entry)
        if isinstance(found, Fault):
            raise ScheduleInvalid(
                f"fragment {record.slot} {record.epoch}-{record.seq} was committed, but is refused now: {found.detail}"
            )
        steps = valid_steps(found)
        while self._limited and not parts.limiter.can_insert(steps) and self._update():
            self._look()
        parts.intake.insert(with_notices(found, record.inherited), steps)
        parts.intake.fragments += 1
        while self._limited and self._update():
            self._look()

    def _update(self) -> bool:
        """One update, if limiter and sampler allow one; whether they did."""
        parts, replay = self._parts, self._parts.config.replay
        if not parts.limiter.can_sample(replay.transitions) or not parts.sampler.ready(replay.batch_size):
            return False
        learning.update(parts, self._progress, self._pupil.trainer.publishing.version)
        return True

    def verdict(self, weights: Path) -> dict[str, Any]:
        """There is nothing to compare with."""
        return {"mode": "free"}


def recorded_states(folder: Path) -> list[tuple[Path, tuple[int, int, int]]]:
    """Checkpoints of a run that can be read, each with its (updates, skipped updates, env steps)."""
    found = []
    for path in checkpoint.Checkpoints(folder).paths():
        try:
            state = checkpoint.load(path).state
            found.append((path, (int(state["updates"]), int(state["skipped_updates"]), int(state["env_steps"]))))
        except (CheckpointInvalid, KeyError):
            continue
    return sorted(found, key=lambda one: one[1])
