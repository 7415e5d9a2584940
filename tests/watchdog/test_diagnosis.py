"""Every class of trouble and every damper, as a table: what is seen -> what is decided. No process is needed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from clawq.procfs import HOST_NAMESPACE, Identity, Stat, parse_stat
from clawq.progress import Reading
from clawq.registry import Record
from clawq.watchdog.diagnosis import diagnose, refusal
from clawq.watchdog.gpu import told
from clawq.watchdog.policy import Policy
from clawq.watchdog.slope import theil_sen
from clawq.watchdog.snapshot import GpuUse, Seen, Snapshot

NOW = 10_000.0
ME = Identity("boot", 7, 100, 1000, 501)
POLICY = Policy(courtesy_s=10.0, settle_s=10.0, defunct_s=30.0, leak_window_s=600.0, leak_samples=10, lost_s=30.0)
REDIS = ("redis://broker", "redis://data")


def identity(pid: int, **changes: Any) -> Identity:
    return replace(Identity("boot", 7, pid, 5000 + pid, 501), **changes)


PARENT = identity(200)


def record(role: str = "actor", pid: int = 300, parent: Identity | None = PARENT, **changes: Any) -> Record:
    limits = {"step": 30.0, "start": 180.0}
    made = Record(f"{pid:032x}", identity(pid), role, f"place-{pid}", parent, "ab" * 16, "", limits, REDIS)
    return replace(made, **changes)


def seen(what: Record | None = None, still_s: float = 1.0, phase: str = "step", state: str = "S", **more: Any) -> Seen:
    what = what or record()
    reading = Reading(phase, 7, NOW - still_s, works=3, worked_s=NOW - still_s)
    stat = Stat(state, 200, what.pid, what.identity.start_ticks)
    return replace(Seen(what, stat, reading), **more)


def decide(*found: Seen, policy: Policy = POLICY, **more: Any) -> list[tuple[str, str, int]]:
    snapshot = replace(Snapshot(ME, frozenset({1, 50}), found, {REDIS[1]: 9}), **more)
    decisions = diagnose(snapshot, NOW, policy)
    return [(one.kind, one.action, one.record.pid if one.record else 0) for one in decisions]


def since(condition: str, for_s: float) -> Mapping[str, float]:
    return {condition: NOW - for_s}


def grown(mb_per_h: float, minutes: int = 12) -> tuple[tuple[float, float], ...]:
    return tuple((NOW - 60.0 * (minutes - k), 400.0 + mb_per_h * k / 60.0) for k in range(minutes + 1))


#: Its worker recycles it above 300 MB, at most once in 300 s, and one at a time.
HEAVY = record(limits={"memory_mb": 300.0, "memory_s": 420.0})
WORKER = record("worker", facts={"slots": 2}, limits={"serve": 60.0})


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (seen(), []),
        # gone
        (seen(stat=None, since=since("gone", 2.0)), [("dead", "report")]),
        (seen(stat=None, since=since("gone", 11.0)), [("dead", "forget")]),
        (seen(stat=None, parent_alive=False), [("stale", "forget")]),
        (seen(record(parent=None), stat=None), [("stale", "forget")]),
        (seen(stat=None, since=since("gone", 2.0), strays=(8, 9)), [("dead", "report")]),
        (seen(stat=None, since=since("gone", 11.0), strays=(8, 9)), [("orphaned", "end")]),
        (seen(record(identity=identity(300, boot="before"))), [("stale", "forget")]),
        # of another container: its own watchdog's
        (seen(record(identity=identity(300, namespace=8)), still_s=900.0), []),
        # defunct
        (seen(state="Z", since=since("zombie", 2.0)), [("dead", "report")]),
        (seen(state="Z", since=since("zombie", 31.0), still_s=900.0), [("defunct", "report")]),
        # unkillable
        (seen(killed_s=NOW - 3.0, state="D", still_s=900.0), [("killed", "report")]),
        (seen(killed_s=NOW - 11.0, state="D"), [("unkillable", "report")]),
        # orphaned
        (seen(parent_alive=False, since=since("orphaned", 3.0)), [("orphaned", "report")]),
        (seen(parent_alive=False, since=since("orphaned", 11.0)), [("orphaned", "end")]),
        # hung: a step may take 30 s, and its worker has the first word for 10 s more
        (seen(still_s=39.0), []),
        (seen(still_s=41.0), [("hung", "end")]),
        (seen(still_s=41.0, state="T"), [("hung", "end")]),
        (seen(still_s=41.0, state="D"), [("hung", "end")]),
        (seen(still_s=180.0, phase="start"), []),
        (seen(still_s=191.0, phase="start"), [("hung", "end")]),
        (seen(still_s=9000.0, phase="idle"), []),
        (seen(still_s=9000.0, reading=None), []),
        (seen(WORKER, still_s=61.0, phase="serve"), [("hung", "end")]),
        (seen(record("up", limits={"watch": 5.0}), still_s=60.0, phase="watch"), [("hung", "report")]),
        # leaking
        (seen(memory=grown(400.0)), []),
        (seen(memory=grown(600.0)), [("leaking", "recycle")]),
        (seen(memory=grown(600.0, minutes=9)), []),
        (seen(record("learner"), memory=grown(5000.0)), [("leaking", "report")]),
        (seen(record(limits={"memory_mb": 300.0}), memory=((NOW, 301.0),)), [("leaking", "recycle")]),
        (seen(HEAVY, memory=((NOW, 301.0),), since=since("heavy", 419.0)), []),
        (seen(HEAVY, memory=((NOW, 301.0),), since=since("heavy", 421.0)), [("leaking", "recycle")]),
        (seen(HEAVY, memory=((NOW, 299.0),)), []),
        (seen(record(limits={"leak_mb_per_h": 5000.0}), memory=grown(600.0)), []),
        # lost consumer: work waits, a slot is free, nothing is taken
        (seen(WORKER, 31.0, "serve", waiting=2, since=since("idle", 31.0)), [("lost_consumer", "end")]),
        (seen(WORKER, 31.0, "serve", waiting=2, since=since("idle", 29.0)), []),
        (seen(WORKER, 1.0, "serve", waiting=2, since=since("idle", 31.0)), []),
        (seen(WORKER, 31.0, "serve"), []),
        # heartbeats are missing, work goes on: a warning only
        (seen(WORKER, 1.0, "serve", silent=True, since=since("silent", 61.0)), [("silent", "report")]),
        (seen(WORKER, 1.0, "serve", silent=True, since=since("silent", 59.0)), []),
        # R1: what must not be signalled is reported instead
        (seen(still_s=99.0, tagged=False), [("hung", "report")]),
        (seen(still_s=99.0, tagged=None), [("hung", "report")]),
        (seen(record(inherited=False), still_s=99.0, tagged=False), [("hung", "end")]),
        (seen(record(identity=identity(50)), still_s=99.0), [("hung", "report")]),
        (seen(record(identity=identity(300, uid=0)), still_s=99.0), [("hung", "report")]),
    ],
)
def test_one_process_is_judged_by_its_evidence(what: Seen, expected: list[tuple[str, str]]) -> None:
    assert [(kind, action) for kind, action, _ in decide(what)] == expected


HUNG = [seen(record(pid=300 + k), still_s=99.0) for k in range(3)]
WELL = [seen(record(pid=400 + k)) for k in range(9)]


def test_R18_nobody_is_ended_while_redis_is_away_or_has_only_just_come_back() -> None:
    for rounds, action in ((0, "hold"), (1, "hold"), (2, "end")):
        assert decide(HUNG[0], redis={REDIS[1]: rounds}) == [("hung", action, 300)]
    # Whoever uses no Redis, or another one, is judged
    assert decide(seen(record(urls=("", "")), still_s=99.0), redis={REDIS[1]: 0}) == [("hung", "end", 300)]


def test_R18_when_most_of_the_host_hangs_at_once_it_is_the_host() -> None:
    assert {action for _, action, _ in decide(*HUNG, *WELL[:2])} == {"hold"}
    assert [action for _, action, _ in decide(*HUNG[:2], *WELL[:2])] == ["end", "end"]
    # Three of three are too few to tell
    few = decide(*HUNG, policy=replace(POLICY, kills_per_minute=9))
    assert [action for _, action, _ in few] == ["end"] * 3


def test_R19_after_a_gap_of_its_own_nothing_is_judged() -> None:
    assert decide(*HUNG, gap_s=60.0) == [("gap", "hold", 0)]
    assert decide(HUNG[0], gap_s=1.9) == [("hung", "end", 300)]


def test_R21_beyond_so_many_kills_a_minute_there_is_only_alarm() -> None:
    assert [action for _, action, _ in decide(*HUNG, *WELL)] == ["end", "end", "hold"]
    assert [action for _, action, _ in decide(*HUNG, *WELL, kills=(NOW - 5.0,))] == ["end", "hold", "hold"]
    assert [action for _, action, _ in decide(*HUNG, *WELL, kills=(NOW - 61.0, NOW - 5.0))] == ["end", "hold", "hold"]
    many = [seen(record(pid=500 + k)) for k in range(40)]
    assert [action for _, action, _ in decide(*HUNG, *many)] == ["end", "end", "end"], "a tenth of them"


def test_R13_one_leaking_process_is_let_go_at_a_time() -> None:
    leaking = [seen(record(pid=300 + k), memory=grown(900.0)) for k in range(2)]
    assert [action for _, action, _ in decide(*leaking)] == ["recycle", "hold"]


def test_when_a_parent_is_ended_its_children_need_no_decision_of_their_own() -> None:
    worker = seen(replace(WORKER, identity=identity(200), parent=None), still_s=99.0, phase="serve")
    pool = seen(record("pool", pid=250, limits={"step": 9.0}), still_s=99.0)
    actor = seen(record(parent=pool.record.identity), still_s=99.0)
    assert decide(worker, pool, actor) == [("hung", "end", 200)]
    assert decide(pool, actor) == [("hung", "end", 250)]


def test_R15_a_place_that_died_too_often_is_given_up_with_its_last_error() -> None:
    snapshot = Snapshot(ME, frozenset(), (), deaths={"slot-0": (6, "RuntimeError: no GPU"), "slot-1": (5, "killed")})
    [decision] = diagnose(snapshot, NOW, POLICY)
    assert (decision.kind, decision.action, decision.evidence["place"]) == ("flapping", "report", "slot-0")
    assert "RuntimeError: no GPU" in decision.why


def test_R14_memory_of_strangers_on_a_gpu_is_told_and_nothing_more() -> None:
    held = (GpuUse(300, 0, 500.0), GpuUse(4242, 0, 9000.0))
    here = identity(300, namespace=HOST_NAMESPACE)
    snapshot = Snapshot(replace(ME, namespace=HOST_NAMESPACE), frozenset(), (seen(record(identity=here)),), gpu=held)
    [decision] = diagnose(snapshot, NOW, POLICY)
    assert (decision.kind, decision.action, decision.evidence["pid"]) == ("gpu", "report", 4242)
    # In a container NVML's pids are another namespace's: that 300 may be anybody
    container = decide(seen(), gpu=held)
    assert container == [("gpu", "report", 0)] * 2
    assert "cannot be told in a container" in diagnose(Snapshot(ME, frozenset(), (), gpu=held), NOW, POLICY)[0].why
    # NVML may not know how much
    assert told([(7, 2_000_000), (8, 2**64 - 1)], 1) == [GpuUse(7, 1, 2.0)]


def test_R10_of_a_zombie_whose_parent_hangs_the_parent_is_the_patient() -> None:
    zombie = seen(record(pid=400, parent=identity(300)), state="Z", since=since("zombie", 31.0))
    zombie = replace(zombie, stat=Stat("Z", 300, 400, 5400))
    for still_s, patient, fate in ((99.0, [("hung", "end", 300)], "is the patient"), (1.0, [], "does not reap it")):
        parent = seen(record(parent=None), still_s=still_s)
        assert decide(zombie, parent) == [("defunct", "report", 400), *patient]
        snapshot = Snapshot(ME, frozenset(), (zombie, parent), {REDIS[1]: 9})
        why = diagnose(snapshot, NOW, POLICY)[0].why
        assert "actor place-300 (pid 300)" in why
        assert fate in why


@pytest.mark.parametrize(
    ("changes", "found", "tagged", "why"),
    [
        ({}, "same", True, ""),
        ({}, "same", False, "tag"),
        ({}, "same", None, "tag"),
        ({}, "other", True, "another process now"),
        ({}, "none", True, "gone"),
        ({"pid": 1}, "same", True, "pid 1"),
        ({"pid": 0}, "same", True, "pid 1"),
        ({"pid": 100}, "same", True, "watchdog itself"),
        ({"pid": 50}, "same", True, "below it"),
        ({"boot": "before"}, "same", True, "another boot"),
        ({"namespace": 8}, "same", True, "namespace"),
        ({"uid": 0}, "same", True, "another user"),
    ],
)
def test_R1_only_what_is_registered_and_still_the_same_is_signalled(
    changes: dict[str, Any], found: str, tagged: bool | None, why: str
) -> None:
    of = record(identity=identity(**{"pid": 300, **changes}))
    now = {"same": of.identity, "other": replace(of.identity, start_ticks=1), "none": None}[found]
    answer = refusal(of, now, tagged, ME, frozenset({1, 50}))
    assert why in answer if why else answer == ""


def test_R4_a_command_name_may_hold_anything() -> None:
    rest = "4242 300 300 0 -1 4194304 1 0 0 0 1 2 3 4 20 0 1 0 987654 1000 200"
    assert parse_stat(f"17 () R 1 (x) S {rest}") == Stat("S", 4242, 300, 987654)


def test_a_jump_and_noise_are_no_slope() -> None:
    jump = [(float(k), 100.0 if k < 10 else 900.0) for k in range(30)]
    noise = [(float(k), 100.0 + (7 * k) % 5) for k in range(30)]
    assert abs(theil_sen(jump)) < 1.0
    assert abs(theil_sen(noise)) < 0.1
    assert theil_sen([(float(k), 3.0 * k) for k in range(200)]) == pytest.approx(3.0)
    assert theil_sen([(1.0, 5.0)]) == 0.0
