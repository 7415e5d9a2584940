"""Exporting a run's log: fragments -> episodes -> a file of another format, streaming, whatever the log's size.

Entries are checked as the learner checks them; what it would refuse is left out and counted. An exporter needs neither
learner nor simulator: it reads streams, archive or both, holds nothing back, and may run while the run goes on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from clawq.core import Entry
from clawq.errors import UserError
from clawq.programs.episode_files import EpisodeWriter
from clawq.programs.episode_hdf5 import Hdf5Writer
from clawq.programs.episode_parquet import ParquetWriter
from clawq.programs.episodes import Episode, Stitcher
from clawq.replay.validation import Examiner, Fault
from clawq.specs import EnvSpec


@dataclass(slots=True)
class Exported:
    """What an export did.

    Attributes:
        episodes: written.
        steps: written, all of them valid env steps.
        incomplete: of the episodes, those that the log breaks off.
        skipped_steps: steps of such episodes that were left out on request.
        refused: fragments left out, by the reason for which the learner refuses them.
        stopped: why it ended before the end of the log, "" if it did not.
    """

    episodes: int = 0
    steps: int = 0
    incomplete: int = 0
    skipped_steps: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    stopped: str = ""


def open_writer(kind: str, path: Path, spec: EnvSpec) -> EpisodeWriter:
    """The writer of a format.

    Args:
        kind: `hdf5` or `parquet`.
        path: where to; must not exist.
        spec: of the environment.

    Raises:
        UserError: the path exists or cannot be written, or a library is missing.
    """
    if path.exists():
        raise UserError(f"{path} exists already; choose another --out, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Hdf5Writer(path, spec) if kind == "hdf5" else ParquetWriter(path, spec)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def export(
    entries: Iterable[Entry],
    examiner: Examiner,
    writer: EpisodeWriter,
    *,
    keep_incomplete: bool = True,
    max_steps: int | None = None,
) -> Exported:
    """Write the episodes in these entries.

    Args:
        entries: those of a slot in the order of its stream.
        examiner: the run's own.
        writer: open; closed by the caller.
        keep_incomplete: write episodes that the log breaks off too (marked).
        max_steps: stop after the episode with which so many steps are written.

    Raises:
        UserError: the disk refuses.
    """
    done = Exported()
    try:
        for episode in _episodes(entries, examiner, done):
            if not episode.complete and not keep_incomplete:
                done.skipped_steps += episode.steps
                continue
            writer.write(episode)
            done.episodes += 1
            done.steps += episode.steps
            done.incomplete += not episode.complete
            if max_steps is not None and done.steps >= max_steps:
                done.stopped = f"{max_steps} steps were wanted"
                break
    except OSError as error:
        raise UserError(f"the export cannot be written: {error.strerror or error}") from None
    return done


def _episodes(entries: Iterable[Entry], examiner: Examiner, done: Exported) -> Iterator[Episode]:
    stitcher = Stitcher()
    for entry in entries:
        found = examiner.examine(entry)
        if isinstance(found, Fault):
            done.refused[found.reason] = done.refused.get(found.reason, 0) + 1
            if found.meta is not None:
                stitcher.void(found.meta)
            continue
        yield from stitcher.add(found)
    yield from stitcher.close()
