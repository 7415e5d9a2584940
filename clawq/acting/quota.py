"""How much an actor collects under one weights version: as much as it can, or its quota of a round.

In rounds (`sync` in the configuration) an actor collects the same number of steps under every version, cut into
fragments of a fixed number of steps, and then waits for the next version. Nothing about it depends on time: a fragment
stays open, and the position in the quota stands, from one lease to the next. A newer version that comes before the
quota is done (the round went on without this actor, or was called again) begins a new quota with the next fragment.
"""

from typing import Protocol


class Share(Protocol):
    """What an actor may collect.

    Attributes:
        outlives_leases: a fragment that is under way at a lease's end is finished by the next lease.
    """

    @property
    def outlives_leases(self) -> bool: ...
    def room(self, version: int) -> int | None:
        """Most steps T of the next fragment under `version`: 0 = wait for a newer one; None = no limit."""
        ...

    def collected(self, version: int, steps: int) -> None:
        """A fragment of T = `steps` was made under `version`."""
        ...


class Endless:
    """An actor that never waits for the learner."""

    outlives_leases = False

    def room(self, version: int) -> int | None:
        """No limit."""
        return None

    def collected(self, version: int, steps: int) -> None:
        """Nothing to count."""


class Quota:
    """The same number of steps under every version.

    Args:
        steps: T of one version in all.
        fragment_steps: T of one fragment.
    """

    outlives_leases = True

    def __init__(self, steps: int, fragment_steps: int) -> None:
        self._steps, self._fragment_steps = steps, fragment_steps
        self._version = self._collected = 0

    def room(self, version: int) -> int | None:
        """See Share."""
        done = self._collected if version == self._version else 0
        return min(self._fragment_steps, self._steps - done)

    def collected(self, version: int, steps: int) -> None:
        """See Share."""
        if version != self._version:
            self._version, self._collected = version, 0
        self._collected += steps


__all__ = ["Endless", "Quota", "Share"]
