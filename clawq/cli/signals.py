"""Ctrl-C and SIGTERM: the first one stops in order, the second one at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable


def stop_on_signals(force: Callable[[], None] = lambda: None) -> threading.Event:
    """An event that is set by the first SIGINT or SIGTERM.

    Args:
        force: called by the second one, before the process ends with 128 + the signal's number.
    """
    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set():
            force()
            os._exit(128 + number)
        stop.set()
        # A learner of `clawq up` is told by that, which has said so.
        if not os.environ.get("CLAWQ_UP"):
            sys.stderr.write("stopping in order; once more to end at once\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop
