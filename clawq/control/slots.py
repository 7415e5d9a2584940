"""The slots of one pool process: numbered places for actors, taken by leases.

A lease takes a free slot, drives the actor there and gives the slot back; the actor lives on between leases. Which
free slot: one whose actor already serves that run, else an empty one, else the one idle for longest (its actor is
closed first: no process ever serves two runs). An actor that failed is replaced at the slot's next lease, after a
back-off that doubles with each failure in a row and is forgotten by a success; one that is worn out
(clawq.control.recycling) ends by itself and is replaced at once. An actor that had no lease for `idle_s` or whose run
is over is closed, so that neither an ended run nor a pool with more slots than leases holds simulators.

A lease that finds no slot within its own length, or five seconds, gives up and says so: the thread that it waits in is
the one in which an evaluation could run.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from clawq.control.actor_process import ActorProcess, Lease
from clawq.control.recycling import Recycler, Wear
from clawq.control.shutdown import Shutdown
from clawq.spawning.failure import Failure

_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
_LONGEST_WAIT_S = 5.0
_LOOK_S = 1.0


@dataclass(slots=True, eq=False)
class Slot:
    """One place for an actor.

    Attributes:
        name: of the slot and of its stream.
        actor: the actor process, if one lives here.
        failures: in a row.
        not_before: monotonic time before which no new actor may start here.
        idle_since: monotonic time of the last lease's end.
        wear: how much its actor has made and holds.
    """

    name: str
    actor: ActorProcess | None = None
    busy: bool = False
    failures: int = 0
    not_before: float = 0.0
    idle_since: float = field(default_factory=time.monotonic)
    wear: Wear = field(default_factory=Wear)


class Slots:
    """All slots of this process.

    Args:
        names: one for each slot.
        start_actor: makes an actor process for the slot and the run of a lease.
        shutdown: begins when the worker ends.
        idle_s: an actor without a lease for so long is closed.
        is_over: whether the run of this tag is over; asked once a second for idle actors. None = nobody can tell, or no
            lease can come, since a server is away: then they stay, with what they have yet to send, and are not idle.
        recycler: says when an actor is worn out.
    """

    def __init__(
        self,
        names: list[str],
        start_actor: Callable[[Lease], ActorProcess],
        shutdown: Shutdown,
        idle_s: float = 30.0,
        is_over: Callable[[str], bool | None] = lambda run_tag: False,
        recycler: Recycler | None = None,
    ) -> None:
        self._slots = [Slot(name) for name in names]
        self._start_actor = start_actor
        self._shutdown = shutdown
        self._idle_s, self._is_over = idle_s, is_over
        self._recycler = recycler or Recycler()
        self._freed = threading.Condition()
        threading.Thread(target=self._close_idle, name="clawq-idle-slots", daemon=True).start()

    def run_lease(self, make_lease: Callable[[str], Lease | None], run_tag: str, seconds: float) -> dict[str, Any]:
        """Take a slot, run one lease in it, give it back.

        Args:
            make_lease: the lease for a slot name, made when there is a slot; None if the run is over by then.
            run_tag: tag of the run, to find its actor again.
            seconds: length of the lease; also the longest wait for a slot, up to 5 s.

        Returns:
            The actor's report with `slot` added, or {"reason": r} with r = `no_slot`, `run_stopped` (nothing was
            done) or `worker_stopping`. One that was `recycled` says why, and its `memory_mb` and fragments in all
            (`made`).

        Raises:
            Failure: the actor failed; it is gone, and the slot waits out its back-off.
        """
        slot = self._take(run_tag, min(seconds, _LONGEST_WAIT_S))
        if slot is None:
            return {"reason": "worker_stopping" if self._shutdown.begun else "no_slot"}
        try:
            lease = make_lease(slot.name)
            if lease is None:
                return {"reason": "run_stopped"}
            report = self._drive(slot, lease, run_tag)
        except Failure as failure:
            failure.slot = slot.name
            slot.actor = None
            if failure.kind != "late":
                slot.failures += 1
                pause_s = min(_FIRST_BACK_OFF_S * 2.0 ** (slot.failures - 1), _LONGEST_BACK_OFF_S)
                slot.not_before = time.monotonic() + pause_s
            raise
        finally:
            self._give_back(slot)
        return {**report, "slot": slot.name}

    def _drive(self, slot: Slot, lease: Lease, run_tag: str) -> dict[str, Any]:
        if slot.actor is not None and not (slot.actor.alive and slot.actor.run_tag == run_tag):
            slot.actor.close()
            slot.actor = None
        wear, recycler = slot.wear, self._recycler
        if slot.actor is None:
            slot.actor = self._start_actor(lease)
            wear.renew()
        report = slot.actor.run_lease(lease, self._shutdown, lambda pid: recycler.due(wear, pid, lease.run))
        slot.failures = 0
        reason, fragments = report.get("reason"), int(report.get("fragments", 0))
        if reason == "recycled":
            report = {**report, "memory_mb": wear.memory_bytes // 1_000_000, "made": wear.fragments + fragments}
        else:
            recycler.worked(wear, fragments)
        # A run that is over needs no actor; a claim that was lost needs a new epoch. When the worker ends, so does it.
        if reason in ("recycled", "run_stopped", "claim_lost") or self._shutdown.begun:
            slot.actor.close()
            slot.actor = None
        return report

    def kill_all(self) -> None:
        """SIGKILL every actor's session now, without cleaning up. Safe in a signal handler."""
        for slot in self._slots:
            if (actor := slot.actor) is not None:
                actor.child.kill_session()

    def close(self) -> None:
        """Close all idle actors (busy ones are ended by their leases once the shutdown has begun)."""
        for slot in self._idle_ones(older_than_s=-1.0):
            self._close_actor(slot)

    @property
    def busy(self) -> int:
        """Slots that run a lease."""
        return sum(slot.busy for slot in self._slots)

    def _take(self, run_tag: str, timeout_s: float) -> Slot | None:
        deadline = time.monotonic() + timeout_s
        with self._freed:
            while not self._shutdown.begun:
                now = time.monotonic()
                ready = [slot for slot in self._slots if not slot.busy and slot.not_before <= now]
                if ready:
                    slot = min(ready, key=lambda slot: _fitness(slot, run_tag))
                    slot.busy = True
                    return slot
                if now >= deadline:
                    return None
                # Short, because neither the end of a back-off nor a shutdown notifies.
                self._freed.wait(min(0.1, deadline - now))
        return None

    def _give_back(self, slot: Slot) -> None:
        with self._freed:
            slot.busy = False
            slot.idle_since = time.monotonic()
            self._freed.notify()

    def _close_idle(self) -> None:
        while not self._shutdown.wait(_LOOK_S):
            for slot in self._idle_ones(min(_LOOK_S, self._idle_s)):
                over = None if slot.actor is None else self._is_over(slot.actor.run_tag)
                if over is None:
                    slot.idle_since = time.monotonic()
                elif over or time.monotonic() - slot.idle_since > self._idle_s:
                    self._close_actor(slot)
        self.close()

    def _idle_ones(self, older_than_s: float) -> Iterator[Slot]:
        """Idle slots with an actor, each marked busy while the caller has it."""
        for slot in self._slots:
            with self._freed:
                idle_s = time.monotonic() - slot.idle_since
                if slot.busy or slot.actor is None or idle_s <= older_than_s:
                    continue
                slot.busy = True
            try:
                yield slot
            finally:
                with self._freed:
                    slot.busy = False
                    self._freed.notify()

    def _close_actor(self, slot: Slot) -> None:
        with contextlib.suppress(OSError):
            if slot.actor is not None:
                slot.actor.close()
        slot.actor = None


def _fitness(slot: Slot, run_tag: str) -> tuple[int, float]:
    if slot.actor is not None and slot.actor.run_tag == run_tag:
        return 0, slot.idle_since
    return (1, slot.idle_since) if slot.actor is None else (2, slot.idle_since)


__all__ = ["Slot", "Slots"]
