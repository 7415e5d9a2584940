"""`clawq watchdog explain PID`: what the watchdog knows of a process, which rule would apply, and why, in words."""

import time
from collections.abc import Mapping
from typing import Any

from clawq.procfs import HOST_NAMESPACE, Identity, boot_id, command_line, environ, read_stat, rss_mb, uss_mb
from clawq.registry import TAG_VARIABLE, Record, Registry
from clawq.watchdog.audit import Audit
from clawq.watchdog.diagnosis import LEAKS_TOLD, NEVER_ENDED, deadline_s, diagnose
from clawq.watchdog.policy import Policy
from clawq.watchdog.sight import Sight
from clawq.watchdog.snapshot import Decision, Seen, Snapshot

#: Lines of the audit log that are shown.
_EARLIER = 5


def explain(pid: int, registry: Registry, policy: Policy) -> list[str]:
    """Lines for people about the process that has that pid now, or was registered under it."""
    snapshot = Sight(registry, policy).look()
    found = [seen for seen in snapshot.seen if seen.record.pid == pid]
    if not found:
        return [*_stranger(pid, snapshot.seen), *_earlier(pid, registry)]
    decisions = diagnose(snapshot, time.monotonic(), policy)
    lines = []
    for seen in found:
        lines += [seen.record.name, *(f"  {label:<11}{text}" for label, text in _facts(seen, snapshot, policy))]
        lines.append(f"  {'verdict':<11}{_verdict(seen.record, decisions)}")
    return [*lines, *_earlier(pid, registry)]


def overview(registry: Registry, policy: Policy) -> list[tuple[str, str, str, str]]:
    """(process, progress, memory, verdict) of everything registered on this host."""
    snapshot = Sight(registry, policy).look()
    decisions = diagnose(snapshot, time.monotonic(), policy)
    rows = []
    for seen in sorted(snapshot.seen, key=lambda seen: (seen.record.role, seen.record.place)):
        uss = None if seen.gone else uss_mb(seen.record.pid)
        memory = "" if uss is None else f"{uss:.0f} MB"
        rows.append((seen.record.name, _progress(seen, policy), memory, _verdict(seen.record, decisions)))
    return rows


def _facts(seen: Seen, snapshot: Snapshot, policy: Policy) -> list[tuple[str, str]]:
    record = seen.record
    parent = "a user" if record.parent is None else f"pid {record.parent.pid}"
    alive = "" if record.parent is None else (", which lives" if seen.parent_alive else ", which is gone")
    facts = [
        ("started by", parent + alive),
        ("run", record.run or "none in particular"),
        ("identity", _identity(seen, snapshot)),
        ("progress", _progress(seen, policy)),
        ("memory", _memory(seen, policy)),
    ]
    held = [use for use in snapshot.gpu if use.pid == record.pid and snapshot.me.namespace == HOST_NAMESPACE]
    if held and not seen.gone:
        facts.append(("gpu", ", ".join(f"{use.mb:.0f} MB of GPU {use.gpu}" for use in held)))
    if record.urls[1]:
        rounds = snapshot.redis.get(record.urls[1], 0)
        facts.append(("redis", "answers" if rounds else "does not answer: nobody who uses it is ended meanwhile"))
    if record.role == "worker" and seen.reading is not None:
        slots = int(record.facts.get("slots", 0))
        lost = f"lost if it takes none for {policy.lost_s:.0f} s while a slot is free"
        at_work = f"{seen.reading.busy} are at work (it has {slots} slots)"
        facts.append(("work", f"{seen.waiting} commands wait, {at_work}; {lost}"))
    if record.log:
        facts.append(("log", record.log))
    return facts


def _identity(seen: Seen, snapshot: Snapshot) -> str:
    record, me = seen.record, snapshot.me
    if record.identity.boot != me.boot:
        return "registered before this machine was booted"
    if record.identity.namespace != me.namespace:
        return "registered in another pid namespace (a container): its own watchdog's"
    if seen.stat is None:
        other = Identity.of(record.pid)
        return "gone" if other is None else f"gone; its pid is another process now: {command_line(record.pid)[:60]}"
    carried = {True: "carries its tag", False: "does not carry its tag", None: "its environment cannot be read"}
    tag = carried[seen.tagged] if record.inherited else "known without a tag"
    return f"the same process as registered (start tick {record.identity.start_ticks}), state {seen.stat.state}, {tag}"


def _progress(seen: Seen, policy: Policy) -> str:
    reading = seen.reading
    limit_s = deadline_s(seen, policy)
    # Every process begins as if it had just moved; some have no loop that could go on.
    if reading is None or (limit_s is None and reading.counter == 0):
        return "shows none yet; it is not judged by it"
    still_s = time.monotonic() - reading.at_s
    text = f"phase {reading.phase!r}, {reading.counter} pieces, the last one {still_s:.1f} s ago"
    if limit_s is None:
        return f"{text}; this phase may take any time"
    ended = "is told" if seen.record.role in NEVER_ENDED else "counts as hung"
    return f"{text}; {ended} after {limit_s:.0f} s"


def _memory(seen: Seen, policy: Policy) -> str:
    uss, rss = uss_mb(seen.record.pid), rss_mb(seen.record.pid)
    if seen.gone or uss is None or rss is None:
        return "unknown"
    limit = seen.record.limits.get("memory_mb")
    growth = seen.record.limits.get("leak_mb_per_h", policy.leak_mb_per_h)
    wait_s = seen.record.limits.get("memory_s", 0.0)
    told = "is told" if seen.record.role in NEVER_ENDED | LEAKS_TOLD else "recycled"
    most = "no limit" if limit is None else f"at most {limit:.0f} MB, after {wait_s:.0f} s above that it is recycled"
    return (
        f"{uss:.0f} MB of its own ({most}; {rss:.0f} MB with what it shares, which does not count); {told} if that "
        f"grows by more than {growth:.0f} MB an hour over {policy.leak_window_s / 60:.0f} minutes"
    )


def _verdict(record: Record, decisions: tuple[Decision, ...]) -> str:
    mine = [one for one in decisions if one.record is not None and one.record.tag == record.tag]
    if not mine:
        return "well: no rule applies"
    return "; ".join(f"{one.kind} -> {one.action}: {one.why}" for one in mine)


def _stranger(pid: int, seen: tuple[Seen, ...]) -> list[str]:
    if read_stat(pid) is None:
        return [f"there is no process {pid}, and none is registered under that pid"]
    tag = (environ(pid) or {}).get(TAG_VARIABLE)
    owner = next((one.record for one in seen if tag is not None and one.record.tag == tag), None)
    words = command_line(pid)[:100]
    if owner is None:
        return [f"process {pid} ({words}) is not registered by clawq: the watchdog never touches it"]
    return [f"process {pid} ({words}) was started by {owner.name}, and ends with that; by itself it is not judged"]


def _earlier(pid: int, registry: Registry) -> list[str]:
    lines = [_told(line) for line in Audit(registry.folder).lines() if line.get("pid") == pid]
    ended = [one for one in registry.deaths() if one.pid == pid and one.boot == boot_id()]
    lines += [f"{one.role} {one.place} ended {_ago(one.at_s)}: {(one.how.splitlines() or ['?'])[0]}" for one in ended]
    return [f"  {'earlier':<11}{line}" for line in lines[-_EARLIER:]]


def _ago(at_s: float) -> str:
    for_s = time.monotonic() - at_s
    return f"{for_s:.0f} s ago" if for_s < 120.0 else f"{for_s / 60.0:.0f} minutes ago"


def _told(line: Mapping[str, Any]) -> str:
    report = f"; report: {line['report']}" if line.get("report") else ""
    return f"{line['time']} {line['kind']} -> {line['action']}: {line['why']} ({line['result']}{report})"


__all__ = ["explain", "overview"]
