"""What should be in a run's queues, decided purely: `reconcile(desired, snapshot, now) → actions`.

Leases are fungible credits. A few are kept waiting: one for each free slot, and two more, so that a worker that joins,
or whose lease just ended, finds one at once. While actors are busy nothing piles up. With no worker in sight two wait.

Evaluations are wanted by events of the run and answered by events; what is wanted and not answered is outstanding. One
that nobody started within `PICKUP_S` is sent again (Celery on Redis may lose a task); one that failed through no fault
of the policy is sent again a few times; one that takes too long is given up, loudly. A worker that is gone cannot say
that it failed, so that is said in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from clawq.errors import SimulatorFailed
from clawq.spawning.failure import SIMULATOR

#: Leases that wait beside those for free slots.
SPARE_LEASES = 2
#: A sent evaluation that nobody began within this time is sent again, seconds.
PICKUP_S = 15.0
#: A worker that began an evaluation is gone when it has had no heartbeat for so long, seconds: after an outage of the
#: data server all of them need a moment to be heard of again.
ABSENT_S = 5.0
#: Most times that one evaluation is sent.
MAX_ATTEMPTS = 3
#: Failures that say nothing about the policy: the worker ended or is gone, or the program was killed or its simulator
#: failed.
PASSING_FAILURES = frozenset({"stopped", "died", "gone", "oom", SIMULATOR, SimulatorFailed.__name__})


@dataclass(frozen=True, slots=True)
class Desired:
    """What the run asks for.

    Attributes:
        collect: actors shall collect.
        max_actors: most actors at a time.
        evaluation_timeout_s: an evaluation that takes longer is given up.
    """

    collect: bool
    max_actors: int
    evaluation_timeout_s: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One wanted evaluation.

    Attributes:
        id: of the event that asked for it.
        version: weights version.
        label: `training` or `final`.
        episodes: how many.
        wanted_s: when it was asked for, on the clock of `now_s`.
        sent_s: when it was last sent, None before.
        started_s: when a worker began, None before.
        attempts: times sent.
        worker: who began, empty before.
        absent_s: since when that worker has no heartbeat, None while it has one.
    """

    id: str
    version: int
    label: str
    episodes: int
    wanted_s: float
    sent_s: float | None = None
    started_s: float | None = None
    attempts: int = 0
    worker: str = ""
    absent_s: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is.

    Attributes:
        waiting: leases in the run's queue.
        slots: of all workers that serve the run.
        busy: slots that run a lease (of any run).
        evaluations: outstanding ones, in the order in which they were asked for.
    """

    waiting: int
    slots: int = 0
    busy: int = 0
    evaluations: tuple[Evaluation, ...] = ()


@dataclass(frozen=True, slots=True)
class SendLeases:
    """Send so many leases."""

    count: int


@dataclass(frozen=True, slots=True)
class DropLeases:
    """Empty the lease queue: nobody shall collect."""


@dataclass(frozen=True, slots=True)
class SendEvaluation:
    """Send this evaluation (again)."""

    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop waiting for this evaluation and say so."""

    evaluation: Evaluation
    reason: str


@dataclass(frozen=True, slots=True)
class ReportGone:
    """Say that this evaluation failed, since its worker, which is gone, cannot."""

    evaluation: Evaluation


Action: TypeAlias = SendLeases | DropLeases | SendEvaluation | GiveUp | ReportGone


def reconcile(desired: Desired, snapshot: Snapshot, now_s: float) -> list[Action]:
    """The actions that bring `snapshot` closer to `desired`. Doing them twice does no harm."""
    actions = _about_leases(desired, snapshot)
    for index, evaluation in enumerate(snapshot.evaluations):
        later = snapshot.evaluations[index + 1 :]
        action = _about_evaluation(evaluation, later, desired.evaluation_timeout_s, now_s)
        if action is not None:
            actions.append(action)
    return actions


def leases_wanted(desired: Desired, snapshot: Snapshot) -> int:
    """How many leases should wait in the queue."""
    if not desired.collect:
        return 0
    free = max(0, snapshot.slots - snapshot.busy)
    # Ten slots end about one lease between two looks.
    spare = SPARE_LEASES + snapshot.slots // 10
    return max(0, min(free + spare, desired.max_actors - snapshot.busy))


def _about_leases(desired: Desired, snapshot: Snapshot) -> list[Action]:
    if not desired.collect:
        return [DropLeases()] if snapshot.waiting else []
    missing = leases_wanted(desired, snapshot) - snapshot.waiting
    return [SendLeases(missing)] if missing > 0 else []


def _about_evaluation(
    evaluation: Evaluation, later: Sequence[Evaluation], timeout_s: float, now_s: float
) -> Action | None:
    if evaluation.started_s is not None:
        if evaluation.absent_s is not None and now_s - evaluation.absent_s > ABSENT_S:
            return ReportGone(evaluation)
        late = now_s - evaluation.started_s > timeout_s + PICKUP_S
        return GiveUp(evaluation, "timeout") if late else None
    if any(other.label == evaluation.label for other in later):
        return GiveUp(evaluation, "superseded")
    if now_s - evaluation.wanted_s > timeout_s + PICKUP_S:
        return GiveUp(evaluation, "no_worker")
    if evaluation.sent_s is None or now_s - evaluation.sent_s > PICKUP_S:
        return SendEvaluation(evaluation)
    return None


__all__ = [
    "ABSENT_S",
    "MAX_ATTEMPTS",
    "PASSING_FAILURES",
    "PICKUP_S",
    "Action",
    "Desired",
    "DropLeases",
    "Evaluation",
    "GiveUp",
    "ReportGone",
    "SendEvaluation",
    "SendLeases",
    "Snapshot",
    "leases_wanted",
    "reconcile",
]
