"""`python -m clawq.programs.actor`: the process in which envs are stepped, driven by rollout leases over a socket.

A lease names run, slot and seconds; the actor acts for that long, reports, and keeps everything for the next lease of
the same run and slot. A lease of another run closes all and builds anew. EOF on the socket ends the process at once;
SIGTERM ends it cleanly: the fragment is finished, the outbox is sent, the slot is given back. Told to retire, it does
that too, but only once everything was sent.

When the kernel runs out of memory it takes an actor first: that costs least, and actors are what leaks.

`ready` is sent before anything heavy is imported: the imports that a lease needs depend on the lease, and the first env
step should come soon after it. torch is imported last, while the envs already run (or while there is no lease yet).
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawq.errors import UserError
from clawq.programs.parent import LeaseOrder, Parent
from clawq.spawning.logfile import log_level

if TYPE_CHECKING:
    from clawq.acting.loop import Report
    from clawq.programs.acting import ActingSession

log = logging.getLogger(__name__)

#: How long an idle actor waits for its first lease before it uses the time to import torch.
IDLE_S = 0.3
#: How long the end of a lease may wait for the outbox to be sent (the worker waits for 2 s).
DRAIN_S = 1.0
#: How long an actor that retires may take to send what it has; if Redis is away it goes on with the next lease.
RETIRE_S = 5.0
#: Reasons after which the slot is not ours any more, or not needed.
FINAL = ("run_stopped", "claim_lost")


def main() -> int:
    """Serve leases until the worker goes away; the exit status."""
    try:
        level = log_level("INFO")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    limit_threads()
    offer_to_oom_killer()
    try:
        parent = Parent.connect()
    except (KeyError, ValueError, OSError):
        log.error("an actor is started by a worker (`clawq worker start`), not by hand: CLAWQ_CONTROL_FD is not set")
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: parent.leave())
    # Ctrl-C reaches the whole terminal; the worker decides what it means for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent.ready()
    return Serving(parent).run()


class Serving:
    """The life of an actor process.

    Args:
        parent: the worker that leases us.
    """

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._session: ActingSession | None = None

    def run(self) -> int:
        """Serve leases; the exit status."""
        order = self._parent.next_lease(IDLE_S)
        if order is None and not self._parent.leaving.is_set():
            _import_while_idle()
        while not self._parent.leaving.is_set():
            order = order or self._parent.next_lease()
            if order is None:
                break
            try:
                self._parent.done(self._serve(order))
            except BaseException as error:
                return self._fail(error)
            order = None
        self._close()
        return 0

    def _serve(self, order: LeaseOrder) -> Mapping[str, Any]:
        from clawq.errors import NoSeat

        started_s = time.monotonic()
        try:
            session = self._session_for(order)
        except NoSeat as error:
            log.debug("%s", error)
            return {"reason": "no_seat", "seconds": round(time.monotonic() - started_s, 3)}
        report = session.run(order.seconds, self._parent.end.is_set, self._parent.retire.is_set)
        if report.reason == "ended" or report.reason in FINAL:
            session.drain(DRAIN_S)
        if report.reason in FINAL:
            self._close()
        facts = _facts(report, time.monotonic() - started_s)
        return facts if report.reason != "recycled" else {**facts, **self._retire(session)}

    def _retire(self, session: "ActingSession") -> dict[str, Any]:
        """Give the slot back, if all could be sent; what to report then."""
        if not session.drain(RETIRE_S):
            log.warning("this actor shall retire, but cannot send what it has; it goes on")
            return {"reason": "lease_over"}
        broken_off = session.episodes
        session.let_go()
        # The worker ends us, whatever the simulator does about being closed.
        self._parent.leave()
        return {"broken_off": broken_off}

    def _session_for(self, order: LeaseOrder) -> "ActingSession":
        if self._session is not None and self._session.place != order.place:
            self._close()
        if self._session is None:
            # Here, not at the top: `ready` must not wait for numpy, pydantic and redis.
            from clawq.programs.acting import ActingSession

            self._parent.progress("start", 0)
            self._session = ActingSession(order, self._parent.progress, self._parent.end.is_set)
        return self._session

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _fail(self, error: BaseException) -> int:
        from clawq.errors import ClawqError

        if isinstance(error, ClawqError):
            log.error("%s", error)
        else:
            log.error("the actor failed", exc_info=error)
        broken_off = 0
        try:
            # Before it is told: the end of this process begins when it is.
            if self._session is not None:
                broken_off = self._session.episodes
                self._session.let_go()
        except Exception:
            log.exception("what the actor had could not be sent")
        self._parent.failed(error, broken_off)
        try:
            self._close()
        except Exception:
            log.exception("closing failed too")
        return error.exit_code if isinstance(error, ClawqError) else 70


def limit_threads() -> None:
    """Hold every thread pool to CLAWQ_THREADS threads (default 1); before numpy or torch are imported."""
    from clawq.cores import thread_env

    for name, value in thread_env(int(os.environ.get("CLAWQ_THREADS", "1"))).items():
        os.environ.setdefault(name, value)


def offer_to_oom_killer() -> None:
    """When memory runs out, let the kernel take this process, and what it starts, before others. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _import_while_idle() -> None:
    import clawq.programs.acting  # noqa: F401
    from clawq.programs.policy_loader import use_threads

    use_threads()


def _facts(report: "Report", seconds: float) -> dict[str, Any]:
    return {
        "reason": report.reason,
        "env_steps": report.env_steps,
        "fragments": report.fragments,
        "episodes": report.episodes,
        "dropped": dict(report.dropped),
        "waited_s": {why: round(waited_s, 2) for why, waited_s in report.waited_s.items()},
        "seconds": round(seconds, 3),
    }


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Everything is closed; torch and simulators need not tidy up, which takes long and may crash or hang.
    os._exit(status)
