"""Traces: what the rows of a ring show that their fragments alone do not tell.

With a ring's layout and the fragments themselves they make the ring again, bit for bit. A fragment's rows change after
they were written in two ways only: rows become void (or are masked for another reason), and the links at a seam lead on
to the next fragment or back to the one before, whether or not that is still to be had. So the traces are the validity
of all rows, and for each fragment the links of its first rows back and of its last rows on. They are nearly all alike,
and take a few kilobytes when compressed.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clawq.errors import CheckpointInvalid
from clawq.replay.layout import START, STEPS, Layout
from clawq.replay.ring import BACK, HOP, ReplayRing
from clawq.types import Array, BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Traces:
    """See the module's text.

    Attributes:
        valid: bool [capacity then], by slot.
        backs: int32 [sum of N], one row of links for each fragment of the layout.
        hops: the same.
    """

    valid: BoolArray
    backs: Array
    hops: Array

    @classmethod
    def of(cls, ring: ReplayRing, layout: Layout) -> "Traces":
        """The traces of a ring with that layout; copies."""
        envs, starts, steps = layout.numbers.envs, layout.numbers.table[:, START], layout.numbers.table[:, STEPS]
        firsts, lasts = _rows(starts, envs), _rows(starts + (steps - 1) * envs, envs)
        backs = ring.links_of(firsts % ring.capacity)[:, BACK]
        return cls(ring.valid_slots.copy(), backs, ring.links_of(lasts % ring.capacity)[:, HOP])

    def valid_at(self, positions: Array) -> BoolArray:
        """Validity of rows that were live then."""
        found: BoolArray = self.valid[positions % len(self.valid)]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Bytes and integers."""
        return {
            "capacity": len(self.valid),
            "valid": zlib.compress(np.packbits(self.valid).tobytes(), 1),
            "backs": zlib.compress(self.backs.astype("<i4").tobytes(), 1),
            "hops": zlib.compress(self.hops.astype("<i4").tobytes(), 1),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Traces":
        """Inverse of `state_dict`; CheckpointInvalid for what is none."""
        try:
            bits = np.frombuffer(zlib.decompress(state["valid"]), np.uint8)
            valid = np.unpackbits(bits, count=int(state["capacity"])).astype(np.bool_)
            backs, hops = (np.frombuffer(zlib.decompress(state[name]), "<i4") for name in ("backs", "hops"))
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise CheckpointInvalid(f"the checkpoint's traces of the replay ring cannot be read: {error!r}") from error
        return cls(valid, backs, hops)


def _rows(first: Array, envs: Array) -> Array:
    """Positions first, first + 1, ... of N rows for each fragment, int64 [sum of N]."""
    begins = np.cumsum(envs) - envs
    within = np.arange(int(envs.sum()), dtype=np.int64) - np.repeat(begins, envs)
    positions: Array = np.repeat(first, envs) + within
    return positions
