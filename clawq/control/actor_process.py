"""One actor process, driven over its control socket: newline-separated JSON both ways.

    worker → actor   {"op":"lease","run":{...},"slot":s,"worker":w,"data_url":u,"seconds":5.0}   {"op":"end"}
                     {"op":"retire"}                  end after the fragment at work, once everything was sent
    actor → worker   {"event":"ready"}                                       after its heavy imports
                     {"event":"progress","phase":p,"env_steps":n}            at most every 0.5 s, only by real progress
                     {"event":"done","report":{...}}   {"event":"failed","kind":k,"error":text,"broken_off":n}

SIGTERM lets it end in order; EOF tells it to exit at once. `run_lease` sends one lease and waits for its end; it ends
the lease early when the worker shuts down, and raises Failure when the actor fails, dies, hangs (no progress for the
time that its phase may take) or does not end. After a Failure the process is gone with everything that it started.

Environment, policy, outbox and claim live on in the process from lease to lease of the same run.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from clawq.control.shutdown import Shutdown
from clawq.errors import SimulatorFailed
from clawq.json_text import parse_object
from clawq.spawning.failure import SIMULATOR, Failure, how_it_ended
from clawq.spawning.spawner import Child, wait_readable

if TYPE_CHECKING:
    from clawq.config import Watchdog

_TICK_S = 0.25
#: Phases in which an actor waits for Redis, or for the learner.
_WAITING = ("send", "wait")
_MAX_LINE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each thing may take without progress before the actor counts as hung, in seconds.

    Attributes:
        start_s: from exec to `ready` (imports).
        build_s: phase `start`: making the environment and the policy.
        reset_s: phase `reset`.
        step_s: phase `step`, between two env steps (the first one may compile).
        wait_s: phases `send` and `wait`: Redis or the learner is slow, which is not the actor's fault.
        overrun_s: from the end of the lease's time to `done`, without what went by in `send` and `wait`.
        ending_s: from `end` at a shutdown of the worker to `done`.
    """

    start_s: float = 180.0
    build_s: float = 180.0
    reset_s: float = 120.0
    step_s: float = 30.0
    wait_s: float = 60.0
    overrun_s: float = 60.0
    ending_s: float = 2.0

    @classmethod
    def of_run(cls, limits: "Watchdog", stall_s: float | None) -> Self:
        """What a run allows, but for a host that names its own longest step."""
        step_s = limits.step_s if stall_s is None else stall_s
        return cls(limits.start_s, limits.start_s, limits.reset_s, step_s, limits.send_s)

    def of(self, phase: str) -> float:
        """The limit of a phase."""
        return {"exec": self.start_s, "start": self.build_s, "reset": self.reset_s, "step": self.step_s}.get(
            phase, self.wait_s
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """What one rollout task asks of an actor.

    Attributes:
        run: {"id", "tag", "config", "spec"}.
        slot: name of the slot, also of its stream.
        worker: host and Celery worker, for people.
        data_url: the data Redis.
        seconds: how long to collect.
    """

    run: Mapping[str, Any]
    slot: str
    worker: str
    data_url: str
    seconds: float

    def to_message(self) -> dict[str, Any]:
        """The JSON message."""
        return {
            "op": "lease",
            "run": dict(self.run),
            "slot": self.slot,
            "worker": self.worker,
            "data_url": self.data_url,
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class _Watch:
    """The clocks of one lease: when the actor counts as hung."""

    patience: Patience
    lease_s: float
    phase: str = "exec"
    progress_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    waited_s: float = 0.0
    ending_at: float | None = None

    def moved(self, phase: str) -> None:
        now = time.monotonic()
        self.waited_s += self._waiting_s(now)
        self.phase, self.progress_at = phase, now
        if phase not in ("start", "reset") and self.started_at is None:
            self.started_at = self.progress_at

    def trouble(self) -> tuple[str, str] | None:
        """(kind, what is wrong) if the actor must be ended now."""
        now = time.monotonic()
        if self.ending_at is not None:
            late = now - self.ending_at > self.patience.ending_s
            return ("late", "did not end in time when the worker shut down") if late else None
        limit_s = self.patience.of(self.phase)
        if now - self.progress_at > limit_s:
            return "stall", f"made no progress for {limit_s:.0f} s in phase {self.phase!r}"
        if self.started_at is None:
            return None
        acted_s = now - self.started_at - self.waited_s - self._waiting_s(now)
        if acted_s > self.lease_s + self.patience.overrun_s:
            return "overrun", f"did not end its lease of {self.lease_s:.0f} s"
        return None

    def _waiting_s(self, now: float) -> float:
        """Seconds since the last progress, if they went by in waiting for others."""
        return now - self.progress_at if self.phase in _WAITING and self.started_at is not None else 0.0


class ActorProcess:
    """One exec'ed actor, from its start to its end.

    Args:
        child: the process, with a control socket.
        run_tag: of the one run that it serves.
        patience: when it counts as hung.
        envs: how many it steps.
    """

    def __init__(self, child: Child, run_tag: str, patience: Patience, envs: int = 0) -> None:
        if child.control is None:
            raise ValueError("an actor needs a control socket")
        self.child = child
        self._socket = child.control
        self._socket.setblocking(False)
        self._patience = patience
        self._unread = b""
        self._ready = False
        self._retiring = ""
        self._envs, self._stepping = envs, False
        self.run_tag = run_tag

    def run_lease(
        self, lease: Lease, shutdown: Shutdown, worn: Callable[[int], str | None] = lambda pid: None
    ) -> dict[str, Any]:
        """Drive one lease and return the actor's report (`env_steps`, `fragments`, `episodes`, `reason`, `dropped`).

        Args:
            lease: what to do.
            shutdown: begins when the worker ends.
            worn: asked a few times a second with the actor's pid; why it shall retire, or None. One that has retired
                reports `recycled` as its reason, and why; it is ending then.

        Raises:
            Failure: it failed, died or hung; it has been ended. `kind` says how.
        """
        watch = _Watch(self._patience, lease.seconds, "start" if self._ready else "exec")
        self._send(lease.to_message())
        while True:
            if not self._retiring and (why := worn(self.child.pid)) is not None:
                self._retiring = why
                self._send({"op": "retire"})
            self._wait(watch, shutdown)
            for message in self._messages():
                event = message.get("event")
                if event == "ready":
                    self._ready = True
                    watch.moved("start")
                elif event == "progress":
                    watch.moved(str(message.get("phase", "step")))
                    self._stepping = self._stepping or watch.phase == "step"
                elif event == "done":
                    report = message.get("report")
                    report = dict(report) if isinstance(report, Mapping) else {}
                    return {**report, "why": self._retiring} if report.get("reason") == "recycled" else report
                elif event == "failed":
                    kind = str(message.get("kind", "error"))
                    kind = SIMULATOR if kind == SimulatorFailed.__name__ else kind
                    self.fail(kind, str(message.get("error", "")), 1.0, message.get("broken_off"))
            if (trouble := watch.trouble()) is not None:
                self.child.dump_stacks()
                self.fail(*trouble)
            self.child.log.trim()

    def fail(self, kind: str, text: str, grace_s: float = 0.0, broken_off: object = None) -> None:
        """End the process tree and raise Failure; the text has the end of its log."""
        self.child.end_tree(grace_s, f"{kind}: {text}")
        # Enough lines for the stacks of all threads.
        self._raise(Failure(kind, text, self.child.log.tail(60)), broken_off)

    def _raise(self, failure: Failure, broken_off: object = None) -> None:
        """Say too how many episodes went with it; if it did not say, one of each env that it had stepped."""
        if type(broken_off) is int and 0 <= broken_off <= self._envs:
            failure.broken_off = broken_off
        elif self._stepping:
            failure.broken_off = self._envs
        raise failure

    def close(self, grace_s: float = 1.0) -> None:
        """Let the actor go: SIGTERM, on which it sends what it has and gives its slot back; after `grace_s` SIGKILL."""
        if grace_s > 0:
            self.child.terminate()
            self.child.wait_exit(grace_s)
        self.child.end_tree()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self.child.exited()

    def _wait(self, watch: _Watch, shutdown: Shutdown) -> None:
        """Until something can be read, or a tick; tells the actor once when the worker ends."""
        fds = [self._socket.fileno()]
        if watch.ending_at is None:
            fds.append(shutdown.fileno())
        readable = wait_readable(fds, _TICK_S)
        if watch.ending_at is None and shutdown.fileno() in readable:
            watch.ending_at = time.monotonic()
            self._send({"op": "end"})

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.setblocking(True)
            self._socket.settimeout(5.0)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._died()
        finally:
            with contextlib.suppress(OSError):
                self._socket.setblocking(False)

    def _messages(self) -> list[dict[str, Any]]:
        """The whole lines that have arrived."""
        chunks = [self._unread]
        eof = False
        while True:
            try:
                chunk = self._socket.recv(65_536)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                eof = True
                break
            chunks.append(chunk)
        *lines, self._unread = b"".join(chunks).split(b"\n")
        messages = [message for line in lines if (message := _parse(line)) is not None]
        if eof and not any(message.get("event") in ("done", "failed") for message in messages):
            self._died()
        if len(self._unread) > _MAX_LINE_BYTES:
            self.fail("protocol", "sent a line that does not end")
        return messages

    def _died(self) -> None:
        status = self.child.end_tree(grace_s=1.0)
        self._raise(Failure(*how_it_ended(status, self.child.ooms), self.child.log.tail()))


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        return parse_object(line)
    except ValueError:
        return None


__all__ = ["ActorProcess", "Lease", "Patience"]
