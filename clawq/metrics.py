"""Metrics: what each one means, and where they are written.

CATALOGUE has every metric that clawq reports, with unit, meaning and healthy range; a name that ends in `/*` stands for
a family (`drops/*` for `drops/stale`). Names with a slash are grouped by TensorBoard. The same names are on the board
in Redis, in metrics.jsonl and on the screen.

Writers are plugins (`clawq.metric_writers`): anything made by one call with the run's folder that has `write` and
`close`. A writer that fails is dropped with one warning and never ends the run; the others go on. Values that are not
finite are written as null (jsonl) or left out (TensorBoard).

The whole of a writer plugin:

    class Printer:
        def __init__(self, folder): ...
        def write(self, step, wall_s, metrics): print(step, metrics)
        def close(self): ...
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clawq.core import MetricWriter
from clawq.errors import PluginLoadFailed
from clawq.plugins import load
from clawq.types import Metrics

_log = logging.getLogger(__name__)

#: metrics.jsonl is moved aside (one older file is kept) at this size; a day at one line a second is about 100 MB.
MAX_JSONL_BYTES = 1_000_000_000
#: The same of one TensorBoard event file.
MAX_EVENTS_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, in words.

    Attributes:
        unit: of its values.
        meaning: what is measured.
        healthy: what a well-running run shows.
    """

    unit: str
    meaning: str
    healthy: str = "-"


CATALOGUE: Mapping[str, Metric] = MappingProxyType(
    {
        # Speed
        "env_steps": Metric("env steps", "valid env steps inserted into the replay ring", "grows"),
        "env_steps_per_s": Metric("env steps/s", "insert rate", "near the simulator's own speed times the actors"),
        "updates": Metric("updates", "updates of the algorithm", "grows"),
        "updates_per_s": Metric("updates/s", "update rate", "steady; 0 only until min_size_to_sample is reached"),
        "samples_per_insert": Metric("1", "transitions sampled for each env step inserted, so far", "as configured"),
        "wall_s": Metric("s", "wall time since the first env step, over all restarts"),
        "time_left_s": Metric("s", "time left of the budget; absent without a time limit"),
        "progress": Metric("0..1", "spent share of the budget"),
        # Staleness
        "weights_version": Metric("version", "newest published weights", "grows"),
        "policy_lag/min": Metric("versions", "least policy lag of the sampled or inserted fragments", "0 to 2"),
        "policy_lag/mean": Metric("versions", "mean policy lag", "a few; a steady growth means actors are starved"),
        "policy_lag/max": Metric("versions", "largest policy lag", "at most staleness.target, if that is set"),
        "lag_at_use/mean": Metric("versions", "mean policy lag of the rows of a batch, when the gradient uses them"),
        "lag_at_use/max": Metric("versions", "largest one", "at most staleness.hard, if that drops"),
        "stale_share": Metric("0..1", "rows of the batches that were older than staleness.hard (reweight)", "small"),
        "wasted_fragments": Metric("fragments", "refused since they were older than staleness.hard", "0"),
        "wasted_transitions": Metric("env steps", "in these fragments: made by actors and never used", "0"),
        "expired_rows": Metric("rows", "masked in the ring when they became older than staleness.hard", "-"),
        # Transport
        "unread_fragments": Metric("fragments", "sent by actors, not yet read by the learner", "small and bounded"),
        "unread_bytes": Metric("bytes", "the same, by the mean size of a fragment", "small and bounded"),
        "flow/*": Metric("-", "counters of what the learner takes, for the regulator (board only)"),
        "pace/*": Metric("-", "what the regulator decided: window, actors, set point and delay in s (board only)"),
        "stored_bytes": Metric("bytes", "held by the run's streams", "below redis.stream_bytes"),
        "shortened_streams": Metric("streams", "lost their end with a Redis that went back to an older state", "0"),
        "reader/*": Metric("bytes", "of a reader: not taken over yet, and not in its checkpoints yet", "bounded"),
        "slots": Metric("slots", "slots with a live claim", "the actors you expect"),
        "workers": Metric("workers", "workers with a heartbeat", "the workers you started"),
        "fragments": Metric("fragments", "taken over by the learner", "grows"),
        "duplicates": Metric("fragments", "delivered again and recognised", "0; a few after a reconnect"),
        "gap_fragments": Metric("fragments", "missing in a stream, noticed by their numbers", "0"),
        "produced_steps": Metric("env steps", "made by actors, by the counters in their headers"),
        "lost_unacked": Metric("fragments", "bound of what failed actors took with them unsent", "0"),
        "actor_failures": Metric("failures", "actors that failed, died or hung since the learner started", "0"),
        "recycled/*": Metric(
            "actors", "gave way to new ones, by reason: memory, fragments, simulator", "as configured"
        ),
        "broken_off_episodes": Metric("episodes", "under way in actors that were recycled or failed"),
        "evaluation_failures": Metric("failures", "evaluations that failed or were given up", "0"),
        "workers_reaped_total/*": Metric("processes", "ended by a watchdog, by reason (board only)", "0"),
        "drops/*": Metric("env steps", "not used, by reason", "0"),
        "rejected/*": Metric("fragments", "refused by the learner, by reason; kept as dead letters", "0"),
        # Rounds (sync)
        "rounds": Metric("rounds", "closed and trained on", "grows"),
        "short_rounds": Metric("rounds", "of these, gone on without the quota of some actor", "0"),
        "late_fragments": Metric("fragments", "used in a later round than the one they were made for", "0"),
        "archive/bytes": Metric("bytes", "the archive's files", "below archive.bytes"),
        "archive/fragments": Metric("fragments", "held by the archive", "grows"),
        "archive/dropped_fragments": Metric("fragments", "gone with the oldest segments (archive.bytes)"),
        "archive/gap_fragments": Metric("fragments", "missing between those archived, since the learner started", "0"),
        "replaced_actors": Metric(
            "actors", "gone on in a seat of another actor; with 0 here and above, reproducible", "0"
        ),
        # Replay
        "ring/fill": Metric("0..1", "share of the ring that is filled", "reaches 1"),
        "ring/size": Metric("env steps", "rows in the ring"),
        "late_priorities": Metric("rows", "priorities that came for rows which were gone by then", "0"),
        "fifo/waiting": Metric("env steps", "not drawn yet, with sampler: fifo", "a batch or two"),
        "fifo/wasted": Metric("env steps", "overwritten or masked before they were drawn, with sampler: fifo", "0"),
        "demonstrations/env_steps": Metric("env steps", "read from a file; no env steps of the run"),
        "demonstrations/episodes": Metric("episodes", "read from a file"),
        "demonstrations/rows": Metric("transitions", "of each batch that are demonstrations"),
        "quarantine/rules": Metric("rules", "quarantines in force; see `clawq log quarantine RUN --list`", "0"),
        "quarantine/masked": Metric("env steps", "masked in the ring by quarantines, since the learner started", "0"),
        "limiter/error": Metric("samples", "inserts · samples_per_insert − samples", "inside its bounds"),
        # Learning
        "episode/return": Metric("reward", "mean undiscounted return of training episodes, with exploration", "rises"),
        "episode/length": Metric("env steps", "mean length of training episodes"),
        "episode/success": Metric("0..1", "success rate of training episodes, where the env reports it", "rises"),
        "eval/mean_return": Metric("reward", "mean return of the last evaluation, no exploration", "rises"),
        "eval/std_return": Metric("reward", "standard deviation over its episodes"),
        "eval/success": Metric("0..1", "success rate of the last evaluation", "rises"),
        "eval/mean_length": Metric("env steps", "mean episode length of the last evaluation"),
        "eval/version": Metric("version", "weights version of the last evaluation"),
        "non_finite_updates": Metric("updates", "skipped because a loss or gradient was not finite", "0"),
        "train/*": Metric("-", "what the algorithm reports of its updates: losses, gradient norms, value estimates"),
    }
)


def describe(name: str) -> Metric | None:
    """The catalogue entry of a metric or of its family; None if it has none (metrics of plugins may not)."""
    return CATALOGUE.get(name) or CATALOGUE.get(f"{name.partition('/')[0]}/*")


class JsonlWriter:
    """One JSON object a line in `metrics.jsonl`: step, wall_s and the metrics; appended to when a run is resumed.

    Args:
        folder: the run's folder.
        max_bytes: at this size the file becomes `metrics.1.jsonl` (replacing an older one) and a new one begins.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_JSONL_BYTES) -> None:
        self._file = Path(folder) / "metrics.jsonl"
        self._max_bytes = max_bytes
        self._out = self._file.open("ab")
        self._end_torn_line()

    def write(self, step: int, wall_s: float, metrics: Metrics) -> None:
        """Append one line and hand it to the system, so that readers see whole lines."""
        if self._out.tell() >= self._max_bytes:
            self._out.close()
            self._file.replace(self._file.with_suffix(".1.jsonl"))
            self._out = self._file.open("ab")
        row = {"step": step, "wall_s": round(wall_s, 3)} | {name: _finite(value) for name, value in metrics.items()}
        self._out.write(json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._out.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._out.close()

    def _end_torn_line(self) -> None:
        # A killed process may have left half a line; it must not swallow the next one.
        if self._out.tell() == 0:
            return
        with self._file.open("rb") as written:
            written.seek(-1, 2)
            if written.read(1) != b"\n":
                self._out.write(b"\n")


class TensorBoardWriter:
    """Scalars in TensorBoard event files under `tb/`, without importing torch or TensorFlow.

    Args:
        folder: the run's folder.
        max_bytes: at this size a new file begins, beside which only the one before it is kept.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_EVENTS_BYTES) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._proto: tuple[Any, Any] = (event_pb2, summary_pb2)
        self._folder, self._max_bytes = Path(folder) / "tb", max_bytes
        self._files = 0
        self._open()

    def write(self, step: int, wall_s: float, metrics: Metrics) -> None:
        """One event with all finite values."""
        event_pb2, summary_pb2 = self._proto
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        # TensorBoard wants the time of day, so that a resumed run shows its pause.
        event = event_pb2.Event(step=step, wall_time=time.time(), summary=summary_pb2.Summary(value=values))
        self._bytes += event.ByteSize()
        self._writer.add_event(event)
        if self._bytes >= self._max_bytes:
            self._writer.close()
            for old in sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-1]:
                old.unlink()
            self._open()

    def close(self) -> None:
        """Flush and close; idempotent."""
        self._writer.close()

    def _open(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Numbered, because a name has seconds in it and two files may begin in one.
        self._files += 1
        self._writer: Any = EventFileWriter(str(self._folder), filename_suffix=f".{self._files:06d}")
        self._bytes = 0


class Writers:
    """Several writers as one; a writer that fails is dropped with one warning.

    Args:
        writers: name -> writer.
    """

    def __init__(self, writers: Mapping[str, MetricWriter]) -> None:
        self._writers = dict(writers)

    @property
    def names(self) -> list[str]:
        """Writers still in use."""
        return list(self._writers)

    def write(self, step: int, wall_s: float, metrics: Metrics) -> None:
        """Give the metrics to all writers.

        Args:
            step: env steps inserted so far.
            wall_s: seconds since the run's first env step.
            metrics: name -> value.
        """
        for name, writer in list(self._writers.items()):
            try:
                writer.write(step, wall_s, metrics)
            except Exception as error:  # a plugin's: whatever it raises must not end the run
                del self._writers[name]
                _warn(name, error)

    def close(self) -> None:
        """Close all writers; idempotent."""
        while self._writers:
            name, writer = self._writers.popitem()
            try:
                writer.close()
            except Exception as error:
                _warn(name, error)


def open_writers(names: Sequence[str], folder: Path) -> Writers:
    """Make the named writers for a run's folder; one that cannot be made is left out with a warning.

    Raises PluginNotFound or DuplicatePlugin for a wrong name: that is a mistake in the configuration.
    """
    writers: dict[str, MetricWriter] = {}
    for name in names:
        try:
            make = load("metric_writers", name)
        except PluginLoadFailed as error:
            _warn(name, error)
            continue
        try:
            writers[name] = make(folder)
        except Exception as error:
            _warn(name, error)
    return Writers(writers)


def _warn(name: str, error: Exception) -> None:
    _log.warning("metric writer %r is dropped: %s: %s", name, type(error).__name__, error)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


__all__ = [
    "CATALOGUE",
    "MAX_JSONL_BYTES",
    "JsonlWriter",
    "Metric",
    "TensorBoardWriter",
    "Writers",
    "describe",
    "open_writers",
]
