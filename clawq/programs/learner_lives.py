"""The learner of a local run, life after life: one that was killed goes on from its last checkpoint.

    killed by a signal              the kernel's OOM killer, a kill -9, a crash in native code: resumed
    ended by the watchdog           it hung (its progress file says who asked): resumed
    ended by itself                 finished, stopped, or an error of its own, which it would meet again: over
    told to end (SIGTERM, SIGINT)   somebody's wish: over
    came to nothing                 so many short lives, or without a new checkpoint, in a row: given up, with how the
                                    first of them ended

It is resumed after a pause that doubles with each such life, and not before its claim on the run is free: the watchdog
gives that back when it has seen it dead, and one that was killed holds none (`clawq.transport.claims`).
"""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clawq import progress
from clawq.registry import Registry
from clawq.spawning.backoff import backoff_s
from clawq.spawning.failure import how_it_ended
from clawq.spawning.spawner import Child
from clawq.watchdog.audit import Audit
from clawq.watchdog.fence import SEIZED_S

#: Lives in a row that came to nothing after which it is given up.
TRIES = 4
#: A shorter life came to nothing even if it wrote a checkpoint: one that dies each minute is not well, seconds.
STEADY_S = 60.0
#: Pauses before it is resumed, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
#: A claim that is held for longer than this after its end, seconds, is not its own, nor the watchdog's who ended it.
CLAIM_S = SEIZED_S + 10.0
#: Signals by which somebody tells it to end, before it can heed them in order.
_WISHES = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class _End:
    """How a life ended.

    Attributes:
        tag: of its process.
        by_watchdog: whether the watchdog asked it to end.
        how: in words.
        log_tail: the end of its log.
    """

    tag: str
    by_watchdog: bool
    how: str
    log_tail: str

    def words(self) -> str:
        """How it ended, and why; what the watchdog has to say is written a moment after the end itself."""
        if not self.by_watchdog:
            return f"the learner {self.how}"
        told = Audit(Registry().folder).lines()
        lines = [line for line in told if line.get("tag") == self.tag and line.get("ended")]
        if not lines:
            return "the watchdog ended the learner"
        report = lines[-1].get("report")
        return f"the watchdog ended the learner: {lines[-1]['why']}" + (f" (its stacks: {report})" if report else "")


class LearnerLives:
    """See the module's text.

    Args:
        start: starts it; told whether to resume the run or to begin it.
        resume: whether the first one resumes.
        folder: of the run.
        claimed: whether somebody holds the run's claim.
        say: tells people.

    Attributes:
        child: the present one, or the last one.
        given_up: whether there is no sense in another one.
    """

    given_up = False

    def __init__(
        self,
        start: Callable[[bool], Child],
        resume: bool,
        folder: Path,
        claimed: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._start, self._folder, self._claimed, self._say = start, folder, claimed, say
        self._fruitless, self._newest = 0, ""
        #: How the last life ended, and the first one of those in a row that came to nothing.
        self._last = self._first = _End("", False, "has not ended", "")
        #: When the next life begins, and until when its claim is waited for; None while it lives.
        self._due_s: float | None = None
        self._latest_s = 0.0
        self.child = self._begin(resume)

    def over(self, wait_s: float) -> bool:
        """Wait for so long at the most; whether the learner has ended for good."""
        if self._due_s is None:
            return self.child.wait_exit(wait_s) and not self._look_on()
        time.sleep(wait_s)
        now_s = time.monotonic()
        if now_s >= self._due_s and (now_s >= self._latest_s or not self._claimed()):
            self._due_s = None
            from_where = f"from {self._newest}" if self._newest else "anew: it had written no checkpoint"
            self._say(f"{self._last.words()}; it goes on {from_where}")
            # Before its first breath there is nothing to resume.
            self.child = self._begin((self._folder / "run.json").is_file())
        return False

    def hear_out(self, timeout_s: float) -> None:
        """Pass on the rest of what it said."""
        self._speech.join(timeout_s)

    def _begin(self, resume: bool) -> Child:
        self._newest, self._begun_s = self._newest_checkpoint(), time.monotonic()
        child = self._start(resume)
        self._speech = threading.Thread(target=pass_on, args=(child, self._say), name="clawq-speech", daemon=True)
        self._speech.start()
        return child

    def _look_on(self) -> bool:
        """It has ended; whether it will be resumed."""
        child = self.child
        reading = progress.read(Registry().progress_file(child.tag))
        by_watchdog = reading is not None and reading.stop_wanted
        self.hear_out(2.0)
        status = child.end_tree()
        if not by_watchdog and (status >= 0 or status in _WISHES):
            return False
        self._last = _End(child.tag, by_watchdog, how_it_ended(status, child.ooms)[1], child.log.tail(_TAIL_LINES))
        newest, lived_s = self._newest_checkpoint(), time.monotonic() - self._begun_s
        steady = newest != self._newest and lived_s >= STEADY_S
        self._fruitless, self._newest = 0 if steady else self._fruitless + 1, newest
        if self._fruitless == 1:
            self._first = self._last
        if self._fruitless >= TRIES:
            self.given_up = True
            self._say(
                f"the learner came to nothing {TRIES} times in a row (its last checkpoint: {newest or 'none'}) and is "
                f"given up. The first time {self._first.words()}\n{self._first.log_tail}".rstrip()
            )
            return False
        wait_s, now_s = backoff_s(max(1, self._fruitless), FIRST_PAUSE_S, LONGEST_PAUSE_S), time.monotonic()
        self._due_s, self._latest_s = now_s + wait_s, now_s + CLAIM_S
        self._say(f"the learner {self._last.how}; it will be resumed")
        return True

    def _newest_checkpoint(self) -> str:
        # By name: only torch could read them, and this process does without.
        return max((path.name for path in self._folder.glob("checkpoints/step-*.ckpt")), default="")


def pass_on(child: Child, say: Callable[[str], None]) -> None:
    """Pass on, line by line, what a child prints."""
    assert child.stdout is not None
    with suppress(ValueError, OSError):
        for line in child.stdout:
            say(line.decode(errors="replace").rstrip())


__all__ = ["TRIES", "LearnerLives"]
