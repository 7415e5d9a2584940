"""Consume-once sampling for on-policy algorithms: each row that can be sampled is drawn once, oldest first, then never.

A row waits from the moment it is written until it is drawn. If it is overwritten or masked before that, it was made in
vain: it is counted as wasted, and the rate limiter is told, so that nobody waits for samples that cannot come. With
`rate_limit.samples_per_insert: 1` actors wait for the learner and nothing is wasted; without it they do not wait, and a
slow learner loses the oldest rows. Several passes over the same rows (PPO) are the algorithm's own business: inside its
`step`, over a large batch.

With `shuffle` the rows of a batch are drawn at random from all that wait.

What waits is part of the state, so a resumed learner draws nothing twice.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import Draw
from clawq.types import Array, BoolArray, Metrics

#: Rows that are looked at in one go for the next ones that wait.
SCAN_ROWS = 4096


class FifoSampler:
    """First in, first out; implements samplers.Sampler.

    Args:
        ring: what is sampled from; tells us what it writes and voids. It must still be empty.
        generator: a CPU generator; used by `shuffle` only.
        shuffle: draw at random from all rows that wait.
        lost: told how many rows were wasted, each time (the limiter's `excuse`).

    Attributes:
        wasted: rows that were overwritten or masked before they were drawn.
    """

    steady = False
    wants_td_error = False

    def __init__(
        self,
        ring: ReplayRing,
        generator: torch.Generator,
        shuffle: bool = False,
        lost: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._ring, self._generator, self._shuffle, self._lost = ring, generator, shuffle, lost
        self._waits = np.zeros(ring.capacity, np.bool_)
        self._count = 0
        #: No row before this position waits.
        self._first = 0
        self.wasted = 0
        ring.watch(self)

    # --- sampling -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Rows that wait to be drawn."""
        return self._count

    def ready(self, batch_size: int) -> bool:
        """Do that many rows wait?"""
        return self._count >= batch_size

    def draw(self, batch_size: int, progress: float = 0.0) -> Draw:
        """See Sampler; `progress` changes nothing here. Raises ValueError if fewer rows wait."""
        if not self.ready(batch_size):
            raise ValueError(f"{batch_size} rows are asked for, and {self._count} wait")
        rows = self._any(batch_size) if self._shuffle else self._oldest(batch_size)
        self._waits[rows % self._ring.capacity] = False
        self._count -= batch_size
        return Draw(rows)

    def learned(self, rows: Array, td_error: Any) -> None:
        """They will not come again anyway."""

    def metrics(self) -> Metrics:
        """Rows that wait, and rows that were wasted."""
        return {"fifo/waiting": float(self._count), "fifo/wasted": float(self.wasted)}

    def _oldest(self, count: int) -> Array:
        """The first rows that wait, int64 [count]."""
        ring, found, missing = self._ring, [], count
        at = max(self._first, ring.oldest)
        while missing > 0:
            stop = min(at + max(SCAN_ROWS, missing), ring.head)
            found.append(self._waiting_in(at, stop)[:missing])
            missing -= len(found[-1])
            at = stop
        rows = np.concatenate(found)
        self._first = int(rows[-1]) + 1
        return rows

    def _any(self, count: int) -> Array:
        """Some of the rows that wait, int64 [count]."""
        rows = self._waiting_in(max(self._first, self._ring.oldest), self._ring.head)
        self._first = int(rows[0])
        picked: Array = rows[torch.randperm(len(rows), generator=self._generator)[:count].numpy()]
        return picked

    def _waiting_in(self, start: int, stop: int) -> Array:
        """Positions in [start, stop) that wait, ascending."""
        rows = np.arange(start, stop, dtype=np.int64)
        return rows.compress(self._waits.take(rows % self._ring.capacity))

    # --- what the ring tells ------------------------------------------------------------------------------------

    def written(self, slots: Array, valid: BoolArray) -> None:
        """Slots int64 [R] hold new rows; those that are valid (bool [R]) wait."""
        self._forget(slots)
        self._waits[slots] = valid
        self._count += int(np.count_nonzero(valid))

    def voided(self, slots: Array) -> None:
        """The rows in slots int64 [R] cannot be sampled any more."""
        self._forget(slots)
        self._waits[slots] = False

    def _forget(self, slots: Array) -> None:
        gone = int(np.count_nonzero(self._waits.take(slots)))
        self._count -= gone
        self._waste(gone)

    def _waste(self, rows: int) -> None:
        if rows:
            self.wasted += rows
            self._lost(rows)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Generator, waste, the first row that waits, and which rows wait from there on."""
        ring = self._ring
        rows = np.arange(max(self._first, ring.oldest), ring.head, dtype=np.int64)
        waits = self._waits.take(rows % ring.capacity)
        begin = int(np.argmax(waits)) if self._count else len(rows)
        return {
            "generator": self._generator.get_state(),
            "wasted": self.wasted,
            "first": int(rows[begin]) if self._count else None,
            "waits": torch.from_numpy(waits[begin:].copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the ring must have its rows again. What could not come back is wasted."""
        ring = self._ring
        self._generator.set_state(state["generator"])
        self.wasted = int(state.get("wasted", 0))
        self._waits[:] = False
        # A run that was sampled in another way until now has drawn everything.
        self._count, self._first = 0, ring.newest[1]
        if state.get("first") is None:
            return
        rows = int(state["first"]) + np.flatnonzero(state["waits"].numpy())
        slots = rows % ring.capacity
        here = (rows >= ring.oldest) & ring.valid_slots.take(slots)
        self._waits[slots[here]] = True
        self._count, self._first = int(np.count_nonzero(here)), int(state["first"])
        self._waste(len(rows) - self._count)

    def check_valid(self) -> tuple[bool, str]:
        """Do the rows that wait fit the ring? For tests and post-mortems."""
        if int(np.count_nonzero(self._waits)) != self._count:
            return False, f"{self._count} rows are said to wait, and {np.count_nonzero(self._waits)} do"
        if (self._waits & ~self._ring.valid_slots).any():
            return False, "a row waits that cannot be sampled"
        before = np.arange(self._ring.oldest, max(self._first, self._ring.oldest)) % self._ring.capacity
        if self._waits.take(before).any():
            return False, f"a row before {self._first} waits"
        return True, ""
