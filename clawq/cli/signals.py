"""Ctrl-C and SIGTERM: the first one stops in order, the second one at once; or both interrupt, and end tidily."""

import os
import signal
import sys
from collections.abc import Callable

from clawq.programs.stopping import Stop


def stop_on_signals(force: Callable[[], None] = lambda: None) -> Stop:
    """An event that is set by the first SIGINT or SIGTERM; a second one while that is heeded only insists.

    Args:
        force: called by the second one, before the process ends with 128 + the signal's number.
    """
    stop, under_up = Stop(), bool(os.environ.get("CLAWQ_UP"))

    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set() and not stop.insist():
            force()
            os._exit(128 + number)
        first = not stop.is_set()
        stop.set()
        if under_up:
            # Its Redis ends with `clawq up`, which has told the user, and kills what does not end soon.
            stop.insist()
        elif first:
            sys.stderr.write("stopping in order; once more to end at once\n")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


def interrupt_on_sigterm() -> None:
    """SIGTERM ends a command as Ctrl-C does: what it has half written is taken back."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
