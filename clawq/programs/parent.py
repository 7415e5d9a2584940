"""An exec'ed actor's line to the worker that started it: newline-separated JSON over one inherited socket.

    worker → actor   {"op":"lease", ...}   {"op":"end"}   {"op":"retire"}
    actor → worker   {"event":"ready"}  {"event":"progress", ...}  {"event":"done", ...}  {"event":"failed", ...}

A thread of its own reads, so that the worker's death is noticed at once even inside a simulator: EOF ends the process
there and then. Progress is sent at most every 0.5 s, and only when there was some.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clawq import progress
from clawq.errors import ClawqError
from clawq.json_text import parse_json

#: Environment variable with the number of the inherited socket.
CONTROL_FD_VARIABLE = "CLAWQ_CONTROL_FD"
#: Least time between two progress messages of the same phase, seconds.
PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """What a lease asks for.

    Attributes:
        run: {"id", "tag", "config", "spec"}.
        slot: name of the slot.
        worker: host and worker, for people.
        data_url: the data Redis.
        seconds: how long to act.
    """

    run: Mapping[str, Any]
    slot: str
    worker: str
    data_url: str
    seconds: float

    @property
    def place(self) -> tuple[str, str, str]:
        """What an actor is built for: run, slot and Redis."""
        return str(self.run["tag"]), self.slot, self.data_url


class Parent:
    """The worker's end of the line, as the actor sees it.

    Args:
        sock: connected to the worker.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._orders: queue.SimpleQueue[LeaseOrder | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._shown: tuple[str, float] = ("", 0.0)
        self._mine = progress.mine()
        #: Set while the running lease shall end early.
        self.end = threading.Event()
        #: Set once this actor shall end between two fragments, when all is sent.
        self.retire = threading.Event()
        #: Set once the process shall end.
        self.leaving = threading.Event()

    @classmethod
    def connect(cls) -> "Parent":
        """The worker that the environment names; KeyError if there is none."""
        parent = cls(socket.socket(fileno=int(os.environ[CONTROL_FD_VARIABLE])))
        threading.Thread(target=parent._read, name="parent", daemon=True).start()
        return parent

    def next_lease(self, timeout_s: float | None = None) -> LeaseOrder | None:
        """The next lease; None on timeout or when the process shall end."""
        try:
            return self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def leave(self) -> None:
        """End the running lease and then the process (safe in a signal handler)."""
        self.leaving.set()
        self.end.set()
        self._orders.put(None)

    def ready(self) -> None:
        """The process is up."""
        self._send({"event": "ready"})

    def progress(self, phase: str, env_steps: int) -> None:
        """Some real progress was made: shown to the watchdog each time, told to the worker now and then."""
        self._mine.moved(phase)
        if self._mine.stop_wanted and not self.leaving.is_set():
            self.leave()
        shown_phase, shown_s = self._shown
        now_s = time.monotonic()
        if phase != shown_phase or now_s - shown_s >= PROGRESS_S:
            self._shown = (phase, now_s)
            self._send({"event": "progress", "phase": phase, "env_steps": env_steps})

    def done(self, report: Mapping[str, Any]) -> None:
        """The lease is over."""
        self._mine.moved("idle")
        self._shown = ("", 0.0)
        self._send({"event": "done", "report": dict(report)})

    def failed(self, error: BaseException, broken_off: int = 0) -> None:
        """This process cannot go on; so many episodes were under way."""
        text = str(error) if isinstance(error, ClawqError) else f"{type(error).__name__}: {error}"
        self._send({"event": "failed", "kind": type(error).__name__, "error": text, "broken_off": broken_off})

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._sock.sendall(line)
        except OSError:
            os._exit(0)  # nobody is there any more

    def _read(self) -> None:
        try:
            with self._sock.makefile("rb") as lines:
                for line in lines:
                    self._receive(parse_json(line))
        except (OSError, ValueError, KeyError, TypeError):
            os._exit(1)  # a worker that we cannot understand is as good as none
        os._exit(0)

    def _receive(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "end":
            self.end.set()
        elif message["op"] == "retire":
            self.retire.set()
        elif message["op"] == "lease":
            if not self.leaving.is_set():
                self.end.clear()
            fields = {name: message[name] for name in ("run", "slot", "worker", "data_url", "seconds")}
            self._orders.put(LeaseOrder(**fields))
