"""Columns of the replay ring: tensors with one row for each ring row, on the learner's device.

`Column` holds one array, `TrackedColumn` knows what of it was changed, `Selection` is some rows of it. `Packed` holds
all float32 arrays of a row side by side, so that sampling a row touches one place in memory and one kernel gathers
everything (on a CPU this halves the time of a batch); its parts are views.

On the CPU a tensor and the numpy array through which it is written share their memory (`host`). On CUDA a write goes
through pinned memory, one asynchronous copy for each contiguous piece; torch's pinned allocator hands a block out again
only after its copy has finished.

Guarantees: a write that passes the end of the ring goes on at its beginning. Does not know what a row means, which
rows are live, or who reads them; not safe for use by several threads.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from clawq.specs import ArraySpec
from clawq.types import Array

#: Slots in one block of a TrackedColumn.
BLOCK = 1024


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
        host: numpy [capacity, ...], the same memory, on the CPU; else None.
    """

    def __init__(self, capacity: int, spec: ArraySpec, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        shape, dtype = (capacity, *spec.shape), np.dtype(spec.dtype)
        self.host: Array | None = None
        if device.type == "cpu":
            # calloc: pages are taken only when rows are written, so a large ring costs nothing at the start.
            self.host = np.zeros(shape, dtype)
            self.tensor = torch.from_numpy(self.host)
        else:
            self.tensor = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, device=device)

    def write(self, at: int, rows: Array) -> None:
        """Write rows [R, ...] (R ≤ capacity) to the slots from `at` on."""
        if self.host is not None:
            for start, stop, done in pieces(at, len(rows), self.capacity):
                self.host[start:stop] = rows[done : done + stop - start]
        else:
            staged = self._stage(len(rows))
            staged.numpy()[...] = rows
            self._send(at, staged)

    @contextmanager
    def block(self, at: int, count: int) -> Iterator[Array]:
        """Room for `count` rows from slot `at` on, to be filled (whole or in part: the rest is undefined)."""
        if self.host is not None and at + count <= self.capacity:
            yield self.host[at : at + count]
            return
        staged = self._stage(count)
        yield staged.numpy()
        if self.host is not None:
            for start, stop, done in pieces(at, count, self.capacity):
                self.host[start:stop] = staged.numpy()[done : done + stop - start]
        else:
            self._send(at, staged)

    def read(self, at: int, count: int) -> Array:
        """A copy of `count` rows from slot `at` on, on the host."""
        source = self.tensor if self.host is None else self.host
        parts = [source[start:stop] for start, stop, _ in pieces(at, count, self.capacity)]
        copied: Array = np.concatenate(
            [part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in parts]
        )
        return copied

    def fill(self, at: int, count: int, value: float) -> None:
        """Set `count` rows from slot `at` on to one number."""
        for start, stop, _ in pieces(at, count, self.capacity):
            if self.host is not None:
                self.host[start:stop] = value
            else:
                self.tensor[start:stop].fill_(value)

    def put(self, slots: Array, value: float, lane: int | None = None) -> None:
        """Set scattered slots (int64 [R]) to one number; of rows with several numbers only `lane`, if it is given."""
        at = slice(None) if lane is None else lane
        if self.host is not None:
            self.host[(slots, at) if self.host.ndim > 1 else slots] = value
        else:
            there = torch.from_numpy(slots).to(self.device)
            self.tensor[(there, at) if self.tensor.ndim > 1 else there] = value

    def select(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [R, ...] of slots int64 [R] on our device."""
        return self.tensor.index_select(0, slots)

    def numpy(self) -> Array:
        """The whole column as numpy; copies from a GPU. For checks, not for the learner's loop."""
        whole: Array = self.tensor.cpu().numpy()
        return whole

    def _stage(self, count: int) -> torch.Tensor:
        """Undefined rows in memory from which the device can copy while we go on."""
        shape = (count, *self.tensor.shape[1:])
        return torch.empty(shape, dtype=self.tensor.dtype, pin_memory=self.device.type == "cuda")

    def _send(self, at: int, staged: torch.Tensor) -> None:
        for start, stop, done in pieces(at, len(staged), self.capacity):
            self.tensor[start:stop].copy_(staged[done : done + stop - start], non_blocking=True)


class TrackedColumn(Column):
    """A column on the host that knows which of its blocks of slots were written since it was asked last."""

    def __init__(self, capacity: int, spec: ArraySpec) -> None:
        super().__init__(capacity, spec, torch.device("cpu"))
        self._changed = np.zeros(-(-capacity // BLOCK), np.bool_)

    def write(self, at: int, rows: Array) -> None:
        """As Column."""
        super().write(at, rows)
        self._note(at, len(rows))

    def fill(self, at: int, count: int, value: float) -> None:
        """As Column."""
        super().fill(at, count, value)
        self._note(at, count)

    def put(self, slots: Array, value: float, lane: int | None = None) -> None:
        """As Column."""
        super().put(slots, value, lane)
        self._changed[slots // BLOCK] = True

    def take_changes(self) -> Array:
        """Numbers of the blocks (slots b·BLOCK up to (b + 1)·BLOCK) written since the last call, ascending."""
        blocks = np.flatnonzero(self._changed)
        self._changed[:] = False
        return blocks

    def _note(self, at: int, count: int) -> None:
        for start, stop, _ in pieces(at, count, self.capacity):
            self._changed[start // BLOCK : (stop - 1) // BLOCK + 1] = True


class Selection:
    """Memory for `count` rows of a column, filled again and again.

    Attributes:
        tensor: [count, ...] on the column's device.
    """

    def __init__(self, column: Column, count: int) -> None:
        source = column.tensor
        self._column = column
        self.tensor = torch.empty((count, *source.shape[1:]), dtype=source.dtype, device=source.device)
        self._host: Array | None = self.tensor.numpy() if column.host is not None else None

    def fill(self, slots: Array, there: torch.Tensor) -> None:
        """Copy the rows of slots int64 [count], given on the host and on the column's device."""
        if self._host is not None and self._column.host is not None:
            # Cheaper than torch's. Any mode but the default writes to `out` without a detour.
            self._column.host.take(slots, axis=0, out=self._host, mode="wrap")
        else:
            torch.index_select(self._column.tensor, 0, there, out=self.tensor)


class Packed(Column):
    """Several float32 arrays side by side: float32 [capacity, sum of their sizes].

    Args:
        capacity: rows.
        specs: name -> spec of one row; all float32.
        device: where the tensor is.
    """

    def __init__(self, capacity: int, specs: Mapping[str, ArraySpec], device: torch.device) -> None:
        super().__init__(capacity, ArraySpec((sum(one.size for one in specs.values()),)), device)
        self._shapes = {name: one.shape for name, one in specs.items()}
        self._spans: dict[str, slice] = {}
        width = 0
        for name, one in specs.items():
            self._spans[name] = slice(width, width + one.size)
            width += one.size

    @property
    def names(self) -> list[str]:
        """The arrays, in their order."""
        return list(self._spans)

    def __contains__(self, name: str) -> bool:
        return name in self._spans

    def span(self, first: str, last: str) -> slice:
        """The columns of neighbours, from one array to another."""
        return slice(self._spans[first].start, self._spans[last].stop)

    def behind(self, prefix: str) -> slice:
        """The columns behind all arrays whose name begins so (they are the first ones)."""
        return slice(max((one.stop for name, one in self._spans.items() if name.startswith(prefix)), default=0), None)

    def part(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """One array of packed rows: [R, width] -> [R, *shape]; a view (contiguous only along its last axes)."""
        span, shape = self._spans[name], self._shapes[name]
        if len(shape) == 1:
            return rows[:, span]
        return rows[:, span].view(-1, *shape) if shape else rows[:, span.start]

    def parts(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """All arrays of packed rows [R, width] by name, as `part` gives them."""
        return {name: self.part(rows, name) for name in self._spans}

    def set_part(self, block: Array, name: str, array: Array) -> None:
        """Write one array [R, *shape] (or with more leading axes, R in all) into packed rows [R, width]."""
        span = self._spans[name]
        # Spelled out, because -1 cannot be worked out where there are no rows.
        block[:, span] = array.reshape(len(block), span.stop - span.start)
