"""The wish that a program ends: a first one, and for whoever waits for others even then, a second one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stop(threading.Event):
    """Set by the first wish.

    Attributes:
        again: set by a further wish, while something heeds that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.again = threading.Event()
        self._heeded = False

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """Meanwhile a further wish sets `again`, and ends nothing by force."""
        self._heeded = True
        try:
            yield
        finally:
            self._heeded = False

    def insist(self) -> bool:
        """A further wish came; whether somebody heeds it."""
        if self._heeded:
            self.again.set()
        return self._heeded


def wish(stop: threading.Event) -> None:
    """Somebody wants the end, for the first time or again."""
    if stop.is_set() and isinstance(stop, Stop):
        stop.insist()
    stop.set()
