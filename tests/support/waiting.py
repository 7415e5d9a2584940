"""Waiting for what others do, with a deadline."""

import threading
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; fail with `what` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.01)  # the interval of looking, not a guess at how long it takes


class Until(threading.Event):
    """A stop flag that is set as soon as something holds; fails the test, with `describe`, if it never does."""

    def __init__(
        self, condition: Callable[[], bool], timeout_s: float = 50.0, describe: Callable[[], str] = lambda: ""
    ) -> None:
        super().__init__()
        self._condition, self._timeout_s, self._describe = condition, timeout_s, describe
        self._deadline_s = time.monotonic() + timeout_s

    def is_set(self) -> bool:
        if super().is_set() or self._condition():
            return True
        assert time.monotonic() < self._deadline_s, f"waited {self._timeout_s:.0f} s in vain {self._describe()}"
        return False
