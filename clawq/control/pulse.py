"""A worker's pulse: a byte a second over a socket to the process that supervises it, and how it is judged there.

The bytes come from a thread of their own, so they say that the process runs and that its interpreter is not held by
anybody; not that it takes up work (for that see `clawq.control.consumption`).
"""

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

from clawq.spawning.spawner import CONTROL_FD_VARIABLE

#: Environment variable with the tag of a worker's whole tree: Celery's processes, actors, and what those started.
WORKER_VARIABLE = "CLAWQ_WORKER"
#: A byte of this kind says that the worker is connected; the other one only that it lives.
READY, ALIVE = b"r", b"."
#: Between two bytes, seconds.
PULSE_S = 1.0
#: A worker whose pulse is missing for so long is killed, seconds.
PULSE_PATIENCE_S = 15.0
#: Before its first pulse a worker imports; a cold network disk takes its time.
START_PATIENCE_S = 180.0


class PulseSender:
    """The worker's end; one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sign = ALIVE
        threading.Thread(target=self._run, name="clawq-pulse", daemon=True).start()

    def ready(self) -> None:
        """From now on say that the worker is connected."""
        self._sign = READY

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._sock.send(self._sign)
                time.sleep(PULSE_S)
        # The supervisor is gone. On Linux we are gone with it already; elsewhere this is how we learn.
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(slots=True)
class Pulse:
    """The supervisor's end: judges by a clock that is handed in.

    Attributes:
        started_s: when the worker was started.
        ready: it was connected.
        seen_s: when a byte came last.
        looked_s: when it was judged last.
    """

    started_s: float
    ready: bool = False
    seen_s: float | None = None
    looked_s: float | None = None

    def beat(self, signs: bytes, now_s: float) -> None:
        """Bytes came."""
        self.seen_s = now_s
        self.ready = self.ready or READY in signs

    def silent(self, now_s: float) -> bool:
        """Whether the worker must be taken for dead."""
        slept = self.looked_s is not None and now_s - self.looked_s > PULSE_PATIENCE_S / 2
        self.looked_s = now_s
        if self.seen_s is None:
            return now_s - self.started_s > START_PATIENCE_S
        if slept:
            # It was us who were stopped (or the machine): what the worker sent meanwhile has yet to be read.
            self.seen_s = now_s
        return now_s - self.seen_s > PULSE_PATIENCE_S


def start_pulse() -> PulseSender | None:
    """Begin to send, if this worker is supervised. What it starts must not take the socket for its own."""
    number = os.environ.pop(CONTROL_FD_VARIABLE, None)
    if number is None or WORKER_VARIABLE not in os.environ:
        return None
    sock = socket.socket(fileno=int(number))
    sock.set_inheritable(False)
    return PulseSender(sock)


__all__ = ["ALIVE", "PULSE_PATIENCE_S", "READY", "WORKER_VARIABLE", "Pulse", "PulseSender", "start_pulse"]
