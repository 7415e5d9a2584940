"""The layout of a ring: which fragments lie where, without their rows.

With its rows (from a snapshot or from the streams) a layout makes a ring what it was: positions, seams, counts. It is
small, a few numbers for each fragment, and part of every checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from clawq.errors import CheckpointInvalid
from clawq.replay.seams import Placed
from clawq.types import BoolArray

#: Numbers that describe one fragment.
_NUMBERS = 10


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
    """

    oldest: int
    head: int
    size: int
    inserted: int
    voided: int
    newest: tuple[int, int]
    placed: tuple[Placed, ...]

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain values; names are in a table of their own."""
        names = sorted({name for one in self.placed for name in (one.slot, one.worker)})
        index = {name: number for number, name in enumerate(names)}
        rows = (
            (index[p.slot], index[p.worker], p.epoch, p.seq, p.produced, p.start, p.steps, p.envs, p.tail, p.created_ms)
            for p in self.placed
        )
        table = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, _NUMBERS)
        running = [np.zeros(0, np.bool_), *(p.running for p in self.placed)]
        return {
            "oldest": self.oldest,
            "head": self.head,
            "size": self.size,
            "inserted": self.inserted,
            "voided": self.voided,
            "newest": list(self.newest),
            "names": names,
            "placed": torch.from_numpy(table),
            "running": torch.from_numpy(np.concatenate(running)),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Layout":
        """Inverse of `state_dict`; CheckpointInvalid for what is no layout."""
        try:
            placed = _placed(state["names"], state["placed"].tolist(), state["running"].numpy())
            first, end = state["newest"]
            return cls(
                oldest=int(state["oldest"]),
                head=int(state["head"]),
                size=int(state["size"]),
                inserted=int(state["inserted"]),
                voided=int(state["voided"]),
                newest=(int(first), int(end)),
                placed=tuple(placed),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointInvalid(f"the checkpoint's layout of the replay ring cannot be read: {error!r}") from error


def _placed(names: list[str], table: Iterable[list[int]], running: BoolArray) -> list[Placed]:
    placed, at = [], 0
    for slot, worker, epoch, seq, produced, start, steps, envs, tail, created_ms in table:
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
                running=running[at : at + envs].copy(),
                last_obs={},
                worker=names[worker],
                created_ms=created_ms,
            )
        )
        at += envs
    return placed
