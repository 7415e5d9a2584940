"""The watchdog's rounds with real processes: what it finds, what it leaves alone, and what becomes of itself."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clawq.procfs import Identity
from clawq.spawning.logfile import LogFile
from clawq.transport.client import connect
from clawq.watchdog.audit import Audit
from clawq.watchdog.daemon import AlreadyWatched, Watchdog, only_watchdog, watchdog_pid
from clawq.watchdog.notify import notify
from clawq.watchdog.policy import Policy
from clawq.watchdog.snapshot import Decision

if TYPE_CHECKING:
    from clawq.transport.server import EmbeddedRedis
    from tests.watchdog.conftest import Kennel

Alive = Callable[[int], bool]
Eventually = Callable[..., None]
IDLE = "mine.moved('step'); print('ready', flush=True); time.sleep(600)"
BUSY = "print('ready', flush=True)\nwhile True:\n    mine.moved('step'); time.sleep(0.01)"
#: libc's sleep through PyDLL keeps the interpreter's lock: no other thread of that process ever runs again.
LOCKED = """
import ctypes
mine.moved('step')
print('ready', flush=True)
ctypes.PyDLL(None).sleep(600)"""
#: A heartbeat goes on while the work loop hangs in C without the lock.
BEATING = """
import ctypes, threading
def beat():
    while True:
        os.utime(__file__)
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
mine.moved('step')
print('ready', flush=True)
ctypes.CDLL(None).sleep(600)"""


def rounds(watchdog: Watchdog, until: Callable[[], bool], timeout_s: float = 20.0) -> list[tuple[str, str]]:
    """Turn after turn; what was decided."""
    decided: list[tuple[str, str]] = []
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline, decided
        decided += [(one.kind, one.action) for one in watchdog.turn()]
        time.sleep(0.05)
    return decided


def turns(watchdog: Watchdog, for_s: float) -> list[tuple[str, str]]:
    end_s = time.monotonic() + for_s
    return rounds(watchdog, lambda: time.monotonic() > end_s, for_s + 20.0)


@pytest.mark.parametrize("code", [IDLE, LOCKED, BEATING])
def test_R11_one_that_hangs_is_ended_whatever_its_threads_do(
    kennel: "Kennel", quick: Policy, alive: Alive, code: str
) -> None:
    hung, well = kennel.child(code), kennel.child(BUSY)
    watchdog = Watchdog(kennel.registry, quick)
    assert ("hung", "end") in rounds(watchdog, lambda: not alive(hung.pid))
    assert alive(well.pid), "who makes progress is left alone"
    [line] = [line for line in Audit(kennel.registry.folder).lines() if line.get("ended")]
    assert (line["kind"], line["pid"], line["signals"][0]) == ("hung", hung.pid, "SIGTERM")
    assert line["evidence"]["phase"] == "step"
    assert Path(line["report"], "stack.txt").stat().st_size > 0
    assert Audit(kennel.registry.folder).reaped() == {"hung": 1}


def test_a_dry_run_writes_down_what_it_would_do_once_and_touches_nobody(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    hung = kennel.child(IDLE)
    watchdog = Watchdog(kennel.registry, quick, dry_run=True)
    assert ("hung", "end") in turns(watchdog, 1.5)
    assert alive(hung.pid)
    lines = Audit(kennel.registry.folder).lines()
    assert [(line["kind"], line["result"].split(":")[0]) for line in lines] == [("hung", "dry run")]


def test_a_zombie_is_reported_and_never_signalled(kennel: "Kennel", quick: Policy, eventually: Eventually) -> None:
    child = kennel.child("print('ready', flush=True)")
    eventually(child.exited, "it to end")
    decided = turns(Watchdog(kennel.registry, replace(quick, defunct_s=0.2)), 0.6)
    assert set(decided) == {("dead", "report"), ("defunct", "report")}
    assert kennel.registry.get(child.tag) is not None, "its parent's to reap"


def test_a_stale_registration_is_taken_away_and_a_stray_with_it(
    kennel: "Kennel", quick: Policy, alive: Alive, eventually: Eventually
) -> None:
    code = "child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid, flush=True)"
    child = kennel.child(code)
    stray = int(child.words[0])  # type: ignore[attr-defined]
    record = kennel.record(child)
    child.end_tree = lambda *_: 0  # type: ignore[method-assign]  # a parent that was killed does not tidy up
    child._process.wait()
    dead_parent = kennel.stranger()
    gone = Identity.of(dead_parent.pid)
    dead_parent.kill()
    dead_parent.wait()
    kennel.registry.add(replace(record, parent=gone))
    assert alive(stray)
    watchdog = Watchdog(kennel.registry, quick)
    decided = rounds(watchdog, lambda: kennel.registry.get(child.tag) is None)
    assert ("orphaned", "end") in decided
    assert not alive(stray)


def test_an_orphan_is_ended_after_a_while(kennel: "Kennel", quick: Policy, alive: Alive) -> None:
    orphan = kennel.child(BUSY)
    gone = replace(kennel.record(orphan).identity, pid=2**22 - 3, start_ticks=1)
    kennel.record(orphan, parent=gone)
    decided = rounds(Watchdog(kennel.registry, quick), lambda: not alive(orphan.pid))
    assert ("orphaned", "end") in decided


def test_R19_a_watchdog_that_was_stopped_judges_nobody_by_what_it_did_not_see(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    hung = kennel.child(IDLE)
    watchdog = Watchdog(kennel.registry, replace(quick, gap_periods=0.0))
    watchdog._looked_s -= 60.0
    assert [(one.kind, one.action) for one in watchdog.turn()] == [("gap", "hold")]
    assert alive(hung.pid)


@pytest.mark.parametrize("away_s", [3.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_R18_while_redis_is_stopped_nobody_is_ended(
    kennel: "Kennel", quick: Policy, alive: Alive, own_servers: "EmbeddedRedis", away_s: float
) -> None:
    hung = kennel.child(IDLE)
    kennel.record(hung, urls=(own_servers.broker_url, own_servers.data_url))
    watchdog = Watchdog(kennel.registry, quick)
    server = own_servers.processes[1]
    server.send_signal(signal.SIGSTOP)
    decided = turns(watchdog, away_s)
    server.send_signal(signal.SIGCONT)
    assert alive(hung.pid)
    assert ("hung", "hold") in decided
    assert ("hung", "end") not in decided
    rounds(watchdog, lambda: not alive(hung.pid))


def test_R20_a_watchdog_that_is_started_anew_goes_on_with_the_living(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    first, second = (Watchdog(kennel.registry, quick) for _ in range(2))
    well, hung = kennel.child(BUSY), kennel.child(IDLE, {"step": 1.0})
    first.turn()
    rounds(second, lambda: not alive(hung.pid))
    assert alive(well.pid)
    assert len(Audit(kennel.registry.folder).kills(0.0)) == 1, "kills are remembered on disk"


def test_R21_over_its_restarts_it_kills_only_so_many_in_a_minute(kennel: "Kennel", quick: Policy, alive: Alive) -> None:
    cautious = replace(quick, kills_per_minute=1)
    hung = [kennel.child(IDLE) for _ in range(2)]
    rounds(Watchdog(kennel.registry, cautious), lambda: not all(alive(child.pid) for child in hung))
    decided = turns(Watchdog(kennel.registry, cautious), 0.5)
    assert set(decided) >= {("hung", "hold")}
    assert sum(alive(child.pid) for child in hung) == 1


def test_R20_there_is_one_watchdog(kennel: "Kennel") -> None:
    assert watchdog_pid(kennel.registry) is None
    with only_watchdog(kennel.registry):
        assert watchdog_pid(kennel.registry) == os.getpid()
        with pytest.raises(AlreadyWatched, match=f"pid {os.getpid()}"), only_watchdog(kennel.registry):
            pass
    assert watchdog_pid(kennel.registry) is None


def test_R15_a_place_that_keeps_dying_is_given_up_with_the_original_error_and_given_free_again(
    kennel: "Kennel", quick: Policy
) -> None:
    policy = replace(quick, flaps=1, flap_window_s=2.0)
    watchdog = Watchdog(kennel.registry, policy)
    child = kennel.child(IDLE)
    record = kennel.record(child)
    for _ in range(3):
        kennel.registry.bury(record, "exit status 70\nRuntimeError: the simulator has no licence")
    watchdog.turn()
    assert "no licence" in kennel.registry.unfit()[record.place]
    rounds(watchdog, lambda: kennel.registry.unfit() == {})


def leak(mb_per_s: float) -> str:
    return (
        "kept = []\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint('ready', flush=True)\n"
        f"while True:\n    mine.moved('step'); kept.append(bytearray(os.urandom(1000) * {int(mb_per_s * 50)}))\n"
        "    time.sleep(0.05)"
    )


def test_R13_a_leaking_process_is_let_go_and_one_that_shares_memory_is_not(
    kennel: "Kennel", quick: Policy, alive: Alive
) -> None:
    policy = replace(quick, leak_window_s=1.0, leak_samples=5, leak_mb_per_h=3000.0)
    leaking = kennel.child(leak(5.0))
    shared = kennel.child(
        "model = bytearray(os.urandom(1000) * 100_000)\n"
        "pids = [os.fork() for _ in range(1)]\n"
        "if pids[0]: print('ready', flush=True)\nwhile True:\n    mine.moved('step'); time.sleep(0.05)"
    )
    watchdog = Watchdog(kennel.registry, policy, memory_s=0.1)
    decided = rounds(watchdog, lambda: not alive(leaking.pid), 40.0)
    assert ("leaking", "recycle") in decided
    assert alive(shared.pid)
    [line] = [line for line in Audit(kennel.registry.folder).lines() if line.get("ended")]
    assert (line["pid"], line["signals"]) == (leaking.pid, ["SIGTERM", "SIGCONT"]), "it ended by itself when asked"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lives", [200, 1000])
def test_F18_many_lives_and_deaths_leave_nothing_behind(kennel: "Kennel", quick: Policy, lives: int) -> None:
    watchdog = Watchdog(kennel.registry, quick)
    shared = set(os.listdir("/dev/shm"))
    (kennel.folder / "brief.py").write_text("import sys; sys.stdin.read()\n")
    log, env = LogFile(kennel.folder / "brief.log"), {"PYTHONPATH": str(kennel.folder)}
    files = 0
    for number in range(lives):
        child = kennel.spawner.spawn("brief", log, env, pipes=True)
        if number % 2:
            os.kill(child.pid, signal.SIGKILL)
        child.end_tree(0.0 if number % 2 else 5.0)
        watchdog.turn()
        # The first ones open what stays open.
        files = len(os.listdir("/proc/self/fd")) if number == 20 else files
    assert len(os.listdir("/proc/self/fd")) <= files
    assert kennel.registry.records() == []
    assert not list(kennel.registry.folder.glob("*.progress"))
    assert {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("clawq-")} == set()
    assert not [line for line in Audit(kennel.registry.folder).lines() if line.get("ended")]


def test_systemd_is_told(kennel: "Kennel", quick: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not notify("READY=1")
    address = kennel.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(10.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        stop = threading.Event()
        thread = threading.Thread(target=Watchdog(kennel.registry, quick).run, args=(stop,))
        thread.start()
        heard = [systemd.recv(100) for _ in range(3)]
        stop.set()
        thread.join()
    assert heard == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_the_audit_log_is_bounded_and_survives_torn_lines(kennel: "Kennel") -> None:
    audit = Audit(kennel.registry.folder, limit_bytes=2000)
    child = kennel.child(IDLE)
    for number in range(40):
        audit.note(Decision("hung", "hold", f"number {number}", kennel.record(child)), "told")
    with audit.file.open("a") as file:
        file.write('{"torn": ')
    assert audit.lines()[-1]["why"] == "number 39"
    assert audit.file.stat().st_size + audit.file.with_name("audit.jsonl.1").stat().st_size < 6000
    assert json.loads(audit.file.read_text().splitlines()[0])["tag"] == child.tag


def test_its_own_memory_does_not_grow_with_every_look_at_redis(
    kennel: "Kennel", own_servers: "EmbeddedRedis", restart_data: Callable[["EmbeddedRedis"], None], quick: Policy
) -> None:
    urls = own_servers.broker_url, own_servers.data_url
    kennel.record(kennel.child(IDLE, {"step": 600.0}), role="worker", urls=urls)
    look = connect(own_servers.data_url)

    def connections() -> int:
        return int(look.info("stats")["total_connections_received"])

    watchdog = Watchdog(kennel.registry, quick)
    watchdog.turn()
    before = connections()
    for _ in range(20):
        watchdog.turn()
    # Each new connection has a buffer of a megabyte that only the garbage collector takes back.
    assert connections() == before
    # A server that was started again is found again.
    restart_data(own_servers)
    assert not [one for one in watchdog.turn() if one.action == "end"]
    watchdog.turn()
    assert watchdog._sight._good[own_servers.data_url] > 0
    look.close()
