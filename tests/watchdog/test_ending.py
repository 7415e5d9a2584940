"""What the watchdog ends, and what it must not touch, with real processes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from clawq.errors import ClaimLost, StreamRejected
from clawq.procfs import Identity, read_stat
from clawq.programs.notices import Notices
from clawq.registry import Record
from clawq.transport.claims import Claim, holder_of
from clawq.transport.control import Board, Events
from clawq.transport.stream import StreamWriter
from clawq.watchdog.ending import Ending, Outcome
from clawq.watchdog.policy import Policy
from clawq.watchdog.snapshot import Decision

if TYPE_CHECKING:
    from clawq.transport.keys import RunKeys
    from clawq.transport.server import EmbeddedRedis
    from tests.watchdog.conftest import Kennel

Alive = Callable[[int], bool]
Eventually = Callable[..., None]
IDLE = "mine.moved('step'); print('ready', flush=True); time.sleep(600)"
DEAF = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {IDLE}"


def end(kennel: "Kennel", quick: Policy, record: Record) -> Outcome:
    return Ending(kennel.registry, quick).end(Decision("hung", "end", "no progress", record, {"still_s": 9.0}))


def tells_who_holds(data_url: str, key: str) -> str:
    """Of a child that holds `slot:a`, and prints at SIGTERM who holds that claim then."""
    return f"""
def on_term(number, frame):
    from clawq.transport.claims import holder_of
    from clawq.transport.client import connect
    print(holder_of(connect({data_url!r}), {key!r}), flush=True)
    raise SystemExit
signal.signal(signal.SIGTERM, on_term)
mine.holds('slot:a')
{IDLE}"""


def test_one_that_is_ours_is_killed_with_its_evidence_kept(kennel: "Kennel", quick: Policy, alive: Alive) -> None:
    deaf = DEAF.replace("time.sleep(600)", "").replace("; ", "\n    ")
    child = kennel.child(f"def spinning():\n    {deaf}\n    while True: pass\nspinning()")
    outcome = end(kennel, quick, kennel.record(child))
    assert (outcome.ended, outcome.dead) == (True, True)
    assert outcome.signals == ("SIGTERM", "SIGCONT", "SIGKILL"), "one that ignores SIGTERM gets SIGKILL"
    assert not alive(child.pid)
    assert outcome.report is not None
    assert "spinning" in (outcome.report / "stack.txt").read_text()
    assert json.loads((outcome.report / "decision.json").read_text())["evidence"] == {"still_s": 9.0}
    assert "State" in (outcome.report / "proc.txt").read_text()


def test_one_that_ends_when_asked_is_not_killed(kennel: "Kennel", quick: Policy, alive: Alive) -> None:
    child = kennel.child(IDLE)
    assert end(kennel, replace(quick, grace_s=5.0), kennel.record(child)).signals == ("SIGTERM", "SIGCONT")
    assert not alive(child.pid)


def test_a_stopped_process_dies(kennel: "Kennel", quick: Policy, alive: Alive, eventually: Eventually) -> None:
    child = kennel.child(DEAF)
    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: getattr(read_stat(child.pid), "state", "") == "T", "it to be stopped")
    assert end(kennel, quick, kennel.record(child)).dead
    assert not alive(child.pid)


def test_a_grandchild_in_a_session_of_its_own_is_found_by_the_tag(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    start = "child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid, flush=True)"
    child = kennel.child(f"{start}; time.sleep(600)")
    grandchild = int(child.words[0])  # type: ignore[attr-defined]
    other = kennel.child(IDLE)
    assert end(kennel, quick, kennel.record(child)).dead
    assert not alive(grandchild)
    assert alive(other.pid), "another child is none of this"


def test_a_grandchild_without_the_tag_is_found_by_the_session(kennel: "Kennel", quick: Policy, alive: Alive) -> None:
    start = "child = subprocess.Popen(['sleep', '600'], env={}); print(child.pid, flush=True)"
    child = kennel.child(f"{start}; time.sleep(600)")
    assert end(kennel, quick, kennel.record(child)).dead
    assert not alive(int(child.words[0]))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        ({"start_ticks": 1}, "refused|verified"),
        ({"boot": "another"}, "refused|verified"),
        ({"uid": 65534}, "refused"),
    ],
)
def test_R1_a_reused_pid_another_boot_and_another_user_are_left_alone(
    kennel: "Kennel", quick: Policy, alive: Alive, forged: dict[str, Any], why: str
) -> None:
    stranger = kennel.stranger()
    real = Identity.of(stranger.pid)
    assert real is not None
    record = Record("ab" * 16, replace(real, **forged), "actor", limits={"step": 0.1})
    outcome = end(kennel, quick, record)
    assert outcome.signals == ()
    assert any(word in outcome.result for word in why.split("|"))
    assert alive(stranger.pid)


def test_R1_R6_one_without_its_tag_or_with_a_foreign_one_is_refused(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    for tag in (None, "cd" * 16):
        stranger = kennel.stranger(tag)
        real = Identity.of(stranger.pid)
        assert real is not None
        outcome = end(kennel, quick, Record("ab" * 16, real, "actor"))
        assert (outcome.ended, outcome.signals) == (False, ())
        assert "tag" in outcome.result
        assert alive(stranger.pid)


def test_R1_pid_1_itself_and_its_parents_are_refused(kennel: "Kennel", quick: Policy) -> None:
    for pid in (1, os.getpid(), os.getppid()):
        identity = Identity.of(pid)
        assert identity is not None
        assert end(kennel, quick, Record("ab" * 16, identity, "up", inherited=False)).signals == ()


def test_R17_the_claim_is_seized_before_and_given_back_after_and_the_run_is_told(
    kennel: "Kennel", quick: Policy, redis_servers: "EmbeddedRedis", data_client: Any, run_keys: "RunKeys"
) -> None:
    key = run_keys.claim("slot:a")
    claim = Claim.take(data_client, key, "an actor", 60.0)
    child = kennel.child(tells_who_holds(redis_servers.data_url, key))
    record = kennel.record(child, run=run_keys.tag, urls=("", redis_servers.data_url))
    outcome = end(kennel, replace(quick, grace_s=20.0), record)
    assert outcome.dead
    assert child.stdout is not None
    assert child.stdout.readline().decode().startswith("watchdog")
    assert not claim.is_held()
    assert holder_of(data_client, key) is None, "its replacement need not wait"
    [event] = Events(data_client, run_keys).last(5)
    assert (event.kind, event.facts["reason"], event.facts["pid"]) == ("reaped", "hung", child.pid)
    assert Board(data_client, run_keys).read()["workers_reaped_total/hung"] == 1.0


def test_R17_actors_that_go_with_their_worker_are_fenced_and_counted_and_what_comes_late_is_refused(
    kennel: "Kennel", quick: Policy, redis_servers: "EmbeddedRedis", data_client: Any, run_keys: "RunKeys", alive: Alive
) -> None:
    urls = (redis_servers.broker_url, redis_servers.data_url)
    # The writer in this process is what the actor does when it is continued after its end was decided
    writer = StreamWriter.open(data_client, run_keys, "a", "an actor", 60.0)
    writer.send(1, b"x")
    worker, actor = kennel.child(IDLE, role="worker"), kennel.child(f"mine.holds('slot:a'); {IDLE}")
    record = kennel.record(worker, urls=urls, run=run_keys.tag)
    kennel.record(actor, urls=urls, run=run_keys.tag, parent=record.identity)
    os.kill(worker.pid, signal.SIGSTOP)
    outcome = end(kennel, quick, record)
    assert "its claim on slot:a was seized" in outcome.result
    assert not alive(actor.pid)
    # It did not die of anything that would speak against its place
    assert kennel.registry.get(actor.tag) is None
    assert kennel.registry.deaths() == []
    [event] = Events(data_client, run_keys).last(5)
    assert (event.kind, event.facts["role"], event.facts["actors"]) == ("reaped", "worker", 1)
    # Its replacement need not wait, and nothing of the old one gets in behind it
    following = StreamWriter.open(data_client, run_keys, "a", "the next", 10.0)
    following.send(1, b"y")
    with pytest.raises((ClaimLost, StreamRejected)):
        writer.send(2, b"late")
    assert data_client.xlen(run_keys.stream("a")) == 2
    # And the run counts what the actor may have taken with it
    notices = Notices(time.monotonic)
    notices.reaped(event.facts)
    assert notices.failures["actor"] == 1
    notices.reaped({**event.facts, "actors": -3})
    notices.reaped({**event.facts, "actors": "many"})
    assert notices.failures["actor"] == 1
    writer.close()
    following.close()


def test_one_that_leaks_keeps_its_claim_until_it_has_sent_what_it_has(
    kennel: "Kennel", quick: Policy, redis_servers: "EmbeddedRedis", data_client: Any, run_keys: "RunKeys"
) -> None:
    key = run_keys.claim("slot:a")
    Claim.take(data_client, key, "an actor", 60.0)
    child = kennel.child(tells_who_holds(redis_servers.data_url, key))
    record = kennel.record(child, run=run_keys.tag, urls=("", redis_servers.data_url))
    decision = Decision("leaking", "recycle", "it grows", record)
    outcome = Ending(kennel.registry, replace(quick, recycle_s=20.0)).end(decision)
    assert (outcome.signals, outcome.dead) == (("SIGTERM", "SIGCONT"), True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"an actor\n"
    # One that does not heed is fenced before it is killed
    deaf = kennel.child(f"mine.holds('slot:a'); {DEAF}")
    record = kennel.record(deaf, run=run_keys.tag, urls=("", redis_servers.data_url))
    outcome = Ending(kennel.registry, replace(quick, recycle_s=0.3)).end(replace(decision, record=record))
    assert "it did not end by itself; its claim on slot:a was seized" in outcome.result
    assert outcome.signals[-1] == "SIGKILL"
    assert holder_of(data_client, key) is None


def test_a_process_that_is_gone_takes_what_it_started_with_it(
    kennel: "Kennel", quick: Policy, alive: Alive, eventually: Eventually
) -> None:
    start = "child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid, flush=True)"
    child = kennel.child(start)
    record, stray = kennel.record(child), int(child.words[0])  # type: ignore[attr-defined]
    eventually(child.exited, "the leader to end")
    assert alive(stray)
    assert end(kennel, quick, record).dead
    assert not alive(stray)


def test_a_command_name_that_looks_like_a_stat_line_is_parsed(kennel: "Kennel") -> None:
    name = kennel.folder / ") R 1 (x"
    name.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(name), "600"])
    try:
        stat = read_stat(process.pid)
        assert stat is not None
        assert stat.ppid == os.getpid()
    finally:
        process.kill()
        process.wait()
