"""What the watchdog sees at one moment, and what it decides: plain values, no effects."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clawq.procfs import Identity, Stat
from clawq.progress import Reading
from clawq.registry import Record

#: What is done about it: `end` (kill, however it takes), `recycle` (let it go between two fragments, then kill),
#: `forget` (take its record away, with what it left), `report`, `hold` (would be
#: ended, but not now).
Action = Literal["end", "recycle", "forget", "report", "hold"]
#: Those that end a process.
ENDING = ("end", "recycle")


@dataclass(frozen=True, slots=True)
class Seen:
    """One registered process, as it looks now.

    Attributes:
        record: what was registered.
        stat: its state; None = gone (whoever has its pid now).
        reading: its progress; None = it shows none.
        parent_alive: whether who answers for it lives; True if nobody does.
        tagged: whether its environment has its tag (None: unreadable); meaningless where the record says `inherited`
            is False.
        since: condition (`gone`, `orphaned`, `zombie`, `silent`, `idle`, `heavy`) -> monotonic time since when it
            holds.
        memory: (monotonic time, USS in MB), oldest first.
        strays: living processes that carry its tag, without itself.
        killed_s: monotonic time of our SIGKILL; None = never.
        waiting: commands in the queues that it serves (a worker).
        silent: some run that it serves has no heartbeat of it (a worker).
    """

    record: Record
    stat: Stat | None
    reading: Reading | None = None
    parent_alive: bool = True
    tagged: bool | None = True
    since: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[tuple[float, float], ...] = ()
    strays: tuple[int, ...] = ()
    killed_s: float | None = None
    waiting: int = 0
    silent: bool = False

    @property
    def zombie(self) -> bool:
        """Dead, and not reaped."""
        return self.stat is not None and self.stat.state in "ZX"

    @property
    def gone(self) -> bool:
        """Dead and reaped."""
        return self.stat is None

    def conditions(self) -> frozenset[str]:
        """What `since` keeps the beginnings of."""
        slots = int(self.record.facts.get("slots", 0))
        holds = {
            "gone": self.gone,
            "zombie": self.zombie,
            "orphaned": not self.gone and not self.parent_alive,
            "silent": self.silent,
            "heavy": bool(self.memory) and self.memory[-1][1] > self.record.limits.get("memory_mb", math.inf),
            "idle": self.waiting > 0 and self.reading is not None and self.reading.busy < slots,
        }
        return frozenset(name for name, true in holds.items() if true)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A process on a GPU, as NVML has it (which may know it by a pid of another namespace)."""

    pid: int
    gpu: int
    mb: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a round is judged by.

    Attributes:
        me: this watchdog.
        ancestors: pids of its parents, up to the first process.
        seen: the registered processes.
        redis: data URL -> good looks in a row; 0 = it is away.
        gap_s: time between the last look's end and this one.
        kills: monotonic times of kills within the last minute.
        gpu: who uses GPU memory.
        deaths: place -> deaths within the policy's window, and how the last one went.
    """

    me: Identity
    ancestors: frozenset[int]
    seen: tuple[Seen, ...]
    redis: Mapping[str, int] = field(default_factory=dict)
    gap_s: float = 0.0
    kills: tuple[float, ...] = ()
    gpu: tuple[GpuUse, ...] = ()
    deaths: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is wrong with a process, and what is done about it.

    Attributes:
        kind: class of trouble: dead, stale, defunct, hung, orphaned, leaking, gpu, unkillable, flapping,
            lost_consumer, silent; or gap.
        action: see Action.
        why: one sentence with the numbers, for people.
        record: of whom; None: of nobody in particular.
        evidence: the numbers, for the audit log.
    """

    kind: str
    action: Action
    why: str
    record: Record | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of whom, for people."""
        return "this host" if self.record is None else self.record.name


__all__ = ["ENDING", "Action", "Decision", "GpuUse", "Seen", "Snapshot"]
