"""The supervisor keeps one child running: real processes, with pauses and patience made short."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import outliving

from clawq.control.consumption import LOST_S, Consumption
from clawq.control.pulse import ALIVE, PULSE_PATIENCE_S, READY, Pulse
from clawq.control.supervisor import LONGEST_PAUSE_S, STEADY_S, TRIES_AT_START, Restarts

Eventually = Callable[..., None]

#: Notes each life in a file, pulses as a worker does, and leaves a grandchild in a session of its own.
CHILD = """
import os, signal, subprocess, sys, time
from clawq.control.pulse import start_pulse
mode, notes = sys.argv[1], sys.argv[2]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
pulse = start_pulse()
# As an actor: in a session of its own, with a tag of its own.
idle, tagged = [sys.executable, "-c", "import time; time.sleep(600)"], {**os.environ, "CLAWQ_CHILD": "of its own"}
grandchild = subprocess.Popen(idle, start_new_session=True, env=tagged)
if mode == "work":
    pulse.ready()
with open(notes, "a") as out:
    out.write(f"{os.getpid()} {grandchild.pid} {os.environ['CLAWQ_WORKER_RESTARTS']}\\n")
if mode == "mistake":
    sys.exit(2)
if mode == "unready":
    sys.exit(5)
time.sleep(600)
"""
SUPERVISOR = """
import sys
from clawq.control import pulse, supervisor
pulse.PULSE_S, pulse.PULSE_PATIENCE_S = 0.1, 1.5
supervisor.FIRST_PAUSE_S = supervisor.LONGEST_PAUSE_S = 0.05
sys.exit(supervisor.supervise(["supervised_child", *sys.argv[1:]], 5.0))
"""


class Supervised:
    def __init__(self, folder: Path, mode: str) -> None:
        self.notes = folder / "notes"
        (folder / "supervised_child.py").write_text(
            CHILD.replace(
                "import start_pulse", "import start_pulse\nfrom clawq.control import pulse as p\np.PULSE_S = 0.1"
            )
        )
        env = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        words = [sys.executable, "-c", SUPERVISOR, mode, str(self.notes)]
        self.process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)

    def lives(self) -> list[list[int]]:
        """Pid, grandchild's pid and number of restarts of each life."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [[int(word) for word in line.split()] for line in lines]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        words = self.process.communicate(timeout=60)[1]
        return self.process.returncode, words


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[[str], Supervised]]:
    made: list[Supervised] = []

    def start(mode: str) -> Supervised:
        made.append(Supervised(tmp_path, mode))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_child_is_started_again_and_nothing_of_the_old_is_left(
    supervised: Callable[[str], Supervised], eventually: Eventually, fault: signal.Signals
) -> None:
    one = supervised("work")
    eventually(lambda: len(one.lives()) == 1, "the first life", 60.0)
    family = [psutil.Process(pid) for pid in one.lives()[0][:2]]
    family[0].send_signal(fault)
    eventually(lambda: len(one.lives()) == 2, "the second life", 60.0)
    assert outliving(family, 2.0) == [], "the grandchild too, which was in a session of its own"
    family = [psutil.Process(pid) for pid in one.lives()[1][:2]]
    assert [life[2] for life in one.lives()] == [0, 1]
    status, words = one.end()
    assert status == 0
    assert "killed by signal 9" in words
    assert outliving(family, 2.0) == []


def test_a_mistake_is_not_tried_again_and_a_child_that_never_gets_ready_is_given_up(
    supervised: Callable[[str], Supervised],
) -> None:
    mistaken = supervised("mistake")
    assert mistaken.wait()[0] == 2
    assert len(mistaken.lives()) == 1
    mistaken.notes.unlink()
    hopeless = supervised("unready")
    status, words = hopeless.wait()
    assert status == 5
    assert len(hopeless.lives()) == TRIES_AT_START
    assert "given up" in words


def test_pauses_double_up_to_a_bound_and_a_steady_life_forgives() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(1.0) for _ in range(9)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert restarts.pause_s(STEADY_S) == 0.5
    assert restarts.count == 10


def test_silence_is_judged_only_by_who_was_awake() -> None:
    pulse = Pulse(0.0)
    assert not pulse.silent(100.0), "it may still import"
    pulse.beat(ALIVE, 100.0)
    assert not pulse.ready
    pulse.beat(ALIVE + READY, 101.0)
    assert pulse.ready
    looks: list[Any] = [101.0 + k for k in range(int(PULSE_PATIENCE_S) + 1)]
    assert not any(pulse.silent(now_s) for now_s in looks)
    # The judge slept for an hour: what came meanwhile has yet to be read
    assert not pulse.silent(4000.0)
    assert not pulse.silent(4001.0)
    assert [pulse.silent(4001.0 + k) for k in range(1, 20)][-1]


def test_a_consumer_is_lost_when_it_takes_nothing_at_one_look_after_the_other() -> None:
    judge = Consumption()
    assert not any(judge.look(now_s, 3, True, 7) for now_s in range(int(LOST_S) + 1))
    assert judge.look(LOST_S + 2.0, 3, True, 7)
    # Each of these shows that it is not
    for waiting, free, received in ((0, True, 7), (3, False, 7), (3, True, 8)):
        judge = Consumption()
        judge.look(0.0, 3, True, 7)
        judge.look(1.0, 3, True, 7)
        judge.look(LOST_S, waiting, free, received)
        assert not judge.look(LOST_S + 3.0, 3, True, received)
    judge.look(100.0, 3, True, 9)
    judge.forget()
    assert not judge.look(200.0, 3, True, 9)
