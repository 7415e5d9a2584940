"""When an actor is worn out: it holds too much memory, or has made as many fragments as it may.

The worker decides and the actor obeys between two fragments (in rounds, between two quotas): it sends all that it has,
gives its slot back and ends; the slot's next lease starts a new one. No fragment is lost; the episodes under way in its
envs are, and are counted.

    memory      private memory (USS) of the actor and of everything that it started: what its end would give back. For
                one slot at most once in `cooldown_s`, so that a limit below what an environment simply needs costs a
                restart now and then, and not all the time; and for one actor of this process at a time.
    fragments   counted when a lease ends

Limits come from the run (`actors.recycle`), the one for memory from the host too (CLAWQ_ACTOR_MEMORY_MB): the lower one
holds. A simulator that fails for good needs no limit: it raises `SimulatorFailed`, or ends its process with the status
of that.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: How often a working actor is measured, seconds.
LOOK_S = 2.0
#: So long the next actor of this process waits for its turn, at most, seconds: the one before is being replaced.
TURN_S = 60.0
_MB = 1_000_000
_COOLDOWN_S = 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one actor may use; None = anything.

    Attributes:
        memory_bytes: private memory, with all that it started.
        fragments: fragments made.
        cooldown_s: least time between two actors of a slot that go because of memory.
    """

    memory_bytes: int | None = None
    fragments: int | None = None
    cooldown_s: float = _COOLDOWN_S

    @classmethod
    def of(cls, run: Mapping[str, Any], host_mb: int | None = None) -> "Limits":
        """From the description of a run (which came over the wire: what makes no sense is no limit) and the host's."""
        config = run.get("config")
        actors = config.get("actors") if isinstance(config, Mapping) else None
        asked = actors.get("recycle") if isinstance(actors, Mapping) else None
        asked = asked if isinstance(asked, Mapping) else {}
        limits_mb = [mb for mb in (_positive(asked.get("memory_mb")), host_mb) if mb is not None]
        fragments = _positive(asked.get("fragments"))
        return cls(
            memory_bytes=int(min(limits_mb) * _MB) if limits_mb else None,
            fragments=int(fragments) if fragments is not None else None,
            cooldown_s=_positive(asked.get("cooldown_s")) or _COOLDOWN_S,
        )

    @property
    def registered(self) -> dict[str, float]:
        """What the watchdog is told: it steps in when this worker should have acted long ago, and did not."""
        if self.memory_bytes is None:
            return {}
        return {"memory_mb": self.memory_bytes / _MB, "memory_s": self.cooldown_s + 2 * TURN_S}


@dataclass(slots=True)
class Wear:
    """What is known of a slot's actor, and of when the slot was recycled.

    Attributes:
        fragments: made by the present actor.
        memory_bytes: private memory, as last measured.
        recycled_s: when an actor last went because of memory.
        looked_s: when it was last measured.
    """

    fragments: int = 0
    memory_bytes: int = 0
    recycled_s: float = -math.inf
    looked_s: float = -math.inf

    def renew(self) -> None:
        """A new actor lives here."""
        self.fragments = self.memory_bytes = 0
        self.looked_s = -math.inf


def private_bytes(pid: int, enough: int) -> int:
    """Private memory of a process and all that it started; less exact, and much cheaper, while it is below `enough`.

    Resident memory holds what is shared as well, so it is never less; only when that passes the bound is it looked at
    page by page (14 ms for each process).
    """
    import psutil

    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        resident = sum(one.memory_info().rss for one in tree)
        return resident if resident <= enough else sum(one.memory_full_info().uss for one in tree)
    except psutil.Error:
        # One of them ended while we looked; the next look is two seconds away.
        return 0


class Recycler:
    """Decides for all slots of one process. Threads may use it at the same time.

    Args:
        host_mb: the host's own limit for the memory of an actor.
        measure: see `private_bytes`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        host_mb: int | None = None,
        measure: Callable[[int, int], int] = private_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host_mb, self._measure, self._clock = host_mb, measure, clock
        self._turn: Wear | None = None
        self._turn_s = -math.inf

    def due(self, wear: Wear, pid: int, run: Mapping[str, Any]) -> str | None:
        """Why the actor with that pid shall end now (`memory`, `fragments`); None = it shall not."""
        limits, now_s = Limits.of(run, self._host_mb), self._clock()
        if limits.fragments is not None and wear.fragments >= limits.fragments:
            return "fragments"
        if limits.memory_bytes is None or now_s - wear.looked_s < LOOK_S:
            return None
        wear.looked_s = now_s
        wear.memory_bytes = self._measure(pid, limits.memory_bytes)
        if wear.memory_bytes <= limits.memory_bytes or now_s - wear.recycled_s < limits.cooldown_s:
            return None
        if self._turn not in (None, wear) and now_s - self._turn_s < TURN_S:
            return None
        self._turn, self._turn_s, wear.recycled_s = wear, now_s, now_s
        return "memory"

    def worked(self, wear: Wear, fragments: int) -> None:
        """A lease of the slot is over, and its actor, which made so many fragments, lives on."""
        wear.fragments += fragments
        if fragments and self._turn is wear:
            self._turn = None


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


__all__ = ["LOOK_S", "TURN_S", "Limits", "Recycler", "Wear", "private_bytes"]
