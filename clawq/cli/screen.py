"""The screen of a running run: a live table on a terminal, one plain line now and then elsewhere.

A snapshot is a flat mapping of the names of `clawq.metrics.CATALOGUE` to numbers, plus the texts `run`, `stage` and
`note`; whatever is missing is left out, so a screen can be shown before the first fragment has arrived. `rows` and
`line` turn a snapshot into text and are pure; `Screen` puts it where the user looks.
"""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeAlias

from clawq.amounts import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType

#: What a run looks like at one moment: metric name -> number, or text for `run`, `stage`, `note`.
Snapshot: TypeAlias = Mapping[str, float | str]

#: Between two plain lines (no terminal), unless the stage changes.
PLAIN_INTERVAL_S = 10.0


class Screen:
    """Shows snapshots; use it as a context manager.

    Args:
        out: where to write; the live table is used if it is a terminal that can show it.
        plain_interval_s: least time between two plain lines of the same stage.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        out: TextIO,
        plain_interval_s: float = PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._interval_s, self._clock = out, plain_interval_s, clock
        self._live: Any = None
        self._shown_s = -math.inf
        self._stage: float | str | None = None

    def __enter__(self) -> Self:
        if self._out.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._out)
            # A terminal that cannot move its cursor (TERM=dumb, editors) gets plain lines, or it would see nothing.
            if not console.is_dumb_terminal:
                self._live = Live(console=console, auto_refresh=False)
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, snapshot: Snapshot) -> None:
        """Show the newest snapshot: at once on a terminal, else when it is time for a line."""
        if self._live is not None:
            self._live.update(_table(snapshot), refresh=True)
            return
        now_s, stage = self._clock(), snapshot.get("stage")
        if stage != self._stage or now_s - self._shown_s >= self._interval_s:
            self._shown_s, self._stage = now_s, stage
            print(line(snapshot), file=self._out, flush=True)

    def say(self, text: str) -> None:
        """One line that stays, above the live table."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._out, flush=True)

    def close(self) -> None:
        """Leave the last table standing and give the terminal back; idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def rows(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(label, text) for everything the snapshot tells, in the order in which people ask."""
    found = _Facts(snapshot)
    table = [
        ("stage", found.text("stage")),
        ("round", found.text("round")),
        ("time", found.joined("{}", ("wall_s", duration), "{} left", ("time_left_s", duration))),
        ("env steps", found.joined("{}", ("env_steps", number), "{}/s", ("env_steps_per_s", number))),
        ("updates", found.joined("{}", ("updates", number), "{}/s", ("updates_per_s", number))),
        ("policy lag", found.joined("mean {}", ("policy_lag/mean", number), "max {}", ("policy_lag/max", number))),
        (
            "unread",
            found.joined("{} fragments", ("unread_fragments", number), "{} stored", ("stored_bytes", bytes_text)),
        ),
        ("readers", readers(snapshot)),
        ("ring", found.joined("{}", ("ring/fill", share), "{} env steps", ("ring/size", number))),
        (
            "demonstrations",
            found.joined(
                "{} env steps", ("demonstrations/env_steps", number), "{} rows a batch", ("demonstrations/rows", number)
            ),
        ),
        (
            "quarantine",
            found.joined(
                "{} rules", ("quarantine/rules", number), "{} env steps masked", ("quarantine/masked", number)
            ),
        ),
        ("workers", found.joined("{}", ("workers", number), "{} slots", ("slots", number))),
        ("training", found.joined("return {}", ("episode/return", score), "success {}", ("episode/success", share))),
        ("evaluation", found.joined("return {}", ("eval/mean_return", score), "success {}", ("eval/success", share))),
        ("drops", drops(snapshot)),
        ("failures", failures(snapshot)),
        ("reaped", reaped(snapshot)),
        ("recycled", recycled(snapshot)),
        ("note", found.text("note")),
    ]
    return [(label, text) for label, text in table if text]


def line(snapshot: Snapshot) -> str:
    """The snapshot as one line."""
    return " | ".join(text if label == "stage" else f"{label} {text}" for label, text in rows(snapshot))


def drops(snapshot: Snapshot) -> str:
    """What was not used, by reason, as `corrupt 1 fragments, stale 320 env steps`; `none` once steps have arrived."""
    units = {"drops": "env steps", "rejected": "fragments"}
    some = []
    for name, count in sorted(snapshot.items()):
        family, _, reason = name.partition("/")
        if family in units and isinstance(count, int | float) and count > 0:
            some.append(f"{reason} {number(count)} {units[family]}")
    return ", ".join(some) or ("none" if "env_steps" in snapshot else "")


def readers(snapshot: Snapshot) -> str:
    """What each reader beside the learner has still to take over and to checkpoint, as `archive 3.2 MB unread`."""
    some = []
    for name, unread in sorted(snapshot.items()):
        family, _, rest = name.partition("/")
        reader, _, what = rest.rpartition("/")
        kept = snapshot.get(f"reader/{reader}/uncheckpointed_bytes")
        if family == "reader" and what == "unread_bytes" and isinstance(unread, int | float) and _finite(kept):
            some.append(f"{reader} {bytes_text(unread)} unread, {bytes_text(float(kept or 0))} not checkpointed")
    return "; ".join(some)


def failures(snapshot: Snapshot) -> str:
    """What failed and was replaced or given up, as `3 actors, 1 evaluations`; empty if nothing did."""
    counts = [(what, snapshot.get(f"{what}_failures")) for what in ("actor", "evaluation")]
    return ", ".join(f"{number(count)} {what}s" for what, count in counts if isinstance(count, int | float) and count)


def reaped(snapshot: Snapshot) -> str:
    """Whom watchdogs ended, by reason, as `1 hung, 2 leaking`; empty if nobody."""
    found = [
        (name.partition("/")[2], count)
        for name, count in sorted(snapshot.items())
        if name.startswith("workers_reaped_total/")
    ]
    return ", ".join(f"{number(count)} {why}" for why, count in found if isinstance(count, int | float) and count)


def recycled(snapshot: Snapshot) -> str:
    """Actors that gave way to new ones, as `3 by memory, 1 by simulator, 8 episodes broken off`; empty if none did."""
    counts = [
        (name.partition("/")[2], count) for name, count in sorted(snapshot.items()) if name.startswith("recycled/")
    ]
    some = [f"{number(count)} by {why}" for why, count in counts if isinstance(count, int | float) and count]
    episodes = snapshot.get("broken_off_episodes")
    if some and isinstance(episodes, int | float) and episodes:
        some.append(f"{number(episodes)} episodes broken off")
    return ", ".join(some)


def number(value: float) -> str:
    """A count or a rate, short: 7, 3.2, 950, 12.3k, 4.56M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}" if abs(value) < 100 * size else f"{value / size:.0f}{letter}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def share(value: float) -> str:
    """A fraction 0..1 in percent."""
    return f"{value:.0%}"


def score(value: float) -> str:
    """A return, with enough digits to see it move."""
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3:07 or 1:02:09."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Facts:
    """Looks values up in a snapshot and leaves out what is not there."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def text(self, name: str) -> str:
        return str(self._snapshot.get(name, ""))

    def joined(self, *parts: Any) -> str:
        """From (template, (name, format)) pairs: the ones whose value is known and finite, with commas."""
        pairs = zip(parts[::2], parts[1::2], strict=True)
        known = [(template, shown, self._snapshot.get(name)) for template, (name, shown) in pairs]
        return ", ".join(template.format(shown(value)) for template, shown, value in known if _finite(value))


def _finite(value: float | str | None) -> bool:
    """A known number other than nan or inf."""
    return isinstance(value, int | float) and math.isfinite(value)


def _table(snapshot: Snapshot) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=str(snapshot.get("run", "")), title_justify="left", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column()
    for label, text in rows(snapshot):
        table.add_row(label, Text(text))
    return table


__all__ = [
    "PLAIN_INTERVAL_S",
    "Screen",
    "Snapshot",
    "drops",
    "duration",
    "failures",
    "line",
    "number",
    "reaped",
    "recycled",
    "rows",
    "score",
    "share",
]
