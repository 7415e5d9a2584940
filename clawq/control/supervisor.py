"""The supervisor of one Celery worker: it starts it again when it ends, and ends it when it hangs.

`clawq worker start` is this process; the Celery worker is its child. Whatever kills a Celery main process (the kernel's
OOM killer, a kill -9, SIGSTOP) costs a second or two: its actors die with it, whoever is left of its tree is found by
the worker's tag and ended, and the next one starts under the same name, so that slots, marks and Celery's own bindings
in Redis stay those that they were.

    ended by itself          started again after a pause of 0.5 s, doubled with each end in a row, up to 30 s
    silent                   its pulse (clawq.control.pulse) is missing: stopped or dead-locked; killed, started again
    status 0                 somebody told the child to end, and not us (a watchdog does): likewise
    a mistake of the user    (status 2, at its start) not tried again
    never got ready          `TRIES_AT_START` times in a row: given up with its last status

A worker that was once ready is tried for ever: what kills it then is the world, which gets better.

Signals: the first SIGTERM, SIGINT or SIGHUP is handed on, and the worker ends in order (clawq.control.lifecycle). A
second one, or SIGQUIT, ends everything at once: what was taken and not acknowledged is on the broker and comes again.
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clawq.control.pulse import WORKER_VARIABLE, Pulse
from clawq.spawning.backoff import backoff_s
from clawq.spawning.failure import how_it_ended
from clawq.spawning.logfile import SharedStderr
from clawq.spawning.spawner import Child, Spawner, kill_tagged, wait_readable

log = logging.getLogger(__name__)

#: Environment variable with how often the worker was started again; it is in the worker's heartbeats.
RESTARTS_VARIABLE = "CLAWQ_WORKER_RESTARTS"
#: The pause before it is started again, and the longest one, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: A worker that lived for so long starts with the first pause again, seconds.
STEADY_S = 60.0
#: Ends in a row before the worker was ever ready, after which it is given up.
TRIES_AT_START = 5
#: Status of a mistake of the user.
USER_ERROR = 2
_LOOK_S = 0.2


@dataclass(slots=True)
class Restarts:
    """When to start again.

    Attributes:
        count: how often it ended and was started again.
        in_a_row: ends without a steady life between them.
    """

    count: int = 0
    in_a_row: int = 0

    def pause_s(self, lived_s: float) -> float:
        """It ended after `lived_s`: the pause before the next start."""
        self.in_a_row = 1 if lived_s >= STEADY_S else self.in_a_row + 1
        self.count += 1
        return backoff_s(self.in_a_row, FIRST_PAUSE_S, LONGEST_PAUSE_S)


class Supervisor:
    """Keeps one child running until it is told to stop.

    Args:
        words: module and arguments of the child.
        stop_s: how long the child may take to end in order, seconds.
        clock: monotonic seconds.
    """

    def __init__(self, words: Sequence[str], stop_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._words, self._stop_s, self._clock = words, stop_s, clock
        self._tag = secrets.token_hex(16)
        self._spawner = Spawner()
        self._restarts = Restarts()
        self._child: Child | None = None
        self._told_s: float | None = None

    def run(self) -> int:
        """Supervise until told to stop, or until there is no sense in it; the exit status."""
        self._take_signals()
        ever_ready = False
        while self._told_s is None:
            status, lived_s, ready = self._life()
            ever_ready = ever_ready or ready
            if self._told_s is not None:
                # Killed by the signal itself: it had not begun.
                return 0 if status in (0, -signal.SIGTERM) else 1
            if status == USER_ERROR and not ever_ready:
                return status
            pause_s = self._restarts.pause_s(lived_s)
            if not ever_ready and self._restarts.count >= TRIES_AT_START:
                log.error("the worker ended %d times without getting ready and is given up", TRIES_AT_START)
                return max(status, 1)
            log.warning("it is started again in %.1f s", pause_s)
            self._sleep(pause_s)
        return 0

    def _life(self) -> tuple[int, float, bool]:
        """One life of the child: (exit status, seconds, whether it was ready)."""
        env = {WORKER_VARIABLE: self._tag, RESTARTS_VARIABLE: str(self._restarts.count)}
        pulse = Pulse(self._clock())
        child = self._child = self._spawner.spawn(self._words, SharedStderr(), env, control=True)
        if self._told_s is not None:
            # The signal came while there was nobody to hand it to.
            child.terminate()
        while not child.exited():
            self._listen(child, pulse)
            if self._told_s is not None and self._clock() - self._told_s > self._stop_s:
                log.error("the Celery worker did not end within %.0f s and is killed", self._stop_s)
                break
            if pulse.silent(self._clock()):
                log.error("the Celery worker shows no sign of life (stopped or dead-locked) and is killed")
                break
        status = child.end_tree()
        if self._told_s is None:
            log.warning("the Celery worker %s", how_it_ended(status, child.ooms)[1])
        # Its actors died with it, what they started perhaps not: nothing of the old lives beside the new.
        left = kill_tagged(WORKER_VARIABLE, self._tag)
        if left:
            log.warning("%d processes of the worker outlived it and were killed", left)
        self._child = None
        return status, self._clock() - pulse.started_s, pulse.ready

    def _listen(self, child: Child, pulse: Pulse) -> None:
        """Wait a little for a sign of life, or for its end."""
        assert child.control is not None
        if not wait_readable([child.control.fileno()], _LOOK_S):
            return
        signs = child.control.recv(4096)
        if signs:
            pulse.beat(signs, self._clock())
        else:
            child.wait_exit(_LOOK_S)

    def _sleep(self, pause_s: float) -> None:
        until_s = self._clock() + pause_s
        while self._told_s is None and self._clock() < until_s:
            time.sleep(_LOOK_S)

    def _take_signals(self) -> None:
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if number := getattr(signal, name, None):
                signal.signal(number, self._on_stop)
        if number := getattr(signal, "SIGQUIT", None):
            signal.signal(number, self._on_kill)

    def _on_stop(self, number: int, frame: object) -> None:
        if self._told_s is not None:
            self._on_kill(number, frame)
        self._told_s = self._clock()
        if (child := self._child) is not None and not child.exited():
            child.terminate()
            if go_on := getattr(signal, "SIGCONT", None):
                # A stopped process is told only when it goes on.
                with contextlib.suppress(OSError):
                    os.kill(child.pid, go_on)

    def _on_kill(self, number: int, frame: object) -> None:
        if (child := self._child) is not None:
            child.kill_session()
        kill_tagged(WORKER_VARIABLE, self._tag)
        os._exit(1)


def supervise(words: Sequence[str], stop_s: float) -> int:
    """Run `python -m WORDS` under a supervisor until it is told to stop; returns the exit status.

    Args:
        words: module and arguments.
        stop_s: how long it may take to end in order, seconds.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return Supervisor(words, stop_s).run()


def restarts_so_far(env: Mapping[str, str] | None = None) -> int:
    """How often the worker that this process belongs to was started again by its supervisor."""
    text = (os.environ if env is None else env).get(RESTARTS_VARIABLE, "0")
    return int(text) if text.isdecimal() else 0


__all__ = ["RESTARTS_VARIABLE", "Restarts", "Supervisor", "restarts_so_far", "supervise"]
