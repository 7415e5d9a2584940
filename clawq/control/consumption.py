"""Whether a worker still takes up work: the one thing that its pulse, its heartbeats and its pid do not say.

Celery on Redis has lost its consumer after reconnects, in one way or another, in every release up to the one that we
pin; such a worker looks healthy and does nothing. It shows only in this: something waits in its queues, it has room for
it, and it takes nothing, at one look after the other while the broker answers. One look proves nothing: what waits may
have come this instant.
"""

from dataclasses import dataclass

#: For so long that must be seen at every look, seconds.
LOST_S = 15.0


@dataclass(slots=True)
class Consumption:
    """Judges by looks that follow one another.

    Attributes:
        received: commands taken so far, at the last look.
        since_s: since when nothing was taken that could have been; None = all is well.
    """

    received: int = -1
    since_s: float | None = None

    def look(self, now_s: float, waiting: int, free: bool, received: int) -> bool:
        """Note a look; whether the worker has lost its consumer.

        Args:
            now_s: monotonic time.
            waiting: commands in the worker's queues.
            free: it could run another one.
            received: commands taken so far.
        """
        stuck = waiting > 0 and free and received == self.received
        self.received = received
        if not stuck:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = now_s
        return self.since_s is not None and now_s - self.since_s > LOST_S

    def forget(self) -> None:
        """The broker did not answer: what was seen before counts for nothing."""
        self.since_s = None


__all__ = ["LOST_S", "Consumption"]
