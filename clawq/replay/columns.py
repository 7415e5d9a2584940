"""One column of the replay ring: a tensor with one row for each ring row, on the learner's device.

On the CPU the tensor and the numpy view through which fragments are written share their memory, so that a write is
one memcpy. On CUDA a write goes through pinned memory, one asynchronous copy for each contiguous piece; torch's pinned
allocator hands a staging block out again only after its copy has finished.

Guarantees: a write that passes the end of the ring goes on at its beginning. Does not know what a row means, which
rows are live, or who reads them; not safe for use by several threads.
"""

from collections.abc import Iterator

import numpy as np
import torch

from clawq.specs import ArraySpec
from clawq.types import Array


def pieces(at: int, count: int, capacity: int) -> Iterator[tuple[int, int, int]]:
    """Cut `count` rows from slot `at` on into contiguous pieces.

    Yields:
        (first slot, one past the last slot, rows before this piece); one piece, or two where the ring wraps.
    """
    first = min(count, capacity - at)
    yield at, at + first, 0
    if count > first:
        yield 0, count - first, first


class Column:
    """A [capacity, ...] tensor that is written by slots (row numbers modulo the capacity).

    Attributes:
        tensor: [capacity, ...] on `device`.
        host: numpy [capacity, ...]: the same memory on the CPU; a mirror of it where `mirrored`; else None.
    """

    def __init__(self, capacity: int, spec: ArraySpec, device: torch.device, *, mirrored: bool = False) -> None:
        self.capacity = capacity
        self.device = device
        shape, dtype = (capacity, *spec.shape), np.dtype(spec.dtype)
        self.host: Array | None = None
        if device.type == "cpu":
            # calloc: pages are taken only when rows are written, so a large ring costs nothing at the start.
            self.host = np.zeros(shape, dtype)
            self.tensor = torch.from_numpy(self.host)
        else:
            self.host = np.zeros(shape, dtype) if mirrored else None
            self.tensor = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=device)

    def write(self, at: int, rows: Array) -> None:
        """Write rows [R, ...] (R ≤ capacity) to the slots from `at` on."""
        staged = None if self.device.type == "cpu" else self._stage(rows)
        for start, stop, done in pieces(at, len(rows), self.capacity):
            if self.host is not None:
                self.host[start:stop] = rows[done : done + stop - start]
            if staged is not None:
                self.tensor[start:stop].copy_(staged[done : done + stop - start], non_blocking=True)

    def fill(self, at: int, count: int, value: float) -> None:
        """Set `count` rows from slot `at` on to one number."""
        for start, stop, _ in pieces(at, count, self.capacity):
            if self.host is not None:
                self.host[start:stop] = value
            if self.device.type != "cpu":
                self.tensor[start:stop].fill_(value)

    def put(self, slots: Array, value: float) -> None:
        """Set scattered slots (int64 [R]) to one number."""
        if self.host is not None:
            self.host[slots] = value
        if self.device.type != "cpu":
            self.tensor[torch.from_numpy(slots).to(self.device)] = value

    def numpy(self) -> Array:
        """The whole column as numpy; copies from a GPU. For checks, not for the learner's loop."""
        return self.host if self.host is not None else self.tensor.cpu().numpy()

    def _stage(self, rows: Array) -> torch.Tensor:
        """Rows in page-locked memory, from which the device copies while we go on."""
        staged = torch.empty(rows.shape, dtype=self.tensor.dtype, pin_memory=self.device.type == "cuda")
        staged.numpy()[...] = rows
        return staged
