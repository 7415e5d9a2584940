"""The watchdog's patience: every number by which it judges, in one place.

Limits of a single process (seconds without progress for each phase, memory) come with its record, since a run's
configuration names them (section `watchdog`); what stands here is the host's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How long, how much, how often.

    Attributes:
        period_s: between two looks.
        courtesy_s: added to every deadline of a process whose parent watches it too: that one has the first word.
        settle_s: what a parent has for tidying up after a child that ended, and a child after its parent did.
        defunct_s: a zombie for so long is told.
        grace_s: from SIGTERM to SIGKILL; longer than a fragment takes.
        recycle_s: the same where a leaking process is let go between two fragments.
        death_s: alive for so long after SIGKILL counts as unkillable.
        leak_window_s: memory is judged over at least so long,
        leak_samples: and so many samples,
        leak_mb_per_h: and grows faster than this (where the record does not say otherwise).
        flaps: more deaths of one place than this
        flap_window_s: within so long is flapping.
        lost_s: a worker that takes nothing for so long, though it has a free slot and work waits, is lost.
        silent_s: a worker whose heartbeats are missing for so long, though its work goes on, is told.
        gap_periods: after so many periods without a look of our own, everything else may have moved on unseen.
        redis_rounds: so many good looks at Redis are needed after a bad one.
        outage_share: if more than this share
        outage_of: of at least so many processes hang at once, it is the host that hangs.
        kills_per_minute: None = 2, or a tenth of the registered processes.
    """

    period_s: float = 1.0
    courtesy_s: float = 10.0
    settle_s: float = 10.0
    defunct_s: float = 30.0
    grace_s: float = 5.0
    recycle_s: float = 30.0
    death_s: float = 10.0
    leak_window_s: float = 600.0
    leak_samples: int = 10
    leak_mb_per_h: float = 500.0
    flaps: int = 5
    flap_window_s: float = 300.0
    lost_s: float = 30.0
    silent_s: float = 60.0
    gap_periods: float = 2.0
    redis_rounds: int = 2
    outage_share: float = 0.5
    outage_of: int = 4
    kills_per_minute: int | None = None

    def kills_allowed(self, registered: int) -> int:
        """Kills within a minute after which the watchdog only sounds the alarm."""
        return max(2, registered // 10) if self.kills_per_minute is None else self.kills_per_minute

    @property
    def longest_gap_s(self) -> float:
        """Between the end of a look and the next one; never so short that a busy machine trips it."""
        return max(self.gap_periods * self.period_s, 2.0)


__all__ = ["Policy"]
