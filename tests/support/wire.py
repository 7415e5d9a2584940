"""A TCP wire that can be cut: a proxy in this process, which passes bytes on until it is told to lose them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial


class Wire:
    """Passes bytes between whoever connects and a server.

    While `lost` is set, bytes of either direction vanish without a word, as on a network that is down: neither end is
    told.

    Attributes:
        port: where it listens, on the loopback interface.
        lost: bytes vanish.
        delay_s: every piece takes so much longer, in either direction.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.lost = False
        self.delay_s = 0.0
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut everything, this time audibly."""
        for end in (self._server, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._server.accept()
                try:
                    theirs = socket.create_connection(self._target, timeout=5.0)
                except OSError:
                    ours.close()
                    continue
                theirs.settimeout(None)
                self._ends += [ours, theirs]
                for target in self._carry(ours, theirs):
                    threading.Thread(target=target, daemon=True).start()

    def _carry(self, ours: socket.socket, theirs: socket.socket) -> Iterable[Callable[[], None]]:
        """What the two threads of a connection do."""
        return partial(self._pass_on, ours, theirs), partial(self._pass_on, theirs, ours)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65_536):
                if self.delay_s:
                    time.sleep(self.delay_s)  # as slow as asked for
                if not self.lost:
                    sink.sendall(chunk)
        self._hang_up(source, sink)

    @staticmethod
    def _hang_up(*ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
