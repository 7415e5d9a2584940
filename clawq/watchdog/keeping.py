"""Keeps a watchdog on this host: whoever runs workers or a run here looks now and then, and starts one if none runs.

One host, one watchdog: it is the child of whoever started it, and ends with that; then another one of those that keep
looking starts the next. One that hangs (its own progress stands still) is killed by its parent and replaced. With
CLAWQ_WATCHDOG=0 nobody starts any.
"""

import logging
import os
import sys
import threading
import time

from clawq import progress
from clawq.registry import Registration, Registry
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Child, Spawner
from clawq.state import state_dir
from clawq.watchdog.daemon import watchdog_pid

log = logging.getLogger(__name__)

#: Between two looks, seconds.
LOOK_S = 2.0
#: Pauses before one that keeps ending is started again, seconds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
#: A watchdog that shows no progress for so long is killed, seconds. Ending somebody may take it a while.
HUNG_S = 120.0


class WatchdogKeeper:
    """A thread that sees to it that this host has a watchdog; `close` ends ours, if it is ours.

    Args:
        spawner: starts it.
        look_s: between two looks.
    """

    def __init__(self, spawner: Spawner, look_s: float = LOOK_S) -> None:
        self._spawner, self._look_s = spawner, look_s
        self._registry = Registry()
        self._child: Child | None = None
        self._pause_s, self._not_before_s = 0.0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clawq-watchdog-keeper", daemon=True)
        if wanted():
            self._thread.start()

    def close(self) -> None:
        """Look no more, and end our watchdog. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if self._child is not None:
            self._child.terminate()
            self._child.end_tree(1.0)

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except OSError as error:
                log.warning("this host's watchdog could not be started: %s", error)
            if self._stop.wait(self._look_s):
                return

    def _look(self) -> None:
        child = self._child
        if child is not None and not child.exited():
            self._end_if_hung(child)
            return
        if child is not None:
            self._bury(child)
        if time.monotonic() >= self._not_before_s and watchdog_pid(self._registry) is None:
            self._child = self._spawner.spawn(
                ["clawq.cli.main", "watchdog", "start"],
                LogFile(state_dir() / "logs" / "watchdog.log"),
                registration=Registration("watchdog", "watchdog"),
            )

    def _bury(self, child: Child) -> None:
        status, words = child.end_tree(), child.log.tail(3)
        self._child = None
        # A second one steps back with status 0.
        if status != 0:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._not_before_s = time.monotonic() + self._pause_s
            log.warning("the watchdog ended (status %d); started again in %.0f s\n%s", status, self._pause_s, words)

    def _end_if_hung(self, child: Child) -> None:
        reading = progress.read(self._registry.progress_file(child.tag))
        still_s = 0.0 if reading is None else time.monotonic() - reading.at_s
        if still_s > HUNG_S:
            log.error("the watchdog hangs (no progress for %.0f s) and is replaced", still_s)
            child.dump_stacks()
            child.end_tree()


def wanted() -> bool:
    """Whether this host shall have a watchdog."""
    return sys.platform.startswith("linux") and os.environ.get("CLAWQ_WATCHDOG", "1") not in ("0", "no", "off", "false")


__all__ = ["WatchdogKeeper", "wanted"]
