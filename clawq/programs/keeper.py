"""Keeps what a run needs on the broker: its entry in the registry, and a living coordinator.

The coordinator holds nothing that it could not derive again, so one that was killed is simply started again, after a
pause that doubles while it keeps ending. A broker that came back empty is told of the run again. Neither happens on the
learner's own thread; a broker that is away is waited out. Nothing is done while the run's claim is not held: another
learner may have taken the run over, and looks after it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from clawq.errors import TransportError
from clawq.spawning.spawner import Child
from clawq.transport.claims import Claim
from clawq.transport.control import RunRecord, RunRegistry

log = logging.getLogger(__name__)

#: Between two looks, seconds.
LOOK_S = 1.0
#: Longest pause before a coordinator that keeps ending is started again, seconds.
LONGEST_PAUSE_S = 30.0
#: A coordinator that lived for so long is forgiven what came before, seconds.
SETTLED_S = 60.0
#: How long the coordinator has for emptying the run's queues at the end, seconds.
GRACE_S = 1.0


class Keeper:
    """See the module's text; `close` ends the coordinator.

    Args:
        record: of the run.
        claim: on the run, held by whoever may look after it.
        broker: client of the broker.
        start: starts a coordinator, which waits for a line on its stdin.
        child: one that was started already.

    Attributes:
        child: the coordinator, None between two of them.
        restarts: how often it was started again.
    """

    def __init__(
        self, record: RunRecord, claim: Claim, broker: Any, start: Callable[[], Child], child: Child | None = None
    ) -> None:
        self._record, self._claim, self._registry, self._start = record, claim, RunRegistry(broker), start
        self._ending = threading.Event()
        self._age_s = self._pause_s = 0.0
        self.restarts = 0
        self._changed = False
        self._registry.add(record)
        self.child: Child | None = begin(child or start())
        self._thread = threading.Thread(target=self._run, name="clawq-keeper", daemon=True)
        self._thread.start()

    def update(self, record: RunRecord) -> None:
        """Register the run's record anew, soon; it is of the same session."""
        self._record, self._changed = record, True

    def close(self) -> None:
        """End the coordinator; it empties the run's queues first. Idempotent."""
        self._ending.set()
        self._thread.join(GRACE_S)
        if self.child is not None:
            self.child.end_tree(GRACE_S)

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            self._age_s += LOOK_S
            try:
                if not self._claim.is_held():
                    continue
                if self.child is None or self.child.exited():
                    self._start_again()
                if self._changed and not self._ending.is_set():
                    self._changed = False
                    self._registry.add(self._record)
                if not self._registered() and not self._ending.is_set():
                    self._registry.add(self._record)
                    log.warning("the broker did not know run %s any more; it is registered again", self._record.run_id)
            except (TransportError, OSError) as error:
                log.info("the run's coordinator and entry cannot be looked after just now: %s", error)

    def _registered(self) -> bool:
        # An entry of a learner that lost the run, and did not know it yet, counts for nothing.
        entry = self._registry.get(self._record.run_id)
        return entry is not None and entry.same_session(self._record)

    def _start_again(self) -> None:
        if self.child is not None:
            status, words = self.child.end_tree(), self.child.log.tail(3)
            self.child = None
            settled = self._age_s >= SETTLED_S
            self._pause_s = LOOK_S if settled or not self._pause_s else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._age_s = 0.0
            log.warning("the coordinator ended (status %d) and is started again\n%s", status, words)
        if self._age_s + LOOK_S >= self._pause_s:
            self.child = begin(self._start())
            self._age_s = 0.0
            self.restarts += 1


def begin(coordinator: Child) -> Child:
    """Tell a coordinator that its run is registered; returns it."""
    # One that has ended already is noticed by the next look.
    with contextlib.suppress(OSError):
        assert coordinator.stdin is not None
        coordinator.stdin.write(b"begin\n")
    return coordinator


__all__ = ["Keeper"]
