"""Actors that are replaced on purpose: nothing that they made is lost, and what broke off is counted."""

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from clawq.registry import Registry
from clawq.transport.codec import peek_meta
from clawq.transport.control import RunRecord
from clawq.transport.stream import PAYLOAD_FIELD
from clawq.types import FragmentMeta
from clawq.watchdog.audit import Audit
from clawq.watchdog.daemon import Watchdog
from clawq.watchdog.policy import Policy

if TYPE_CHECKING:
    from tests.integration.conftest import Bench


def metas(bench: "Bench", run: RunRecord) -> list[FragmentMeta]:
    """The headers of all fragments of a run."""
    data: Any = bench.data
    slots = sorted({slot for slot, _ in bench.entries(run)})
    return [peek_meta(fields[PAYLOAD_FIELD]) for slot in slots for _, fields in data.xrange(run.keys.stream(slot))]


def test_an_actor_that_made_its_fragments_or_whose_simulator_fails_gives_way_and_loses_none(bench: "Bench") -> None:
    recycled = bench.run("recycled", actors={"fragment_s": 0.05, "recycle": {"fragments": 4}})
    fault = {"kind": "simulator", "at": 60, "once_file": str(bench.folder / "lost")}
    broken = bench.run("broken", {"fault": fault}, actors={"fragment_s": 0.05})
    worker = bench.worker()
    while "recycled" not in [event.facts["reason"] for event in bench.events(recycled, "lease")]:
        one_lease(bench, recycled, 0.5)
    one_lease(bench, recycled, 0.2)
    [event] = bench.wait_events(recycled, "actor_recycled")
    assert event.facts["why"] == "fragments"
    assert event.facts["broken_off"] == 2, "both envs of the actor were in an episode"
    reports = [event.facts for event in bench.events(recycled, "lease")]
    assert [report["reason"] for report in reports][-2:] == ["recycled", "lease_over"]
    assert event.facts["made"] == sum(report["fragments"] for report in reports[:-1]) >= 4
    bench.wait_for(lambda: len(bench.entries(recycled)) == sum(r["fragments"] for r in reports), "every fragment")
    # The same slot, with as many envs, of another actor
    assert len({meta.slot for meta in metas(bench, recycled)}) == 1
    assert {meta.envs for meta in metas(bench, recycled)} == {2}
    assert len({meta.life for meta in metas(bench, recycled)}) == 2

    # A simulator that fails takes nothing with it: 59 steps of 2 envs were taken before.
    bench.lease(broken, 30.0)
    [failure] = bench.wait_events(broken, "actor_failed")
    assert failure.facts["reason"] == "simulator"
    assert "the simulator is lost" in failure.facts["error"]
    assert failure.facts["broken_off"] == 2
    steps = Counter[int]()
    for meta in metas(bench, broken):
        steps[meta.life] += meta.steps * meta.envs
    assert list(steps.values()) == [59 * 2]
    # Longer than the back-off of the slot.
    bench.lease(broken, 2.0)
    bench.wait_events(broken, "lease")
    assert worker.stop(timeout_s=60.0)[0] == 0


def one_lease(bench: "Bench", run: RunRecord, seconds: float) -> None:
    """Send a lease and wait for its end."""
    before = len(bench.events(run, "lease"))
    bench.lease(run, seconds)
    bench.wait_events(run, "lease", before + 1, timeout_s=60.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_C15_a_leaking_actor_is_recycled_between_fragments_once_per_cool_down(bench: "Bench", pool: str) -> None:
    run = bench.run(
        "leaking",
        {"step_s": 0.02, "fault": {"leak_bytes": 2_000_000}},
        actors={"fragment_s": 0.1, "recycle": {"memory_mb": 500, "cooldown_s": 3600}},
    )
    worker = bench.worker(pool, supervised=True)
    began_s = time.monotonic()
    while not bench.events(run, "actor_recycled"):
        assert time.monotonic() - began_s < 600.0
        one_lease(bench, run, 5.0)
    [event] = bench.events(run, "actor_recycled")
    assert event.facts["why"] == "memory"
    assert event.facts["memory_mb"] >= 500
    assert event.facts["broken_off"] == 2
    # The next one leaks as well, far beyond the limit, and stays: the cool-down has not passed.
    for _ in range(4):
        one_lease(bench, run, 3.0)
    assert len(bench.events(run, "actor_recycled")) == 1
    made = sum(event.facts["fragments"] for event in bench.events(run, "lease"))
    bench.wait_for(partial(_sent, bench, run, made), "every fragment")
    assert {meta.envs for meta in metas(bench, run)} == {2}
    for epoch in {meta.epoch for meta in metas(bench, run)}:
        seqs = [meta.seq for meta in metas(bench, run) if meta.epoch == epoch]
        assert seqs == list(range(1, len(seqs) + 1))
    assert worker.stop(timeout_s=60.0)[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_R13_a_leak_of_5_mb_a_second_without_a_limit_is_recycled_by_the_watchdog_and_loses_no_fragment(
    bench: "Bench",
) -> None:
    # Given an actor that no limit of its own bounds, and a watchdog that needs seconds for what takes it minutes
    options = {"step_s": 0.02, "fault": {"leak_bytes": 100_000}}
    run = bench.run("creeping", options, actors={"fragment_s": 0.1}, watchdog={"leak_mb_per_h": 3000})
    worker = bench.worker(supervised=True)
    registry = Registry()
    policy = Policy(leak_window_s=6.0, leak_samples=10, leak_mb_per_h=1e9)
    watchdog, audit = Watchdog(registry, policy, memory_s=0.5), Audit(registry.folder)
    one_lease(bench, run, 0.5)
    [actor] = worker.actors()
    bench.lease(run, 60.0)
    # When it looks once a second
    deadline_s = time.monotonic() + 60.0
    while not (ended := [line for line in audit.lines() if line.get("ended") and line["pid"] == actor.pid]):
        assert time.monotonic() < deadline_s
        watchdog.turn()
        time.sleep(policy.period_s)
    # Then it is let go, with all that it had
    assert (ended[0]["kind"], ended[0]["action"]) == ("leaking", "recycle")
    assert ended[0]["signals"] == ["SIGTERM", "SIGCONT"], "it ended by itself"
    assert ended[0]["evidence"]["mb_per_h"] > 10_000
    reports = [event.facts for event in bench.wait_events(run, "lease", 2)]
    made = sum(report["fragments"] for report in reports)
    bench.wait_for(partial(_sent, bench, run, made), "every fragment")
    seqs = [meta.seq for meta in metas(bench, run)]
    assert seqs == list(range(1, len(seqs) + 1))
    assert bench.events(run, "actor_failed") == []
    # And its slot goes on
    one_lease(bench, run, 1.0)
    assert len({meta.life for meta in metas(bench, run)}) == 2
    assert worker.stop(timeout_s=60.0)[0] == 0


def _sent(bench: "Bench", run: RunRecord, count: int) -> bool:
    return len(bench.entries(run)) == count


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_each_end_of_a_simulator_says_what_it_was_and_what_went_with_it(bench: "Bench", pool: str) -> None:
    worker = bench.worker(pool, supervised=True)
    ends = {
        "simulator": ("simulator", "the simulator is lost"),
        "abort": ("simulator", "exited with status 86: its simulator could not go on"),
        "exit": ("died", "exited with status 3"),
        "raise": ("RuntimeError", "fault on purpose at step 60"),
    }
    for kind, (reason, words) in ends.items():
        once = str(bench.folder / kind)
        run = bench.run(kind, {"fault": {"kind": kind, "at": 60, "once_file": once}}, actors={"fragment_s": 0.05})
        bench.lease(run, 30.0)
        [failure] = bench.wait_events(run, "actor_failed", timeout_s=60.0)
        assert failure.facts["reason"] == reason
        assert words in failure.facts["error"]
        assert failure.facts["broken_off"] == 2, "both envs were in an episode"
        # All that could be sent was: an error tells, an end does not
        made = Counter[int]()
        for meta in metas(bench, run):
            made[meta.life] += meta.steps * meta.envs
        assert sum(made.values()) == 59 * 2 if kind in ("simulator", "raise") else sum(made.values()) < 60 * 2
        # And the slot works again, after its back-off
        bench.lease(run, 2.0)
        bench.wait_events(run, "lease", timeout_s=60.0)
        bench.registry.remove(run.run_id)
    assert worker.stop(timeout_s=60.0)[0] == 0
