"""A Redis that is away, as a worker tells it: at once, then once a minute, and when it is back.

A worker outlives its Redis on purpose: servers are restarted, networks come and go, and a worker that waits takes work
again within seconds, by itself. It says so, with the time and the address (never the password), and how to end it; told
to stop it is gone within seconds all the same.

One case is hopeless: servers that `clawq redis start` or a run had started on this machine, found by its state file,
are gone for good when their owner is; the next ones have another address. Then the worker ends by itself.
"""

import time
from collections.abc import Callable

from clawq.state import ServerState
from clawq.transport.urls import redact

#: How often an outage that goes on is told, seconds.
TELL_S = 60.0


class Outage:
    """Follows one server.

    Args:
        what: the server, in words.
        url: its URL.
        clock: monotonic seconds.
    """

    def __init__(self, what: str, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where, self._clock = f"the {what} Redis {redact(url)}", clock
        self._since_s: float | None = None
        self._began = ""
        self._told_s = 0.0

    def away(self, error: object) -> str | None:
        """It did not answer; what to say about it now, None if it was said lately."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = self._told_s = now_s
            self._began = time.strftime("%Y-%m-%d %H:%M:%S")
            return (
                f"{self._where} cannot be reached ({error}); the worker waits for it and tries every few seconds. "
                "SIGTERM or Ctrl-C ends the worker"
            )
        if now_s - self._told_s < TELL_S:
            return None
        self._told_s = now_s
        minutes = (now_s - self._since_s) / 60
        return (
            f"{self._where} has been away for {minutes:.0f} min, since {self._began} ({error}); the worker waits for "
            "it. SIGTERM or Ctrl-C ends the worker"
        )

    def back(self) -> str | None:
        """It answered; what to say about it, None if it was never away."""
        if self._since_s is None:
            return None
        away_s, self._since_s = self._clock() - self._since_s, None
        return f"{self._where} is back, after {away_s:.0f} s"


def gone_for_good(broker_url: str) -> bool:
    """Whether the servers that this host's state file named, the broker at `broker_url` among them, have ended."""
    state = ServerState.read()
    return state is None or state.broker_url != broker_url


__all__ = ["TELL_S", "Outage", "gone_for_good"]
