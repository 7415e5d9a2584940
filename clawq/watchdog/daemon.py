"""`clawq watchdog start`: one for each host and user: look, decide, act, write it down, once a second.

A lock (flock, which ends with its holder) lets there be one: a second steps back. It holds nothing that is not on disk:
one that is started anew finds the living processes in the registry and goes on watching them. It shows its own life to
systemd and in its own progress file, and whoever runs workers on this host starts it again when it is gone
(`clawq.watchdog.keeping`).

With `dry_run` everything is looked at, decided and written down, and nobody is touched.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from clawq import progress
from clawq.errors import UserError
from clawq.registry import Registration, Registry, enrol
from clawq.watchdog.audit import Audit
from clawq.watchdog.diagnosis import diagnose
from clawq.watchdog.ending import Ending
from clawq.watchdog.notify import notify
from clawq.watchdog.policy import Policy
from clawq.watchdog.sight import MEMORY_S, Sight
from clawq.watchdog.snapshot import ENDING, Decision

log = logging.getLogger(__name__)

#: Decisions that come and go with every child that ends; not worth a line.
_COMMON = frozenset({("dead", "report"), ("orphaned", "report"), ("killed", "report"), ("stale", "forget")})


#: How often the lock is tried before another watchdog is believed in.
_TRIES = 4


class AlreadyWatched(UserError):
    """Another watchdog has this host."""


class Watchdog:
    """See the module's text.

    Args:
        registry: whose processes are watched.
        policy: the host's numbers.
        dry_run: decide and write down only.
        memory_s: between two measurements of memory, seconds.
    """

    def __init__(
        self, registry: Registry, policy: Policy | None = None, dry_run: bool = False, memory_s: float = MEMORY_S
    ) -> None:
        self._registry, self._policy, self._dry_run = registry, policy or Policy(), dry_run
        self._sight = Sight(registry, self._policy, memory_s)
        self._ending = Ending(registry, self._policy)
        self._audit = Audit(registry.folder)
        #: What the last round said, so that what goes on is written down once.
        self._told: set[tuple[str, str, str]] = set()
        self._condemned: set[str] = set(registry.unfit())
        self._looked_s = time.monotonic()

    def run(self, stop: threading.Event) -> None:
        """Watch until `stop` is set."""
        notify("READY=1")
        mine = progress.mine()
        while not stop.wait(self._policy.period_s):
            self.turn()
            mine.moved("watch")
            notify("WATCHDOG=1")
        notify("STOPPING=1")

    def turn(self) -> tuple[Decision, ...]:
        """One round; returns what was decided."""
        # From the end of the last round: what we did ourselves is no gap.
        gap_s = time.monotonic() - self._looked_s
        snapshot = self._sight.look(gap_s)
        decisions = diagnose(snapshot, time.monotonic(), self._policy)
        if any(decision.kind == "gap" for decision in decisions):
            self._sight.forget_durations()
        told = {_key(decision) for decision in decisions}
        for decision in decisions:
            self._act(decision, new=_key(decision) not in self._told)
        self._told = told
        self._keep_unfit(decisions)
        self._looked_s = time.monotonic()
        return decisions

    def _act(self, decision: Decision, new: bool) -> None:
        if decision.action in ENDING:
            self._end(decision, new)
        elif decision.action == "forget" and decision.record is not None and not self._dry_run:
            self._registry.remove(decision.record.tag)
            self._note(decision, "record removed", new)
        else:
            self._note(decision, "told", new)

    def _end(self, decision: Decision, new: bool) -> None:
        assert decision.record is not None
        if self._dry_run:
            self._note(decision, "dry run: nothing was done", new)
            return
        log.warning("%s: %s: %s", decision.name, decision.kind, decision.why)
        self._sight.killed.setdefault(decision.record.tag, time.monotonic())
        outcome = self._ending.end(decision)
        self._audit.note(
            decision, outcome.result, ended=outcome.ended, signals=outcome.signals, report=str(outcome.report or "")
        )
        log.warning("%s: %s", decision.name, outcome.result)
        if outcome.ended:
            self._audit.count(decision.kind)
        else:
            self._sight.killed.pop(decision.record.tag, None)

    def _note(self, decision: Decision, result: str, new: bool) -> None:
        if new and (decision.kind, decision.action) not in _COMMON:
            log.info("%s: %s: %s (%s)", decision.name, decision.kind, decision.why, result)
            self._audit.note(decision, result)

    def _keep_unfit(self, decisions: tuple[Decision, ...]) -> None:
        """Give up places that are flapping or held by the unkillable, and give them free when that is over."""
        if self._dry_run:
            return
        unfit = {}
        for decision in decisions:
            if decision.kind == "flapping":
                unfit[str(decision.evidence["place"])] = decision.why
            elif decision.kind == "unkillable" and decision.record is not None and decision.record.place:
                unfit[decision.record.place] = f"{decision.name}: {decision.why}"
        for place in unfit.keys() - self._condemned:
            self._registry.condemn(place, unfit[place])
        for place in self._condemned - unfit.keys():
            self._registry.pardon(place)
        self._condemned = set(unfit)


@contextlib.contextmanager
def only_watchdog(registry: Registry) -> Iterator[None]:
    """Be the one watchdog of this host; AlreadyWatched if there is one, UserError if the folder cannot be written."""
    try:
        registry.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_file(registry).open("a+")
    except OSError as error:
        raise UserError(
            f"{registry.folder} cannot be written ({error.strerror or error}); set CLAWQ_STATE_DIR"
        ) from None
    with lock:
        _lock(lock)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def lock_file(registry: Registry) -> Path:
    """What the one watchdog holds."""
    return registry.folder / "watchdog.lock"


def watchdog_pid(registry: Registry) -> int | None:
    """Pid of the host's watchdog; None if there is none."""
    try:
        with lock_file(registry).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                return int(lock.read().strip() or 0)
    except (OSError, ValueError):
        return None
    return None


def watch(policy: Policy, dry_run: bool, stop: threading.Event, memory_s: float = MEMORY_S) -> None:
    """Be this host's watchdog until `stop` is set. Raises AlreadyWatched, UserError."""
    registry = Registry()
    if not Path("/proc/self/stat").exists():
        raise UserError("the watchdog needs /proc, which this system does not have")
    with only_watchdog(registry):
        enrol(Registration("watchdog", "watchdog", {"watch": 30.0}))
        log.info("watching the processes in %s%s", registry.folder, " (dry run)" if dry_run else "")
        Watchdog(registry, policy, dry_run, memory_s).run(stop)


def _lock(lock: TextIO) -> None:
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        # Somebody may only have asked who has it (`watchdog_pid`), which takes a moment.
        time.sleep(0.05)
    lock.seek(0)
    raise AlreadyWatched(
        f"this host has a watchdog already (pid {lock.read().strip() or '?'}); `clawq watchdog status` shows what it "
        "sees, and what it would do"
    )


def _key(decision: Decision) -> tuple[str, str, str]:
    who = decision.record.tag if decision.record else str(decision.evidence.get("place", decision.evidence.get("pid")))
    return who, decision.kind, decision.action


__all__ = ["AlreadyWatched", "Watchdog", "lock_file", "only_watchdog", "watch", "watchdog_pid"]
