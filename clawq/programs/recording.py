"""A recorded run: its schedule, the log behind it, and a learner that learns from them again.

`Recording` finds fragments and records; `Pupil` is a learner's parts without its surroundings: no Redis to publish to,
no worker, no coordinator. What it learns is decided by whoever drives it (`clawq.programs.rerun`, `.bisect`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from clawq.config import RunConfig
from clawq.config_file import change_config, parse_config
from clawq.config_removed import without_removed
from clawq.core import Entry
from clawq.errors import ArchiveDamaged, ExperienceGone, LogGone, UserError
from clawq.metrics import Writers
from clawq.programs import tuning
from clawq.programs.archiving import open_log
from clawq.programs.arithmetic import set_up_torch
from clawq.programs.learner import choose_device
from clawq.programs.link import Link
from clawq.programs.parts import Outside, Parts, make_examiner, make_parts
from clawq.programs.resume import STATE_FORMAT, learning_changes
from clawq.programs.run import Run, open_run
from clawq.programs.schedule import (
    SCHEDULE_FILE,
    FragmentCommitted,
    LiveChange,
    Record,
    SessionBegun,
    read_schedule,
)
from clawq.programs.span import Made
from clawq.programs.train import Trainer
from clawq.programs.whereabouts import Whereabouts
from clawq.replay.validation import Examiner
from clawq.transport.log import RunLog


class Display(Protocol):
    """Where progress is shown."""

    def show(self, snapshot: Mapping[str, float | str]) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """What is left of a run.

    Attributes:
        run: as it was recorded; its folder is only read.
        log: its fragments, in streams and archive.
        session: facts of its first session (configuration, threads, versions).
        examiner: decodes and checks its fragments.
    """

    run: Run
    log: RunLog
    session: Mapping[str, Any]
    examiner: Examiner

    @property
    def config(self) -> RunConfig:
        """The configuration with which it began."""
        return parse_config(self.session["config"], "schedule.log")

    def changed(self, overrides: tuple[str, ...]) -> RunConfig:
        """The same with `key=value` words; options of another algorithm begin with that one's defaults."""
        raw = dict(self.session["config"])
        if any(word.startswith("algorithm.name=") for word in overrides):
            raw["algorithm"] = {"name": raw["algorithm"]["name"], "options": {}}
        return change_config(raw, overrides, f"the configuration of {self.run.id}")

    def records(self) -> Iterator[Record]:
        """The schedule."""
        return _records(self.run.folder)

    def as_configured(self, advice: str) -> Iterator[Record]:
        """The schedule, as long as learning goes on under `config`, and what was tuned live.

        Raises UserError, which ends with the advice, where the run was resumed with another configuration.
        """
        current = self.session["config"]
        for record in self.records():
            if isinstance(record, LiveChange) and record.kind == tuning.KIND:
                # A session that goes on under what was tuned before goes on as it was.
                current = tuning.tuned(current, record.facts)
            elif isinstance(record, SessionBegun) and "config" in record.facts:
                changed = learning_changes(current, record.facts["config"])
                if changed:
                    raise UserError(
                        f"the run was resumed with another configuration at update {record.facts.get('updates')}: "
                        f"{'; '.join(changed)}. {advice}"
                    )
            yield record

    def fetch(self, slot: str, epoch: int, seq: int) -> Entry:
        """A fragment's entry; ExperienceGone, naming what is held, if the log lost it."""
        try:
            return self.log.get(slot, epoch, seq)
        except (LogGone, ArchiveDamaged) as error:
            raise ExperienceGone(f"{error}. {self._what_is_left((slot, epoch, seq))}") from error

    def locate(self, slot: str, epoch: int, seq: int) -> Made | None:
        """What is known of a fragment without reading it."""
        found = self.log.find(slot, epoch, seq)
        return Made(found[0].made_ms, found[0].steps) if found else None

    def extent(self) -> tuple[int, int]:
        """How many fragments the run learned from, and the env steps of those that the log holds."""
        committed = [each for each in self.records() if isinstance(each, FragmentCommitted)]
        held = [self.locate(each.slot, each.epoch, each.seq) for each in committed]
        return len(committed), sum(made.steps for made in held if made is not None)

    def _what_is_left(self, gone: tuple[str, int, int]) -> str:
        """In words: from which fragment on, and up to which, the log could be replayed without the one that is gone."""
        number, first, unbroken = 0, 0, 0
        for record in self.records():
            if isinstance(record, FragmentCommitted):
                number += 1
                name = (record.slot, record.epoch, record.seq)
                # One that is damaged is found, but cannot be read.
                held = name != gone and bool(self.log.find(*name))
                first = (first or number) if held else 0
                unbroken += held and unbroken == number - 1
        before = f"; those before it with --to fragment:{unbroken + 1}" if unbroken else ""
        of = f"Of the {number} fragments that the run learned from,"
        if not first:
            return f"{of} the last is gone too: nothing {'behind that ' if before else ''}can be replayed{before}."
        return f"{of} it holds all from number {first} on: replay those with --from fragment:{first}{before}"

    def first_ms(self) -> int:
        """When the log begins, 0 if it holds nothing."""
        return min((held.first_ms for held in self.log.held().values()), default=0)


def open_recording(where: Whereabouts) -> Recording:
    """The recording of a run.

    Raises:
        UserError: its folder is elsewhere, or it has no schedule.
        ScheduleInvalid: the schedule is damaged.
    """
    folder = where.need_folder()
    run = open_run(folder, None)
    if not (folder / SCHEDULE_FILE).is_file():
        raise UserError(f"{folder} has no {SCHEDULE_FILE}: the run was recorded by a clawq that wrote none")
    # Before it there may only be the version that the session found.
    begun = (record for record in islice(_records(folder), 10) if isinstance(record, SessionBegun))
    first = next(begun, None)
    if first is None or "config" not in first.facts:
        raise UserError(f"{folder / SCHEDULE_FILE} does not say with which configuration the run began")
    streams = where.data if where.data is not None and where.data.exists(where.keys.slots) else None
    return Recording(run, open_log(run, streams), first.facts, make_examiner(run))


def _records(folder: Path) -> Iterator[Record]:
    """The schedule of a run folder, whatever clawq wrote it."""
    file = folder / SCHEDULE_FILE
    for record in read_schedule(file):
        if isinstance(record, SessionBegun) and isinstance(record.facts.get("config"), dict):
            config = without_removed(record.facts["config"], str(file))
            yield replace(record, facts={**record.facts, "config": config})
        else:
            yield record


class Pupil:
    """A learner that learns from a recording.

    Args:
        run: whose folder it writes into, and whose configuration it has.
        recording: gives the number of threads.
        writers: of metrics.
        show: given the numbers now and then.

    Attributes:
        parts: the learner's.
        trainer: writes checkpoints and numbers; it does not train here.
        device: where it computes.
    """

    def __init__(
        self,
        run: Run,
        recording: Recording,
        writers: Writers,
        show: Callable[[Mapping[str, float | str]], None] = lambda snapshot: None,
    ) -> None:
        self.device = choose_device(run.config.learner.device)
        threads = run.config.cores.learner_threads or int(recording.session.get("threads", 0))
        set_up_torch(threads)
        link = cast(Link, _NoLink(show))
        outside = Outside(_NoSource(), link, _refuse, lambda: self.trainer.publishing.version)
        self.parts: Parts = make_parts(run, self.device, outside)
        identity = {
            "format": STATE_FORMAT,
            "run": run.id,
            "tag": run.tag,
            "env": run.spec.fingerprint,
            "config": run.config.model_dump(mode="json"),
        }
        self.trainer = Trainer(self.parts, identity, writers.write)
        self.trainer.publishing.version = int(recording.session.get("version", 0))

    def close(self) -> None:
        """End the thread that writes checkpoints."""
        self.trainer.close()


class _NoSource:
    """Nothing comes from outside."""

    def read(self, timeout_s: float) -> list[Entry]:
        return []

    def cursors(self) -> dict[str, str]:
        return {}

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """There is nobody to tell."""


class _NoLink:
    """Stands in for `Link`: nothing is published; numbers go to the screen."""

    trouble: str | None = None
    note = ""
    restores = lost_lives = 0
    published_version, stream_budget_bytes = 0, 2**62

    def __init__(self, show: Callable[[Mapping[str, float | str]], None]) -> None:
        self.show = show

    def publish(self, outgoing: Any) -> None:
        """Nobody acts."""

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """There is nothing to trim."""

    def notify(self, kind: str, **facts: Any) -> None:
        """Nobody listens."""

    def take_events(self) -> list[Any]:
        """Nothing happens."""
        return []

    def figures(self) -> dict[str, float]:
        """There are no streams."""
        return {}

    def allow(self, window_bytes: int) -> None:
        """There are no actors."""

    def check(self) -> None:
        """Nothing can fail."""


def _refuse(entry: Entry, reason: str, detail: str) -> None:
    """Nothing comes that could be refused."""


__all__ = ["Display", "Pupil", "Recording", "open_recording"]
