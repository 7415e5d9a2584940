"""What is wrong, and what to do about it: `diagnose(snapshot, now, policy) -> decisions`. Pure.

First every process is judged by itself, by the first rule that applies:

    stale, dead     it is gone: its record goes, and what carries its tag goes with it (orphaned)
    defunct         a zombie is its parent's to reap; it is reported, never signalled
    unkillable      it lives on after SIGKILL: its place is given up, nothing is started there
    orphaned        who answers for it is gone
    hung            no *progress* for longer than its phase may take
    leaking         USS over its limit for long, or rising steadily; RSS means nothing, since forks share memory
    lost_consumer   work waits, it has a free slot, and it takes nothing
    silent          its heartbeats are missing while its work goes on: told, never more

A place that died too often is flapping: it is given up for a while, with the last error. A round after a gap of our own
judges nothing. Then everything is looked at together, and the dampers (`clawq.watchdog.dampers`) take back what should
not be done now.
"""

from dataclasses import replace

from clawq.procfs import HOST_NAMESPACE, Identity
from clawq.registry import Record
from clawq.watchdog.dampers import damped, with_patients
from clawq.watchdog.policy import Policy
from clawq.watchdog.slope import theil_sen
from clawq.watchdog.snapshot import ENDING, Action, Decision, Seen, Snapshot

#: Started by a user, who alone would start them again; or not ours to judge by progress.
NEVER_ENDED = frozenset({"up", "supervisor", "redis", "watchdog"})
#: Memory of a learner grows while its ring fills, and its size is planned: leaks there are only told.
LEAKS_TOLD = frozenset({"learner"})


def diagnose(snapshot: Snapshot, now_s: float, policy: Policy) -> tuple[Decision, ...]:
    """All decisions of one round.

    Args:
        snapshot: what is seen.
        now_s: monotonic time of the look.
        policy: the host's numbers.
    """
    if snapshot.gap_s > policy.longest_gap_s:
        why = f"this watchdog did not look for {snapshot.gap_s:.1f} s (stopped, or starved): nothing is judged now"
        return (Decision("gap", "hold", why, evidence={"gap_s": snapshot.gap_s}),)
    found = [decision for seen in snapshot.seen if (decision := judge(seen, snapshot, now_s, policy)) is not None]
    found = with_patients(found, snapshot)
    return (*damped(found, snapshot, now_s, policy), *_flapping(snapshot, policy), *_strangers_on_gpus(snapshot))


def judge(seen: Seen, snapshot: Snapshot, now_s: float, policy: Policy) -> Decision | None:
    """What is wrong with one process, whatever becomes of it."""
    record = seen.record
    if record.identity.boot != snapshot.me.boot:
        return Decision("stale", "forget", "it was registered before this machine was booted", record)
    if record.identity.namespace != snapshot.me.namespace:
        return None  # in another container its pid means something else; that one has a watchdog of its own
    rules = (_gone, _defunct, _unkillable, _orphaned, _hung, _leaking, _lost, _silent)
    for rule in rules:
        decision = rule(seen, now_s, policy)
        if decision is not None:
            return _permitted(decision, seen, snapshot)
    return None


def refusal(record: Record, found: Identity | None, tagged: bool | None, me: Identity, above: frozenset[int]) -> str:
    """Why that process must not be signalled; empty if it may be.

    Args:
        record: as registered.
        found: who has its pid now, as seen when the signal is about to be sent.
        tagged: whether its environment has its tag; None: unreadable.
        me: this watchdog.
        above: pids of its ancestors.
    """
    identity = record.identity
    if identity.pid <= 1:
        return "pid 1 and below are never signalled"
    if identity.pid == me.pid:
        return "this is the watchdog itself"
    if identity.pid in above:
        return "the watchdog runs below it"
    if identity.boot != me.boot:
        return "it was registered in another boot of this machine"
    if identity.namespace != me.namespace:
        return "it was registered in another pid namespace"
    if identity.uid != me.uid:
        return "it belongs to another user"
    if found is None:
        return "it is gone"
    if found != identity:
        return "its pid belongs to another process now"
    if record.inherited and tagged is not True:
        return "its environment does not have its tag"
    return ""


def deadline_s(seen: Seen, policy: Policy) -> float | None:
    """Seconds without progress after which it counts as hung; None: its phase has no limit."""
    if seen.reading is None:
        return None
    limit_s = seen.record.limits.get(seen.reading.phase)
    if limit_s is None:
        return None
    return limit_s + (policy.courtesy_s if seen.record.role == "actor" else 0.0)


def growth_mb_per_h(seen: Seen, policy: Policy) -> float | None:
    """How fast its memory grows; None: not watched for long enough."""
    memory = seen.memory
    if len(memory) < policy.leak_samples or memory[-1][0] - memory[0][0] < policy.leak_window_s:
        return None
    return theil_sen(memory) * 3600.0


# --- the rules -----------------------------------------------------------------------------------------------------


def _gone(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    if not seen.gone:
        return None
    waited_s = now_s - seen.since.get("gone", now_s)
    if seen.parent_alive and seen.record.parent is not None and waited_s < policy.settle_s:
        return Decision("dead", "report", "it has ended; its parent is tidying up", seen.record, {"for_s": waited_s})
    if seen.strays:
        why = f"it has ended, but {len(seen.strays)} processes that it started live on"
        return Decision("orphaned", "end", why, seen.record, {"pids": list(seen.strays)})
    if seen.record.parent is not None and seen.parent_alive:
        why = f"it ended, and its parent did not take its record away for {waited_s:.0f} s"
        return Decision("dead", "forget", why, seen.record, {"for_s": waited_s})
    return Decision("stale", "forget", "it is gone, and who answered for it too", seen.record)


def _defunct(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    if not seen.zombie:
        return None
    for_s = now_s - seen.since.get("zombie", now_s)
    facts = {"ppid": seen.stat.ppid if seen.stat else 0, "for_s": for_s}
    if for_s < policy.defunct_s:
        return Decision("dead", "report", "it has ended and will be reaped by its parent", seen.record, facts)
    why = f"it ended {for_s:.0f} s ago and process {facts['ppid']} does not reap it; no signal helps"
    return Decision("defunct", "report", why, seen.record, facts)


def _unkillable(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    if seen.killed_s is None:
        return None
    for_s = now_s - seen.killed_s
    state = seen.stat.state if seen.stat else "?"
    if for_s < policy.death_s:
        return Decision("killed", "report", f"SIGKILL was sent {for_s:.0f} s ago", seen.record, {"for_s": for_s})
    why = f"it lives {for_s:.0f} s after SIGKILL (state {state}): the kernel holds it; its place is given up"
    return Decision("unkillable", "report", why, seen.record, {"for_s": for_s, "state": state})


def _orphaned(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    if seen.parent_alive:
        return None
    for_s = now_s - seen.since.get("orphaned", now_s)
    parent = seen.record.parent.pid if seen.record.parent else 0
    facts = {"parent": parent, "for_s": for_s, "run": seen.record.run}
    if for_s < policy.settle_s:
        return Decision("orphaned", "report", f"its parent {parent} is gone; it should end", seen.record, facts)
    why = f"its parent {parent} has been gone for {for_s:.0f} s, so its run is over"
    return Decision("orphaned", "end", why, seen.record, facts)


def _hung(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    limit_s = deadline_s(seen, policy)
    if limit_s is None or seen.reading is None:
        return None
    still_s = now_s - seen.reading.at_s
    if still_s <= limit_s:
        return None
    state, phase = (seen.stat.state if seen.stat else "?"), seen.reading.phase
    stopped = " (it is stopped)" if state in "Tt" else ""
    why = f"no progress for {still_s:.0f} s in phase {phase!r}, which may take {limit_s:.0f} s{stopped}"
    facts = {"still_s": still_s, "limit_s": limit_s, "phase": phase, "state": state, "counter": seen.reading.counter}
    action: Action = "report" if seen.record.role in NEVER_ENDED else "end"
    return Decision("hung", action, why, seen.record, facts)


def _leaking(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    if not seen.memory:
        return None
    uss_mb, limit_mb = seen.memory[-1][1], seen.record.limits.get("memory_mb")
    growth, most = growth_mb_per_h(seen, policy), seen.record.limits.get("leak_mb_per_h", policy.leak_mb_per_h)
    heavy_s = now_s - seen.since.get("heavy", now_s)
    facts = {"uss_mb": uss_mb, "limit_mb": limit_mb, "mb_per_h": growth}
    if limit_mb is not None and uss_mb > limit_mb and heavy_s >= seen.record.limits.get("memory_s", 0.0):
        why = f"it has {uss_mb:.0f} MB of its own, more than its {limit_mb:.0f} MB, for {heavy_s:.0f} s"
    elif growth is not None and growth > most:
        why = f"its own memory grows by {growth:.0f} MB an hour (at most {most:.0f}), now {uss_mb:.0f} MB"
    else:
        return None
    told = seen.record.role in NEVER_ENDED or seen.record.role in LEAKS_TOLD
    return Decision("leaking", "report" if told else "recycle", why, seen.record, facts)


def _lost(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    reading, began_s = seen.reading, seen.since.get("idle")
    if reading is None or began_s is None or seen.record.role != "worker":
        return None
    idle_s = now_s - max(began_s, reading.worked_s)
    if idle_s <= policy.lost_s:
        return None
    slots = int(seen.record.facts.get("slots", 0))
    why = f"{seen.waiting} commands wait, {slots - reading.busy} slots are free, and it took none for {idle_s:.0f} s"
    facts = {"waiting": seen.waiting, "busy": reading.busy, "slots": slots, "idle_s": idle_s}
    return Decision("lost_consumer", "end", why, seen.record, facts)


def _silent(seen: Seen, now_s: float, policy: Policy) -> Decision | None:
    began_s = seen.since.get("silent")
    if began_s is None or now_s - began_s <= policy.silent_s:
        return None
    why = f"its work goes on, but no heartbeat of it has been in Redis for {now_s - began_s:.0f} s"
    return Decision("silent", "report", why, seen.record, {"for_s": now_s - began_s})


# --- all together --------------------------------------------------------------------------------------------------


def _permitted(decision: Decision, seen: Seen, snapshot: Snapshot) -> Decision:
    """The decision, reported only if its process must not be signalled."""
    if decision.action not in ENDING or seen.gone:
        return decision
    why = refusal(seen.record, seen.record.identity, seen.tagged, snapshot.me, snapshot.ancestors)
    return replace(decision, action="report", why=f"{decision.why}; not ended: {why}") if why else decision


def _flapping(snapshot: Snapshot, policy: Policy) -> list[Decision]:
    """Places that died too often: nothing is started there until the window has passed."""
    return [
        Decision(
            "flapping",
            "report",
            f"{place} died {count} times within {policy.flap_window_s:.0f} s; the last time: {how}",
            evidence={"place": place, "deaths": count},
        )
        for place, (count, how) in sorted(snapshot.deaths.items())
        if count > policy.flaps
    ]


def _strangers_on_gpus(snapshot: Snapshot) -> list[Decision]:
    """GPU memory of processes that are not registered: told, never more (R14).

    NVML counts pids as the machine's first namespace does. In a container they mean nothing to us, so who is ours
    cannot be told there.
    """
    known = {seen.record.pid for seen in snapshot.seen if not seen.gone} | {snapshot.me.pid}
    comparable = snapshot.me.namespace == HOST_NAMESPACE
    whose = "and is none of clawq's" if comparable else "but whose that is cannot be told in a container"
    return [
        Decision(
            "gpu",
            "report",
            f"process {use.pid} (as NVML counts) holds {use.mb:.0f} MB of GPU {use.gpu} {whose}",
            evidence={"pid": use.pid, "gpu": use.gpu, "mb": use.mb},
        )
        for use in snapshot.gpu
        if not (comparable and use.pid in known)
    ]


__all__ = ["LEAKS_TOLD", "NEVER_ENDED", "deadline_s", "diagnose", "growth_mb_per_h", "judge", "refusal"]
