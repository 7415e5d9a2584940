"""The layout of a ring: which fragments lie where, without their rows.

With its rows (from a snapshot or from the streams) a layout makes a ring what it was: positions, seams, counts. It is
small, a few numbers for each fragment, and part of every checkpoint.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from clawq.errors import CheckpointInvalid
from clawq.replay.seams import Placed
from clawq.types import Array, BoolArray

#: Where in the numbers of a fragment its first row, T and N are; how many numbers there are.
START, STEPS, ENVS, _NUMBERS = 5, 6, 7, 10
#: Different names after which a register begins anew.
_MOST_NAMES = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The fragments of a layout as arrays, oldest first.

    Attributes:
        names: of the slots and workers of these fragments, sorted.
        table: int64 [F, 10]: slot and worker (as indices of `names`), epoch, seq, produced, start, steps, envs, tail,
            created_ms.
        running: bool [sum of N]; see Placed.
    """

    names: tuple[str, ...]
    table: Array
    running: BoolArray

    @property
    def envs(self) -> Array:
        """N of each fragment, int64 [F]."""
        return self.table[:, ENVS]


class Register:
    """The numbers of a ring's fragments; only those that are new are looked at each time.

    A checkpoint of a large ring has tens of thousands of fragments, and the learner's thread must not stall for them.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._index: dict[str, int] = {}
        self._table: Array = np.zeros((0, _NUMBERS), np.int64)
        self._running: BoolArray = np.zeros(0, np.bool_)
        self._added = 0

    def follow(self, order: deque[Placed], added: int) -> Numbers:
        """The numbers of the fragments in `order`, of which `added` have been added at its end since it was made."""
        if len(self._index) > _MOST_NAMES:
            self._begin()
        new = min(len(order), added - self._added)
        gone = len(self._table) - (len(order) - new)
        fresh = list(islice(reversed(order), new))[::-1]
        rows = [self._row(one) for one in fresh]
        running = [self._running[int(self._table[:gone, ENVS].sum()) :], *(one.running for one in fresh)]
        table = np.array(rows, np.int64).reshape(-1, _NUMBERS)
        self._table, self._running = np.concatenate((self._table[gone:], table)), np.concatenate(running)
        self._added = added
        return self._canonical()

    def _canonical(self) -> Numbers:
        """The numbers, the same for the same fragments: not a function of whom this process met, and in which order."""
        known, (names, rest) = list(self._index), np.split(self._table, [2], axis=1)
        used = np.flatnonzero(np.bincount(names.ravel(), minlength=len(known))).tolist()
        ordered = sorted(used, key=known.__getitem__)
        places = np.zeros(len(known), np.int64)
        places[ordered] = np.arange(len(ordered))
        table = np.concatenate((places[names], rest), axis=1)
        return Numbers(tuple(known[index] for index in ordered), table, self._running)

    def _row(self, p: Placed) -> tuple[int, ...]:
        slot, worker = (self._index.setdefault(name, len(self._index)) for name in (p.slot, p.worker))
        return slot, worker, p.epoch, p.seq, p.produced, p.start, p.steps, p.envs, p.tail, p.created_ms


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Positions, counts and fragments of a ring.

    Attributes:
        oldest: position of the oldest live row.
        head: position of the next row.
        size: rows that could be sampled.
        inserted: valid env steps inserted since the ring was made.
        voided: of these, rows that were declared void later.
        newest: positions [first, one past the last) of the step rows of the fragment inserted last.
        placed: the fragments of which a step row is live, oldest first; without `last_obs`.
        numbers: the same as arrays.
    """

    oldest: int
    head: int
    size: int
    inserted: int
    voided: int
    newest: tuple[int, int]
    placed: tuple[Placed, ...]
    numbers: Numbers

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain values; names are in a table of their own."""
        return {
            "oldest": self.oldest,
            "head": self.head,
            "size": self.size,
            "inserted": self.inserted,
            "voided": self.voided,
            "newest": list(self.newest),
            "names": list(self.numbers.names),
            "placed": torch.from_numpy(self.numbers.table),
            "running": torch.from_numpy(self.numbers.running),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Layout":
        """Inverse of `state_dict`; CheckpointInvalid for what is no layout."""
        try:
            numbers = Numbers(tuple(state["names"]), state["placed"].numpy(), state["running"].numpy())
            placed = _placed(numbers)
            first, end = state["newest"]
            return cls(
                oldest=int(state["oldest"]),
                head=int(state["head"]),
                size=int(state["size"]),
                inserted=int(state["inserted"]),
                voided=int(state["voided"]),
                newest=(int(first), int(end)),
                placed=tuple(placed),
                numbers=numbers,
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointInvalid(f"the checkpoint's layout of the replay ring cannot be read: {error!r}") from error


def _placed(numbers: Numbers) -> list[Placed]:
    placed, at, names = [], 0, numbers.names
    for slot, worker, epoch, seq, produced, start, steps, envs, tail, created_ms in numbers.table.tolist():
        placed.append(
            Placed(
                slot=names[slot],
                epoch=epoch,
                seq=seq,
                produced=produced,
                start=start,
                steps=steps,
                envs=envs,
                tail=tail,
                running=numbers.running[at : at + envs].copy(),
                last_obs={},
                worker=names[worker],
                created_ms=created_ms,
            )
        )
        at += envs
    return placed
