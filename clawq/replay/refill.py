"""Rebuilding the ring from what the streams still hold, after the learner was started again.

Entries up to the checkpoint's cursors are read back, checked as when they came first, and put into the ring. Nothing is
counted: normaliser, limiter and ledger hold these fragments already. Refused fragments are passed over silently (they
were reported when they came first), but what they say of void rows is heeded. Staleness is not judged again: fragments
once refused as stale go in, at the age that all experience of a stopped run has. A fragment that an actor sent twice
under two ids goes in once.
"""

from collections.abc import Iterable

from clawq.core import Entry
from clawq.replay.ledger import Lives
from clawq.replay.ring import ReplayRing
from clawq.replay.validation import Examiner, Fault


def refill(ring: ReplayRing, entries: Iterable[Entry], examiner: Examiner) -> int:
    """Insert retained fragments, oldest first; returns how many went in.

    Args:
        ring: an empty ring, or one to be added to.
        entries: at or before the checkpoint's cursors, those of a slot in the order of its stream.
        examiner: the run's own.
    """
    inserted, lives = 0, Lives()
    for entry in entries:
        found = examiner.examine(entry)
        if isinstance(found, Fault):
            for notice in found.meta.voided if found.meta else ():
                ring.void(entry.slot, entry.epoch, notice.env, notice.seq, notice.t)
            continue
        if lives.is_new(entry.slot, found.meta):
            lives.advance(entry.slot, found.meta)
            ring.insert(found)
            inserted += 1
    return inserted
