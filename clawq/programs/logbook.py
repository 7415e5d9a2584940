"""A run's log for whoever looks at it from outside: found by name or folder, opened, told fragment by fragment.

Needs no learner. Of a run that is alive the streams are read, of one with an archive that too; either may be missing.
What is told of a fragment comes from its own header, which is the actor's word: texts in it are made printable.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clawq.config import RunConfig
from clawq.errors import CodecError, LogGone, PluginError, ScheduleInvalid, TransportError, UserError
from clawq.programs.extras import extras_of
from clawq.programs.run import archive_folder
from clawq.programs.schedule import SCHEDULE_FILE, FragmentCommitted, UpdatesTried, read_schedule
from clawq.programs.whereabouts import Whereabouts, find_run
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.specs import ArraySpec, EnvSpec
from clawq.transport.archive import Archive
from clawq.transport.client import translated
from clawq.transport.codec import decode, peek_meta
from clawq.transport.keys import RunKeys
from clawq.transport.live_streams import Found
from clawq.transport.log import RunLog
from clawq.transport.stream import parse_id
from clawq.transport.texts import parse_cursors
from clawq.types import Array, Fragment, FragmentMeta


@dataclass(frozen=True, slots=True)
class Logbook:
    """An open log and the run that it is of.

    Attributes:
        where: the run.
        log: reads it.
        streams: whether live streams are read.
        archive: folder of the archive that is read, None if there is none.
    """

    where: Whereabouts
    log: RunLog
    streams: bool
    archive: Path | None

    @property
    def spec(self) -> EnvSpec:
        """Of the run's environment."""
        try:
            return EnvSpec.from_json(self.where.spec)
        except (KeyError, TypeError, ValueError, IndexError):
            raise UserError(f"run {self.where.run_id} has no environment spec that can be read") from None

    @property
    def examiner(self) -> Examiner:
        """Checks fragments as the run's learner does (but for its algorithm's extras where that is not installed)."""
        return Examiner(decode, FragmentCheck(self.spec, self.where.keys.tag, self.extras))

    @property
    def extras(self) -> dict[str, ArraySpec]:
        """What the run's algorithm needs of its policy beside each action."""
        with contextlib.suppress(PluginError, ValueError):
            return extras_of(RunConfig.model_validate(self.where.config), self.spec)
        return {}


def open_logbook(word: str) -> Logbook:
    """The log of the run that a user means by a name or a folder.

    Raises:
        UserError: there is no such run.
        LogGone: neither streams nor an archive of it can be reached.
    """
    where = find_run(word)
    alive = where.data is not None and _has_streams(where.data, where.keys)
    folder = None
    if where.folder is not None:
        chosen = where.config.get("archive", {}).get("folder")
        folder = archive_folder(where.folder, where.run_id, chosen)
    archive = Archive(folder, where.keys.tag) if folder is not None and folder.is_dir() else None
    if not alive and archive is None:
        raise LogGone(
            f"there is no log of run {where.run_id}: "
            + ("its streams are not on this Redis" if where.data is not None else "no Redis is reached")
            + f" (set CLAWQ_DATA_URL for another), and there is no archive in {folder or 'its run folder'} "
            "(archive.enabled writes one)"
        )
    log = RunLog((where.data, where.keys) if alive else None, archive)
    return Logbook(where, log, alive, folder if archive is not None else None)


def _has_streams(data: Any, keys: RunKeys) -> bool:
    with translated(data):
        return bool(data.exists(keys.slots, keys.dead_letter_counts))


# --- one fragment, told --------------------------------------------------------------------------------------------


def header_facts(found: Found, payload: bytes) -> dict[str, Any]:
    """What is to be said of a fragment without looking at its columns; JSON-able."""
    facts: dict[str, Any] = {
        "slot": found.slot,
        "id": f"{found.epoch}-{found.seq}",
        "made_ms": found.made_ms,
        "bytes": found.size_bytes,
        "place": found.place,
    }
    try:
        meta = peek_meta(payload)
    except CodecError as error:
        return {**facts, "unreadable": str(error)}
    return {**facts, **meta_facts(meta)}


def meta_facts(meta: FragmentMeta) -> dict[str, Any]:
    """A header, for people and programs."""
    made_by = meta.made_by
    return {
        "worker": printable(meta.worker),
        "host": printable(made_by.host),
        "env": printable(made_by.env),
        "env_fingerprint": printable(meta.env),
        "seed": meta.seed,
        "weights_version": meta.weights_version,
        "clawq": printable(made_by.version),
        "commit": printable(made_by.commit),
        "steps": meta.steps,
        "envs": meta.envs,
        "produced": meta.produced,
        "dropped": dict(meta.dropped),
        "episodes": len(meta.episodes),
        "voided": len(meta.voided),
        "life": meta.life or meta.epoch,
    }


def fragment_facts(fragment: Fragment) -> dict[str, Any]:
    """Columns (shape, dtype, least, mean, largest, not finite) and episodes of a fragment; JSON-able."""
    columns: dict[str, Array] = {f"obs.{key}": column for key, column in fragment.obs.items()}
    columns |= {"action": fragment.action, "reward": fragment.reward}
    columns |= {"terminated": fragment.terminated, "truncated": fragment.truncated, "valid": fragment.valid}
    columns |= {f"final.{key}": column for key, column in fragment.final_obs.items()}
    columns |= {f"extra.{name}": column for name, column in fragment.extras.items()}
    return {
        "columns": {printable(name): column_facts(column) for name, column in columns.items()},
        "episode_ends": [
            {"env": one.env, "length": one.length, "return": one.episode_return, "success": _number(one.success)}
            for one in fragment.meta.episodes
        ],
        "voided_rows": [{"env": one.env, "seq": one.seq, "t": one.t} for one in fragment.meta.voided],
    }


def column_facts(column: Array) -> dict[str, Any]:
    """Shape, dtype and statistics of one array."""
    facts: dict[str, Any] = {"shape": list(column.shape), "dtype": str(column.dtype)}
    if column.dtype == np.bool_:
        return {**facts, "true": int(np.count_nonzero(column))}
    finite = column[np.isfinite(column)] if column.dtype.kind == "f" else column.reshape(-1)
    if finite.size:
        numbers = finite.astype(np.float64)
        facts |= {"least": float(numbers.min()), "mean": float(numbers.mean()), "largest": float(numbers.max())}
    return {**facts, "not_finite": int(column.size - finite.size)}


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def printable(text: str) -> str:
    """Text off the wire without what a terminal would act on."""
    return "".join(char if char.isprintable() else "?" for char in text)


# --- what became of it ---------------------------------------------------------------------------------------------


def fate(book: Logbook, slot: str, epoch: int, seq: int) -> str | None:
    """What became of a fragment at the learner, as far as that can be told; None if it cannot."""
    committed = _in_schedule(book, slot, epoch, seq)
    if committed is not None:
        return committed
    if not book.streams:
        return None
    try:
        cursors = _cursors(book)
    except TransportError:
        return None
    if slot in cursors and parse_id(cursors[slot]) >= (epoch, seq):
        return "taken over by the learner"
    return "not taken over by the learner yet"


def _in_schedule(book: Logbook, slot: str, epoch: int, seq: int) -> str | None:
    folder = book.where.folder
    if folder is None or not (folder / SCHEDULE_FILE).is_file():
        return None
    updates, found = 0, None
    try:
        for record in read_schedule(folder / SCHEDULE_FILE):
            if isinstance(record, UpdatesTried):
                updates += record.count
            elif isinstance(record, FragmentCommitted) and (record.slot, record.epoch, record.seq) == (
                slot,
                epoch,
                seq,
            ):
                found = f"committed to the ring after update {updates}"
    except (ScheduleInvalid, OSError):
        return found
    return found


def _cursors(book: Logbook) -> Mapping[str, str]:
    with translated(book.where.data):
        raw: Mapping[bytes, bytes] = book.where.data.hgetall(book.where.keys.cursors())
    return parse_cursors(raw)
