"""Making a ring again as it was, from its layout and traces (both in the checkpoint) and the fragments themselves.

Every fragment goes back to the very positions at which it lay, in whatever order they come: so write head, links, the
sampler's draws and all later inserts are what they would have been without an interruption. Nothing is counted again:
normaliser, limiter, ledger and sampler have their own state. A fragment that is kept nowhere any more leaves a gap,
whose rows, and those that lead there, cannot be sampled; how many env steps that costs is told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clawq.core import Entry
from clawq.replay.layout import Layout
from clawq.replay.ring import BACK, HOP, ReplayRing
from clawq.replay.seams import Placed
from clawq.replay.traces import Traces
from clawq.replay.validation import Examiner, Fault
from clawq.types import Fragment


@dataclass(frozen=True, slots=True)
class Missing:
    """A fragment that could not be put back: as a schedule names it, and how many env steps of it could be sampled."""

    slot: str
    epoch: int
    seq: int
    steps: int


class Rebuild:
    """Puts fragments back into a ring that was given its layout.

        rebuild = Rebuild(ring, layout, traces)      # the ring is empty; it takes over the layout
        rebuild.put_back(entries, examiner)          # as often as there are places to look
        missing = rebuild.finish()                   # the ring can be used

    Args:
        ring: an empty one; its capacity may differ (of a larger one the newest rows are kept).
        layout: of the ring that was.
        traces: the same.
    """

    def __init__(self, ring: ReplayRing, layout: Layout, traces: Traces) -> None:
        self._ring, self._traces = ring, traces
        ring.restore(layout)
        ends = [*(one.start for one in layout.placed[1:]), layout.head]
        begins = np.cumsum([0, *(one.envs for one in layout.placed)])
        #: What is still to be put back: identity -> (where, the position behind it, where its traces begin).
        self._open: dict[tuple[str, int, int], tuple[Placed, int, int]] = {
            (one.slot, one.epoch, one.seq): (one, end, int(begin))
            for one, end, begin in zip(layout.placed, ends, begins, strict=False)
            if one.last_row >= ring.oldest
        }
        self._page: ReplayRing | None = None

    @property
    def open(self) -> Sequence[tuple[str, int, int]]:
        """(slot, epoch, seq) of the fragments that are still missing, oldest first."""
        return list(self._open)

    def put_back(self, entries: Iterable[Entry], examiner: Examiner) -> int:
        """Put back those of these entries that belong into the ring; returns how many."""
        count = 0
        for entry in entries:
            key = entry.slot, entry.epoch, entry.seq
            if key not in self._open:
                continue
            found = examiner.examine(entry)
            placed, end, begin = self._open[key]
            if isinstance(found, Fault) or (found.meta.steps, found.meta.envs) != (placed.steps, placed.envs):
                continue  # damaged since it was committed: it counts as missing
            self._write(found, placed, end, begin)
            del self._open[key]
            count += 1
        return count

    def copied(self, gaps: Iterable[tuple[int, int]]) -> None:
        """All rows have been written from elsewhere, but for those at positions [first, end)."""
        spans, oldest = list(gaps), self._ring.oldest
        for key, (placed, end, _) in list(self._open.items()):
            if not any(first < end and max(placed.start, oldest) < behind for first, behind in spans):
                del self._open[key]

    def _write(self, fragment: Fragment, placed: Placed, end: int, begin: int) -> None:
        ring, traces = self._ring, self._traces
        rows = placed.tail + placed.envs - placed.start
        if self._page is None or self._page.capacity < rows:
            self._page = ReplayRing(ring.spec, max(2, rows), extras=ring.extras)
        self._page.write_alone(fragment)
        # Its oldest rows may have been overwritten, and the next fragment may lie where its tail lay.
        first = max(placed.start, ring.oldest)
        for column, source in zip(ring.columns, self._page.columns, strict=True):
            assert source.host is not None
            column.write(first % ring.capacity, source.host[first - placed.start : end - placed.start])
        for lane, start, links in (
            (BACK, placed.start, traces.backs),
            (HOP, placed.last_row - placed.envs + 1, traces.hops),
        ):
            positions = start + np.arange(placed.envs)
            live = positions >= ring.oldest
            assert ring.links.host is not None
            ring.links.host[positions[live] % ring.capacity, lane] = links[begin : begin + placed.envs][live]

    def finish(self) -> list[Missing]:
        """Make the ring whole; returns what is missing, oldest first."""
        ring, traces = self._ring, self._traces
        positions = np.arange(ring.oldest, ring.head)
        ring.valid.put(positions % ring.capacity, False)
        rows = np.flatnonzero(traces.valid_at(positions)) + ring.oldest
        ring.valid.put(rows % ring.capacity, True)
        gaps, missing = [], []
        for placed, end, _ in self._open.values():
            first = max(placed.start, ring.oldest)
            steps = int(np.count_nonzero(traces.valid_at(np.arange(first, placed.last_row + 1))))
            missing.append(Missing(placed.slot, placed.epoch, placed.seq, steps))
            gaps.append((first, end))
        ring.restored(gaps)
        return missing


def ranges(missing: Iterable[Missing]) -> list[list[Any]]:
    """[slot, epoch, first seq, last seq, env steps] of neighbours together: for a schedule."""
    found: list[list[Any]] = []
    for one in sorted(missing, key=lambda one: (one.slot, one.epoch, one.seq)):
        last = found[-1] if found else None
        if last is not None and last[:2] == [one.slot, one.epoch] and last[3] == one.seq - 1:
            last[3:] = [one.seq, last[4] + one.steps]
        else:
            found.append([one.slot, one.epoch, one.seq, one.seq, one.steps])
    return found


def describe(missing: Sequence[Missing]) -> str:
    """For people, to be added to what came back; nothing if nothing is missing."""
    if not missing:
        return ""
    steps = sum(one.steps for one in missing)
    return f"; {steps} env steps of {len(missing)} fragments are in the log no more, and are missing"


def forget(ring: ReplayRing, gone: Iterable[Sequence[Any]]) -> None:
    """Do to a whole ring what `finish` does where these ranges (see `ranges`) are missing: never sample them again."""
    named = [(slot, epoch, range(first, last + 1)) for slot, epoch, first, last, *_ in gone]
    placed = ring.layout().placed
    ends = [*(one.start for one in placed[1:]), ring.head]
    ring.lose(
        [
            (max(one.start, ring.oldest), end)
            for one, end in zip(placed, ends, strict=False)
            if any((slot, epoch) == (one.slot, one.epoch) and one.seq in seqs for slot, epoch, seqs in named)
        ]
    )
