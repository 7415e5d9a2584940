"""Which ends of a learner are followed by another life: real processes, not learners, which end as they are told."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from clawq import progress
from clawq.errors import LearnerError
from clawq.programs import learner_lives
from clawq.programs.learner_lives import TRIES, LearnerLives
from clawq.programs.local import Household
from clawq.registry import Registration, Registry
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Child, Spawner
from clawq.watchdog.audit import Audit
from clawq.watchdog.snapshot import Decision

#: Says a line, then waits to be ended.
WAITING = "import sys; print('learning', flush=True); sys.stderr.write('its own words\\n'); sys.stdin.read()"


class Owner:
    """A run folder, what was said, and how each life was begun."""

    def __init__(self, folder: Path, code: str = WAITING) -> None:
        self.folder, self.said, self.begun = folder, list[str](), list[bool]()
        self.claimed = False
        (folder / "life.py").write_text(f"{code}\n")
        (folder / "checkpoints").mkdir()
        self._spawner = Spawner()
        self.lives = LearnerLives(self._start, False, folder, lambda: self.claimed, self.said.append)

    def _start(self, resume: bool) -> Child:
        self.begun.append(resume)
        log, env = LogFile(self.folder / "life.log"), {"PYTHONPATH": str(self.folder)}
        return self._spawner.spawn("life", log, env, pipes=True, registration=Registration("learner", "r1"))

    def ready(self) -> None:
        """Wait until the present life has begun."""
        count = len(self.begun)
        while self.said.count("learning") < count and not self.lives.child.exited():
            assert not self.lives.over(0.01)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.lives.child.pid, number)

    def end(self, life: int) -> bool:
        """Wait until it is over, or until that life has begun; whether it is over."""
        while len(self.begun) < life:
            if self.lives.over(0.01):
                return True
        return False


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Owner]:
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(learner_lives, "FIRST_PAUSE_S", 0.01)
    return lambda: Owner(tmp_path)


def test_one_that_keeps_being_killed_goes_on_while_it_gets_further_and_is_given_up_with_its_first_end(
    owner: Callable[[], Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_lives, "STEADY_S", 0.0)
    one = owner()
    # Before the run has begun there is nothing to resume
    one.ready()
    one.kill()
    assert not one.end(2)
    # A long life that wrote a checkpoint is forgiven those before it
    (one.folder / "run.json").touch()
    for life in range(2, 2 + TRIES):
        (one.folder / "checkpoints" / f"step-{life:012d}.ckpt").touch()
        one.ready()
        one.kill()
        assert not one.end(life + 1), life
    assert one.begun == [False, False, *[True] * TRIES]
    assert any("goes on from step-000000000003.ckpt" in line for line in one.said)
    # And so many without one, or short ones with one, are the end
    for life in range(2 + TRIES, 2 + 2 * TRIES):
        if life == 3 + TRIES:
            monkeypatch.setattr(learner_lives, "STEADY_S", 60.0)
            (one.folder / "checkpoints" / "step-000000000099.ckpt").touch()
        one.ready()
        one.kill(signal.SIGSEGV if life == 2 + TRIES else signal.SIGKILL)
        assert one.end(life + 1) == (life == 1 + 2 * TRIES)
    assert one.lives.given_up
    assert f"nothing {TRIES} times in a row (its last checkpoint: step-000000000099.ckpt)" in one.said[-1]
    assert "given up. The first time the learner was killed by signal 11" in one.said[-1]
    assert "its own words" in one.said[-1], "the original error, not that of the last one"
    assert "Fatal Python error: Segmentation fault" in one.said[-1], "and where it crashed"
    # And `clawq up` ends with the status of that
    household = Household()
    household.learner = one.lives
    assert household.end() == LearnerError.exit_code == 4


@pytest.mark.parametrize(
    ("code", "number"),
    [("", 0), ("raise SystemExit(4)", 0), (WAITING, signal.SIGTERM)],
)
def test_what_ends_by_itself_or_by_wish_is_over(
    tmp_path: Path, owner: Callable[[], Owner], code: str, number: int
) -> None:
    one = Owner(tmp_path, code)
    if number:
        one.ready()
        one.kill(number)
    assert one.end(2)
    assert one.begun == [False]


def test_one_that_the_watchdog_ended_is_resumed_however_it_ended_once_its_claim_is_free(
    owner: Callable[[], Owner], eventually: Callable[..., None]
) -> None:
    one = owner()
    one.ready()
    child, registry = one.lives.child, Registry()
    # As the watchdog does: it asks, and writes down what it did when that is done
    progress.ask_to_stop(registry.progress_file(child.tag))
    record = registry.get(child.tag)
    assert record is not None
    assert child.stdin is not None
    child.stdin.close()
    one.claimed = True
    eventually(child.exited, "it to end in order")
    assert not any(one.lives.over(0.01) for _ in range(20))
    assert one.begun == [False], "its claim is held"
    audit = Audit(registry.folder)
    audit.note(Decision("hung", "end", "no progress for 9 s", record), "dead", ended=True, report="r/1")
    audit.note(Decision("hung", "hold", "no progress for 8 s", record), "told")
    one.claimed = False
    assert not one.end(2)
    words = "the watchdog ended the learner: no progress for 9 s (its stacks: r/1); it goes on anew: it had written no"
    assert any(words in line for line in one.said)
    one.ready()
    one.kill()
    one.lives.child.end_tree()
