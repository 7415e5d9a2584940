"""Ending a process, with all that it started, carefully.

    fence       its claim, and those of its children, are taken away first: harmless should any of them survive; from
                one that leaks only if it does not end when asked, since it has fragments to send
    evidence    stacks, log and events are saved
    ask         the stop flag in its progress file, SIGTERM, and SIGCONT (a stopped process takes no other signal)
    kill        after a grace SIGKILL to the whole tree: registered children, whoever carries their tags, their sessions
    verify      all are dead by their pidfds, and nobody carries the tags any more
    tidy        claim given back, shared memory and record removed; the run is told

Every signal goes through a pidfd that was opened before identity and tag were compared. Who is not registered, or does
not carry a registered tag, or sits in the session of a registered leader, is never touched.
"""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from clawq import progress
from clawq.procfs import Identity, ancestors, environ, open_if, own_pids, read_stat
from clawq.registry import TAG_VARIABLE, Record, Registry
from clawq.spawning.spawner import wait_readable
from clawq.watchdog.diagnosis import refusal
from clawq.watchdog.evidence import log_tail, save
from clawq.watchdog.fence import Fence
from clawq.watchdog.policy import Policy
from clawq.watchdog.snapshot import Decision

_LOOK_S = 0.1
_ERROR_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it.

    Attributes:
        ended: whether anything was killed, or ended by itself when asked.
        dead: whether nothing of it is left.
        result: in words.
        signals: sent to it, in order.
        report: folder of the evidence.
    """

    ended: bool
    dead: bool
    result: str
    signals: tuple[str, ...] = ()
    report: Path | None = None


class Ending:
    """Carries out the decisions `end` and `recycle`.

    Args:
        registry: of the host.
        policy: for the graces.
    """

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self._registry, self._policy = registry, policy

    def end(self, decision: Decision) -> Outcome:
        """End the decision's process and its tree; refused if that is not the registered one (any more)."""
        record = decision.record
        assert record is not None
        me = Identity.of(os.getpid())
        assert me is not None
        if record.identity.alive:
            tag = (environ(record.pid) or {}).get(TAG_VARIABLE)
            why = refusal(record, Identity.of(record.pid), tag == record.tag, me, ancestors(me.pid))
            if why:
                return Outcome(False, False, f"refused: {why}")
        pidfd = open_if(record.identity) if record.identity.alive else None
        family = _family(record, self._registry.records())
        # Its own first; those of its children too, which are ended with it.
        fences = [Fence(one, self._claim_of(one)) for one in family]
        fence, letting_go, words = fences[0], decision.action == "recycle", list[str]()
        # One that is let go sends what it has first, under its claim.
        if not letting_go:
            words += _seize(fences)
        sessions = {one.pid: one.identity for one in family if one.inherited and one.identity.alive}
        try:
            report = save(self._registry.folder, decision, record, pidfd, fence.last_events())
            signals = self._ask(record, pidfd, letting_go)
            if letting_go and record.identity.alive:
                words += ["it did not end by itself", *_seize(fences)]
            left = self._kill(family, sessions, me, signals)
        finally:
            if pidfd is not None:
                os.close(pidfd)
        if left:
            words.append(f"{len(left)} processes survive SIGKILL: {left}")
            return Outcome(True, False, "; ".join(words), tuple(signals), report)
        for one in fences:
            one.release()
        self._tidy(family, decision)
        # One that its worker outlives is told of by that; the others are not.
        fence.tell(
            Counter(one.run for one in family[1:] if one.role == "actor"),
            {
                "role": record.role,
                "place": record.place,
                "pid": record.pid,
                "reason": decision.kind,
                "why": decision.why,
                "error": log_tail(record)[-_ERROR_CHARS:],
                "report": str(report or ""),
            },
        )
        return Outcome(True, True, "; ".join([*words, "dead, verified"]), tuple(signals), report)

    def _claim_of(self, record: Record) -> str:
        reading = progress.read(self._registry.progress_file(record.tag)) if record.identity.alive else None
        return reading.claim if reading is not None else ""

    def _ask(self, record: Record, pidfd: int | None, between_fragments: bool) -> list[str]:
        """Let it end by itself."""
        if pidfd is None:
            return []
        with contextlib.suppress(OSError):
            progress.ask_to_stop(self._registry.progress_file(record.tag))
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        wait_readable([pidfd], self._policy.recycle_s if between_fragments else self._policy.grace_s)
        return ["SIGTERM", "SIGCONT"]

    def _kill(
        self, family: list[Record], sessions: Mapping[int, Identity], me: Identity, signals: list[str]
    ) -> list[int]:
        """SIGKILL everything that belongs to the family, again until nobody is left; returns the pids that are."""
        deadline = time.monotonic() + self._policy.death_s
        while living := _living(family, sessions, me):
            if time.monotonic() >= deadline:
                return sorted(living)
            if "SIGKILL" not in signals:
                signals.append("SIGKILL")
            _kill_all(living.items())
            time.sleep(_LOOK_S)
        return []

    def _tidy(self, family: list[Record], decision: Decision) -> None:
        for record in family:
            for path in Path("/dev/shm").glob(f"clawq-{record.tag}-*"):
                with contextlib.suppress(OSError):
                    path.unlink()
            # A parent that lives reaps its child, and takes the record away itself.
            if record.parent is not None and record.parent.alive:
                continue
            if record is decision.record:
                self._registry.bury(record, f"{decision.kind}: {decision.why}")
            else:
                # Who only went with it has not died of anything that would speak against its place.
                self._registry.remove(record.tag)


def _seize(fences: Iterable[Fence]) -> list[str]:
    return [fence.seize() for fence in fences if fence.needed] or ["it holds no claim"]


def _family(record: Record, records: Iterable[Record]) -> list[Record]:
    """The process and all registered ones below it, the top first."""
    family, records = [record], list(records)
    for one in family:
        family += [other for other in records if other.parent == one.identity and other not in family]
    return family


def _living(family: list[Record], sessions: Mapping[int, Identity], me: Identity) -> dict[int, Identity]:
    """Living processes that belong to the family: registered, or with one of its tags, or in one of its sessions.

    A session has the number of its leader, which nobody else gets while anybody is in the session. If somebody else
    has that pid, all of it is over, and the session of that number is a stranger's.
    """
    ours = {number for number, leader in sessions.items() if Identity.of(number) in (None, leader)}
    tags = {record.tag for record in family if record.identity.here}
    leaders = {record.identity for record in family}
    spared = {me.pid, *ancestors(me.pid)}
    found = {}
    for pid in own_pids():
        stat, identity = read_stat(pid), Identity.of(pid)
        if stat is None or identity is None or stat.state in "ZX" or pid in spared:
            continue
        tag = (environ(pid) or {}).get(TAG_VARIABLE)
        if identity in leaders or tag in tags or stat.session in ours:
            found[pid] = identity
    return found


def _kill_all(living: Iterable[tuple[int, Identity]]) -> None:
    pidfds = []
    for _, identity in living:
        pidfd = open_if(identity)
        if pidfd is None:
            continue
        pidfds.append(pidfd)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    for pidfd in pidfds:
        wait_readable([pidfd], deadline - time.monotonic())
        os.close(pidfd)


__all__ = ["Ending", "Outcome"]
