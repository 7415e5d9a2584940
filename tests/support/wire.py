"""A TCP wire that can be cut: a proxy in this process, which passes bytes on until it is told to lose them."""

import contextlib
import socket
import threading


class Wire:
    """Passes bytes between whoever connects and a server.

    While `lost` is set, bytes of either direction vanish without a word, as on a network that is down: neither end is
    told.

    Attributes:
        port: where it listens, on the loopback interface.
        lost: bytes vanish.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.lost = False
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
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65_536):
                if not self.lost:
                    sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
