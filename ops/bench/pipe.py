"""The in-process transport over one socket pair: what `ops/bench/plumbing.py` compares Redis and Celery with.

The learner process holds a `MemoryTransport` and serves it (`serve`); the actor process has a sink and a weights source
that ask over the socket (`Line`). One request and one answer at a time, each a length, a kind and raw bytes: the same
encoded fragments and the same safetensors as through Redis, with nothing else between the two processes.
"""

import json
import socket
import struct
import threading
from typing import Any

from safetensors.numpy import load, save

from clawq.core import Control, Weights
from clawq.transport.memory import MemoryTransport

_FRAME = struct.Struct("<cQI")
_ANSWER = struct.Struct("<QQQQI")
#: Kinds of requests: a fragment, the control record, newer weights.
_SEND, _POLL, _WEIGHTS = b"f", b"c", b"w"


class Line:
    """The actor's end: a core.FragmentSink and a core.WeightsSource."""

    def __init__(self, sock: socket.socket, epoch: int = 1) -> None:
        self._sock, self._epoch = sock, epoch
        self._unread = 0

    @property
    def epoch(self) -> int:
        """Always the same."""
        return self._epoch

    def send(self, seq: int, payload: Any) -> Control | None:
        """Append a fragment."""
        return self._ask(_SEND, seq, payload)

    def poll(self) -> Control | None:
        """The control record."""
        return self._ask(_POLL, 0, b"")

    def unread_bytes(self) -> int:
        """As of the last answer."""
        return self._unread

    def fetch_newer(self, than: int) -> Weights | None:
        """The head if it is newer."""
        self._sock.sendall(_FRAME.pack(_WEIGHTS, than, 0))
        version, updates, _, _, length = _ANSWER.unpack(receive(self._sock, _ANSWER.size))
        return Weights(version, load(bytes(receive(self._sock, length))), updates, {}) if length else None

    def fetch(self, version: int) -> Weights:
        """Not needed by an actor."""
        raise NotImplementedError

    def close(self, all_sent: bool = False) -> None:
        """The socket ends with the process."""

    def _ask(self, kind: bytes, number: int, payload: Any) -> Control | None:
        self._sock.sendall(_FRAME.pack(kind, number, len(payload)))
        if payload:
            self._sock.sendall(payload)
        head, stop, window, self._unread, _ = _ANSWER.unpack(receive(self._sock, _ANSWER.size))
        return Control(head, bool(stop), window, 1) if window else None


def serve(sock: socket.socket, transport: MemoryTransport, slot: str) -> threading.Thread:
    """Answer one actor from a thread until it goes away."""
    sink, weights = transport.sink(slot), transport.weights()

    def answer(kind: bytes, number: int, payload: bytes) -> None:
        if kind == _WEIGHTS:
            newer = weights.fetch_newer(number)
            blob = save(newer.arrays) if newer is not None else b""
            facts = (newer.version, newer.updates) if newer is not None else (0, 0)
            sock.sendall(_ANSWER.pack(*facts, 0, 0, len(blob)) + blob)
            return
        control = sink.send(number, payload) if kind == _SEND else sink.poll()
        shown = (control.head, control.stop, control.window_bytes) if control is not None else (0, 0, 0)
        sock.sendall(_ANSWER.pack(*shown, sink.unread_bytes(), 0))

    def run() -> None:
        try:
            # The actor numbers fragments for the epoch that it is told first.
            sock.sendall(json.dumps(sink.epoch).encode().ljust(32))
            while True:
                kind, number, length = _FRAME.unpack(receive(sock, _FRAME.size))
                answer(kind, number, bytes(receive(sock, length)))
        except (EOFError, OSError):
            sink.close()

    thread = threading.Thread(target=run, name="pipe", daemon=True)
    thread.start()
    return thread


def connect_line(sock: socket.socket) -> Line:
    """The actor's end, once the learner has told the epoch."""
    return Line(sock, int(json.loads(receive(sock, 32).decode())))


def receive(sock: socket.socket, size: int) -> bytearray:
    """Exactly so many bytes; EOFError at the end."""
    taken = bytearray(size)
    view = memoryview(taken)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return taken
