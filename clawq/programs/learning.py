"""Learning as a function of log and schedule: what the live loop does between two waits, and what a replay does again.

    update(parts, progress, version)   one update from the ring as it is
    advance(parts, version)            the learner's weights version grew
    apply(records, fetch, parts)       all that a recorded schedule says, with fragments from wherever they are kept

`Trainer` decides *when* (limiter, clock, budget, network); the schedule records what it decided, and this module is all
that changes the learner's state: ring, normaliser, limiter, sampler, networks. So the same records and fragments give
the same state, bit for bit on a CPU with the same torch and thread count. It reads no clock and draws nothing that the
state does not hold.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from clawq.core import Algorithm, Entry
from clawq.errors import AlgorithmFault, ExperienceGone, ScheduleInvalid
from clawq.programs import quarantine, tuning
from clawq.programs.intake import valid_steps
from clawq.programs.parts import Parts
from clawq.programs.schedule import (
    FragmentCommitted,
    LiveChange,
    Record,
    RowsVoided,
    SessionBegun,
    UpdatesTried,
    WeightsPublished,
)
from clawq.replay.consumer import with_notices
from clawq.replay.rebuild import forget
from clawq.replay.validation import Examiner, Fault

#: Largest TD error that can be a priority: sums of these over a whole ring stay finite.
LARGEST_TD_ERROR = 1e25
#: Gives the entry of (slot, epoch, seq), None if it is kept nowhere any more.
Fetch = Callable[[str, int, int], Entry | None]
#: Applies a live change's facts to the parts.
Change = Callable[[Parts, Mapping[str, Any]], None]


def advance(parts: Parts, version: int) -> None:
    """The learner's weights version grew to `version`; what is too old under it goes."""
    parts.ageing.advance(version)


def update(parts: Parts, progress: float, version: int) -> bool:
    """Try one update; whether it was made (a non-finite one is skipped and changes no weights).

    Args:
        parts: of the learner; its ring must hold something.
        progress: spent share of the budget, 0..1.
        version: the learner's weights version.

    Raises TooManyNonFinite when too many are skipped in a row.
    """
    batch = parts.ageing.weigh(parts.batches.next(progress), version)
    made = parts.updater.update(batch, progress)
    if made and parts.sampler.wants_td_error:
        parts.batches.learned(batch, td_errors(parts.updater.algorithm, len(batch.row), parts.config.algorithm.name))
    parts.limiter.sampled(parts.config.replay.transitions)
    return made


def td_errors(algorithm: Algorithm, rows: int, name: str) -> torch.Tensor:
    """The TD errors of the last batch, float [rows] on the CPU; they become priorities, so one bad one spoils them all.

    Raises AlgorithmFault, with the plugin's name, if they are not what `Algorithm.td_error` promises.
    """
    given = algorithm.td_error
    if not isinstance(given, torch.Tensor) or given.shape != (rows,):
        shown = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise AlgorithmFault(name, f"td_error is {shown}; a tensor [{rows}] was expected, one number for each row")
    errors = given.detach().cpu()
    bad = ~(errors.abs() <= LARGEST_TD_ERROR)
    if bad.any():
        raise AlgorithmFault(
            name,
            f"td_error of {int(bad.sum())} of {rows} rows is not a number up to {LARGEST_TD_ERROR:g} (first: "
            f"{float(errors[bad][0]):g}), though its losses were finite. The weights of the last checkpoint are sound; "
            "replay.sampler=uniform needs no TD errors",
        )
    return errors


def apply(
    records: Iterable[Record],
    fetch: Fetch,
    parts: Parts,
    examiner: Examiner,
    changes: Mapping[str, Change] | None = None,
    after: Callable[[Record], None] | None = None,
) -> None:
    """Do again what a schedule says.

    Args:
        records: of a schedule; the parts are in the state in which the first of them took effect.
        fetch: where fragments come from.
        parts: of the learner; its consumer and link are not used.
        examiner: decodes and checks, as the live one did.
        changes: what to do about each kind of live change beside `tune` and `quarantine`.
        after: called with each record once it has taken effect; several updates come one by one.

    Raises:
        ExperienceGone: a fragment is kept nowhere any more.
        ScheduleInvalid: a fragment is not what was committed, or a live change is of an unknown kind.
        TooManyNonFinite: as the live learner did.
    """
    told: Callable[[Record], None] = after or (lambda record: None)
    known: dict[str, Change] = {tuning.KIND: tuning.apply, quarantine.CHANGE: quarantine.again, **(changes or {})}
    for record in records:
        match record:
            case FragmentCommitted():
                _insert(record, fetch, parts, examiner)
            case UpdatesTried():
                one = UpdatesTried(1, record.progress, record.version)
                for _ in range(record.count):
                    update(parts, record.progress, record.version)
                    told(one)
                continue
            case RowsVoided():
                notice = record.notice
                parts.ring.void(record.slot, record.epoch, notice.env, notice.seq, notice.t)
            case LiveChange():
                change = known.get(record.kind)
                if change is None:
                    raise ScheduleInvalid(f"the schedule holds a live change `{record.kind}`, unknown to this clawq")
                change(parts, record.facts)
            case WeightsPublished():
                advance(parts, record.version)
            case SessionBegun():
                _begin(record.facts, parts)
        told(record)


def _insert(record: FragmentCommitted, fetch: Fetch, parts: Parts, examiner: Examiner) -> None:
    name = f"fragment {record.slot} {record.epoch}-{record.seq}"
    entry = fetch(record.slot, record.epoch, record.seq)
    if entry is None:
        raise ExperienceGone(f"{name} is kept nowhere any more: the schedule cannot be followed beyond it")
    found = examiner.examine(entry)
    if isinstance(found, Fault):
        raise ScheduleInvalid(f"{name} was committed, but is refused now: {found.reason}: {found.detail}")
    parts.intake.insert(with_notices(found, record.inherited), valid_steps(found))


def _begin(facts: Mapping[str, Any], parts: Parts) -> None:
    """A resumed learner went on without the fragments that its log had no more."""
    missing = facts.get("missing")
    if missing:
        forget(parts.ring, missing)
        parts.limiter.rebase(parts.ring.size)
