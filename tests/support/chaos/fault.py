"""What a fault is, and the verdict on one."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from traceback import format_exception
from typing import Any

from chaos.ground import PLAIN, NotHere, Setup
from chaos.system import Mark, System
from clawq.config import Actors
from clawq.programs.gauges import UNSENT_FRAGMENTS

#: Fragments that one killed actor may lose, as the learner counts: a bound.
PER_KILL = Actors().outbox_fragments + UNSENT_FRAGMENTS


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: `F3`, or `F5-30` where one has several sizes.
        what: in one line.
        expected: likewise.
        inject: does it to a running system, waits until the fault itself is over, and says what was seen beside.
        setup: of the system that it needs.
        recovery_s: within so long the system must train again.
        kills: the most actors that may die of it; each may lose what its outbox holds, the learner says.
        gaps: whether acknowledged fragments may be lost, counted (a server without persistence).
    """

    name: str
    what: str
    expected: str
    inject: Callable[[System, Random], str | None]
    setup: Setup = PLAIN
    recovery_s: float = 30.0
    kills: int = 0
    gaps: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a system after a fault.

    Attributes:
        fault: its name.
        outcome: `recovered`, `not possible here` or `FAILED`.
        recovery_s: from the end of the fault until the system trained again; None: it did not.
        lost_unacked, gaps, duplicates, rejected: of the ledger, fragments.
        seen: what was seen beside.
        problems: why it failed.
        took_s: all in all.
    """

    fault: str
    outcome: str
    recovery_s: float | None = None
    lost_unacked: int = 0
    gaps: int = 0
    duplicates: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    seen: str = ""
    problems: tuple[str, ...] = ()
    took_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome != "FAILED"

    def line(self) -> str:
        """One JSON line."""
        return json.dumps(asdict(self))


def suffer(system: System, fault: Fault, seed: int = 0) -> Verdict:
    """Do it to a running system, wait for recovery, balance the ledger; the system goes on afterwards."""
    began_s, before = time.monotonic(), system.mark()
    recovery_s, seen = None, ""
    system.begin()
    try:
        seen = fault.inject(system, Random(seed)) or ""
        system.over(first=False)
        if system.recovery_s is None:
            system.await_recovery(_at_end(system, before), fault.recovery_s)
        recovery_s = round(system.recovery_s or 0.0, 1)
        most = fault.kills * PER_KILL
        # Who was silent for long is taken for lost until the learner, which looks once a second, sees it again.
        with suppress(AssertionError):
            system.until(lambda: _lost(system.balance().sums) <= most, "it to be known who lives", 5.0)
        sums = system.check_ledger().sums
    except Exception as error:
        return Verdict(fault.name, "FAILED", recovery_s, seen=seen, problems=(_told(error),), took_s=_since(began_s))
    lost, gaps = _lost(sums), sum(sums.get("gaps", {}).values())
    problems = [f"{lost} fragments may be lost unacknowledged; at most {most} were to be"] * (lost > most)
    problems += [f"acknowledged fragments are lost: {sums['gaps']}"] * bool(gaps and not fault.gaps)
    outcome = "FAILED" if problems else "recovered"
    found = lost, gaps, int(sums["duplicates"]), dict(sums["rejected"])
    return Verdict(fault.name, outcome, recovery_s, *found, seen, tuple(problems), _since(began_s))


def run_fault(fault: Fault, folder: Path, seed: int = 0) -> Verdict:
    """A fault in a system of its own, which is ended afterwards and must leave nothing."""
    began_s = time.monotonic()
    try:
        with System(folder, fault.setup) as system:
            verdict = suffer(system, fault, seed)
            if verdict.ok:
                system.stop()
    except NotHere as why:
        return Verdict(fault.name, "not possible here", seen=str(why), took_s=_since(began_s))
    except Exception as error:
        return Verdict(fault.name, "FAILED", problems=(_told(error),), took_s=_since(began_s))
    left = tuple(system.leftovers)
    outcome = "FAILED" if left else verdict.outcome
    facts = asdict(verdict) | {"outcome": outcome, "problems": verdict.problems + left, "took_s": _since(began_s)}
    return Verdict(**facts)


def _lost(sums: Mapping[str, Any]) -> int:
    return int(sums.get("lost_unacked", 0))


def _at_end(system: System, before: Mark) -> Mark:
    """How far it was at the end of the fault if that can be told, else before it."""
    try:
        now = system.mark()
    except Exception:
        return before
    return now if now.committed >= before.committed else before


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) and str(error) else "".join(format_exception(error))


def _since(began_s: float) -> float:
    return round(time.monotonic() - began_s, 1)
