"""What is not done, although a process alone would deserve it: dampers over the decisions of one round. Pure.

    with a parent that is ended   its children need no decision of their own
    Redis away, or just back      explains whatever hangs: held
    most of the host at once      it is the host that hangs: held
    leaks                         one is let go at a time
    so many kills in a minute     alarm only

A zombie is nobody's to end; here its parent is named, and treated if that hangs.
"""

from collections.abc import Iterable
from dataclasses import replace

from clawq.registry import Record
from clawq.watchdog.policy import Policy
from clawq.watchdog.snapshot import ENDING, Decision, Snapshot

_MINUTE_S = 60.0
#: Trouble that a host that hangs, or its Redis, would explain.
_STANDING = ("hung", "lost_consumer")


def damped(found: list[Decision], snapshot: Snapshot, now_s: float, policy: Policy) -> list[Decision]:
    """The same decisions, some of them held back."""
    found = _without_children_of_the_ended(found)
    ending = [decision for decision in found if decision.action in ENDING]
    hanging = sum(decision.kind in _STANDING for decision in ending)
    watched = sum(seen.reading is not None and not seen.gone for seen in snapshot.seen)
    outage = watched >= policy.outage_of and hanging > policy.outage_share * watched
    recent = sum(now_s - kill_s < _MINUTE_S for kill_s in snapshot.kills)
    left = policy.kills_allowed(len(snapshot.seen)) - recent
    recycling = False
    result = []
    for decision in found:
        if decision.action not in ENDING:
            result.append(decision)
            continue
        why = _why_not_now(decision, snapshot, policy)
        if not why and outage and decision.kind in _STANDING:
            why = f"{hanging} of {watched} processes hang at once, so it is this host that hangs"
        if not why and decision.kind == "leaking" and recycling:
            why = "one leaking process is let go at a time"
        if not why and left <= 0:
            why = f"alarm: {recent} processes were ended within a minute; nothing more is done by itself"
        if why:
            result.append(replace(decision, action="hold", why=f"{decision.why}; held back: {why}"))
            continue
        recycling, left = recycling or decision.kind == "leaking", left - 1
        result.append(decision)
    return result


def with_patients(found: list[Decision], snapshot: Snapshot) -> list[Decision]:
    """Of a zombie nothing can be ended; if who does not reap it is ours, that one is named, and treated if it hangs."""
    living = {seen.record.pid: seen.record for seen in snapshot.seen if seen.stat is not None and not seen.zombie}
    hanging = {one.record.pid: one for one in found if one.kind == "hung" and one.record is not None}
    result = []
    for one in found:
        parent = living.get(int(one.evidence.get("ppid", 0))) if one.kind == "defunct" else None
        if parent is not None:
            hung = hanging.get(parent.pid)
            fate = f"hangs, and is the patient: {hung.why}" if hung else "makes progress, but does not reap it"
            one = replace(one, why=f"{one.why}; {parent.name} {fate}")
        result.append(one)
    return result


def _why_not_now(decision: Decision, snapshot: Snapshot, policy: Policy) -> str:
    """Redis away explains whatever hangs."""
    assert decision.record is not None
    rounds = snapshot.redis.get(decision.record.urls[1])
    if rounds is None or rounds >= policy.redis_rounds:
        return ""
    return "its Redis is away" if rounds == 0 else "its Redis has only just come back"


def _without_children_of_the_ended(found: Iterable[Decision]) -> list[Decision]:
    """Ending a process ends what it started: those need no decision."""
    decisions = list(found)
    ended = {one.record.identity for one in decisions if one.record is not None and one.action in ENDING}
    parents = {one.record.identity: one.record.parent for one in decisions if one.record is not None}

    def below(record: Record | None) -> bool:
        above = None if record is None else record.parent
        while above is not None:
            if above in ended:
                return True
            above = parents.get(above)
        return False

    return [one for one in decisions if one.action not in ENDING or not below(one.record)]


__all__ = ["damped", "with_patients"]
