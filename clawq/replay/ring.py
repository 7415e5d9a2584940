"""The replay ring: env steps as tensors on the learner's device, each observation stored once.

What is computed with lies on the device; what says which rows belong together (`links`, `valid`) lies on the host, so
that picking rows and walking along them never waits for a GPU.

Rows have absolute positions that only grow; a row lies in slot `position % capacity`, and the rows from `oldest` up to
(not including) `head` are live. A fragment takes

    T·N step rows (time first, then env) | one row for each boundary's final_obs | N tail rows: obs[T]

`hop` is the distance from a step row to the row whose obs came after its action: N rows on, or the final_obs row of a
boundary, or the tail row. `back` is the distance to the step before it in the same episode, 0 if there is none. Only
step rows that are valid are ever sampled; n-step returns (nstep.py) and hindsight (hindsight.py) walk along both.

Seams: when the next fragment of the same slot comes, its first rows take the place of the tail rows if those are still
the newest rows of the ring; otherwise the last step rows are relinked to the new first rows. Either way n-step returns
cross the seam. Links are made only where the new first obs equals the tail, so whatever an actor leaves out between two
fragments, no false transition comes about.

Guarantees: a successor is always newer than its row, so the successor of a live row is live; `size` is exact. Used by
the learner's thread alone. Does not know duplicates (consumer), what is sampled (samplers), nor returns (nstep).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from clawq.errors import ConfigError
from clawq.replay.columns import Column, Packed, TrackedColumn, pieces
from clawq.replay.layout import Layout, Register
from clawq.replay.rowsize import forecast_bytes
from clawq.replay.seams import Placed, joined_envs
from clawq.replay.validation import check_schema
from clawq.specs import ArraySpec, EnvSpec
from clawq.types import Array, BoolArray, Fragment

#: Where hop, weights version and the way back are in `links`.
HOP, VERSION, BACK = 0, 1, 2
#: Rows that are looked at in one go where all of a ring is.
AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class RingState:
    """Figures of a ring, for metrics.

    Attributes:
        size: valid env steps that can be sampled.
        rows: live rows, with final and tail rows and invalid ones.
        head: position of the next row.
        inserted: valid env steps inserted since the ring was made.
        voided: of these, rows that were declared void later.
        size_bytes: memory of all columns.
    """

    size: int
    rows: int
    head: int
    inserted: int
    voided: int
    size_bytes: int


class RowWatcher(Protocol):
    """Is told which rows come and go."""

    def written(self, slots: Array, valid: BoolArray) -> None:
        """Slots int64 [R] hold new rows; those that are valid (bool [R]) can be sampled."""
        ...

    def voided(self, slots: Array) -> None:
        """The rows in slots int64 [R] cannot be sampled any more."""
        ...


class ReplayRing:
    """A ring of `capacity` rows.

    Args:
        spec: what the env shows and takes.
        capacity: rows; env steps, final and tail rows (with several slots about 2 % more rows than env steps).
        device: where the tensors are.
        extras: per-step policy outputs to keep: name -> spec without T, N.

    Attributes:
        packed: float32 parts: `obs.<key>`, `extras.<name>`, `action`, `reward`, `bootstrap` (1 − terminated).
        separate: what is not float32, by the same names.
        links: int32 [capacity, 3], on the host: hop, weights version, back.
        valid: bool [capacity], on the host: can the row be sampled?
        truncated: bool [capacity].
        changes: grows with whatever changes what can be sampled.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        device: str | torch.device = "cpu",
        extras: Mapping[str, ArraySpec] | None = None,
    ) -> None:
        if not 2 <= capacity < 2**31:
            raise ConfigError("replay", [f"capacity: {capacity} rows; allowed are 2..{2**31 - 1}"])
        self.spec, self.capacity, self.device = spec, capacity, torch.device(device)
        self.extras = dict(extras or {})
        named = {f"obs.{key}": one for key, one in spec.obs.items()}
        named |= {f"extras.{name}": one for name, one in self.extras.items()}
        floats = {name: one for name, one in named.items() if one.dtype == "float32"}
        scalars = {"action": ArraySpec((spec.action.size,)), "reward": ArraySpec(()), "bootstrap": ArraySpec(())}
        self.packed = Packed(capacity, floats | scalars, self.device)
        self.separate = {name: Column(capacity, one, self.device) for name, one in named.items() if name not in floats}
        self.links = TrackedColumn(capacity, ArraySpec((3,), "int32"))
        self.valid = TrackedColumn(capacity, ArraySpec((), "bool"))
        self.truncated = Column(capacity, ArraySpec((), "bool"), self.device)
        self._head = self._oldest = self._size = self._inserted = self._voided = 0
        self._newest = (0, 0)
        self.changes = 0
        self._order: deque[Placed] = deque()
        self._added, self._register = 0, Register()
        self._by_slot: dict[str, deque[Placed]] = {}
        self._watchers: list[RowWatcher] = []

    def watch(self, watcher: RowWatcher) -> None:
        """Tell `watcher` about all changes from now on; the ring must still be empty."""
        if self._head:
            raise ValueError("a ring can be watched only from its beginning on")
        self._watchers.append(watcher)

    # --- what is in it ------------------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Position of the next row."""
        return self._head

    @property
    def oldest(self) -> int:
        """Position of the oldest live row."""
        return self._oldest

    @property
    def settled(self) -> int:
        """Rows before this position are written for good: until they are overwritten only links and validity change.

        (The newest tail rows give way to the next fragment.) Such rows may be copied by another thread, provided that
        it looks at `oldest` afterwards: rows before that may have been overwritten meanwhile.
        """
        return self._order[-1].tail if self._order else self._head

    @property
    def size(self) -> int:
        """Rows that can be sampled: valid env steps."""
        return self._size

    @property
    def fill(self) -> float:
        """Share of the rows that are live, 0..1."""
        return (self._head - self._oldest) / self.capacity

    @property
    def inserted(self) -> int:
        """Valid env steps inserted since the ring was made."""
        return self._inserted

    @property
    def newest(self) -> tuple[int, int]:
        """Positions [first, one past the last) of the T·N step rows of the fragment inserted last."""
        return self._newest

    @property
    def placed(self) -> Collection[Placed]:
        """The fragments of which a step row is live, oldest first."""
        return self._order

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row."""
        return forecast_bytes(self.spec, 1, self.extras)

    @property
    def state(self) -> RingState:
        """Figures for metrics."""
        return RingState(
            size=self._size,
            rows=self._head - self._oldest,
            head=self._head,
            inserted=self._inserted,
            voided=self._voided,
            size_bytes=self.bytes_per_row * self.capacity,
        )

    @property
    def valid_slots(self) -> BoolArray:
        """Can the row in each slot be sampled? Bool [capacity] on the host; a view, do not write."""
        assert self.valid.host is not None
        return self.valid.host

    @property
    def all_links(self) -> Array:
        """Links of all slots, int32 [capacity, 3] on the host; a view, do not write."""
        assert self.links.host is not None
        return self.links.host

    def links_of(self, slots: Array) -> Array:
        """Links of slots int64 [R]: int32 [R, 3], on the host."""
        assert self.links.host is not None
        # For scattered rows `take` is several times faster than indexing.
        return self.links.host.take(slots, axis=0)

    def sampleable_rows(self) -> Array:
        """Positions of all rows that can be sampled, ascending, int64 [size]."""
        slots = np.flatnonzero(self.valid_slots)
        # The positions of a full turn of slots, counted from the oldest row.
        return np.sort(self._oldest + (slots - self._oldest) % self.capacity)

    def obs_at(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Key -> obs [R, ...] of live rows, int64 [R] on any device (final and tail rows too)."""
        slots = rows.to(self.device) % self.capacity
        parts = self.packed.parts(self.packed.select(slots))
        parts |= {name: column.select(slots) for name, column in self.separate.items()}
        return {key: parts[f"obs.{key}"] for key in self.spec.obs}

    def obs_in(self, slots: torch.Tensor, key: str) -> torch.Tensor:
        """One obs [R, ...] of slots int64 [R] on our device."""
        name = f"obs.{key}"
        if name in self.separate:
            return self.separate[name].select(slots)
        return self.packed.part(self.packed.tensor, name).index_select(0, slots)

    # --- changes ------------------------------------------------------------------------------------------------

    def insert(self, fragment: Fragment) -> int:
        """Write a fragment, after voiding the earlier rows that its header names.

        Args:
            fragment: decoded and checked; its arrays are copied, never kept.

        Returns:
            The number of valid rows written.

        Raises:
            SpecMismatch: an array is not what spec and header say; the ring is unchanged.
            ConfigError: the fragment is larger than half the ring; the ring is unchanged.
        """
        check_schema(self.spec, self.extras, fragment)
        self.changes += 1
        meta = fragment.meta
        ends = np.flatnonzero(fragment.boundary)
        steps = meta.steps * meta.envs
        self._refuse_too_large(steps + len(ends) + meta.envs)
        for notice in meta.voided:
            self.void(meta.slot, meta.epoch, notice.env, notice.seq, notice.t)

        previous = self._previous(meta.slot)
        joined = joined_envs(previous, fragment)
        if previous is not None and joined.all() and previous.tail + meta.envs == self._head:
            self._head = previous.tail
        start = self._head
        self._make_room(steps + len(ends) + meta.envs)
        valid = self._write(start, fragment, ends, self._backs(start, fragment, previous, joined))
        if previous is not None:
            self._relink(previous, start, joined)
        self._remember(Placed.of(fragment, start, tail=start + steps + len(ends)), previous)
        self._newest = (start, start + steps)
        self._size += valid
        self._inserted += valid
        return valid

    def void(self, slot: str, epoch: int, env: int, seq: int, t: int) -> int:
        """Make the rows of one env, from step `t` of fragment `seq` on, unsampleable (see types.Voided).

        Rows that are not in the ring any more, or never were, are passed over.

        Returns:
            How many rows that could be sampled cannot be any more.
        """
        self.changes += 1
        voided = 0
        for placed in self._by_slot.get(slot, ()):
            if placed.epoch != epoch or placed.seq < seq or env >= placed.envs:
                continue
            rows = placed.rows_of(env, first_t=t if placed.seq == seq else 0)
            voided += self.mask(rows[rows >= self._oldest] % self.capacity)
        self._voided += voided
        return voided

    def mask(self, slots: Array) -> int:
        """Never sample the rows in `slots` (int64 [R], each once) again; returns how many could be sampled till now.

        They stay where they are: returns of earlier rows end before them, as before any row that is not valid.
        """
        self.changes += 1
        masked = int(np.count_nonzero(self.valid_slots[slots]))
        self.valid.put(slots, False)
        for watcher in self._watchers:
            watcher.voided(slots)
        self._size -= masked
        return masked

    def mask_fragments(self, covers: Callable[[Placed], bool]) -> tuple[int, int]:
        """Mask all rows of the fragments that `covers` says yes to; returns how many, and how many rows were masked."""
        covered = [placed for placed in self._order if covers(placed)]
        masked = 0
        for placed in covered:
            rows = np.arange(max(placed.start, self._oldest), placed.last_row + 1)
            masked += self.mask(rows % self.capacity)
        return len(covered), masked

    def _refuse_too_large(self, rows: int) -> None:
        if rows > self.capacity // 2:
            raise ConfigError(
                "replay",
                [
                    f"capacity: a fragment needs {rows} rows, more than half of the ring's {self.capacity}; raise "
                    "replay.capacity, or make fragments smaller (actors.fragment_bytes, environment.num_envs)"
                ],
            )

    def _previous(self, slot: str) -> Placed | None:
        """The newest fragment of the slot in the ring."""
        placed = self._by_slot.get(slot)
        return placed[-1] if placed else None

    def _make_room(self, rows: int) -> None:
        """Move the head on by `rows`, forgetting what they overwrite."""
        for start, stop, _ in pieces(self._head % self.capacity, rows, self.capacity):
            self._size -= int(np.count_nonzero(self.valid_slots[start:stop]))
        self._head += rows
        self._oldest = max(self._oldest, self._head - self.capacity)
        while self._order and self._order[0].last_row < self._oldest:
            expired = self._order.popleft()
            of_slot = self._by_slot[expired.slot]
            of_slot.popleft()
            if not of_slot:
                del self._by_slot[expired.slot]

    def _backs(self, start: int, fragment: Fragment, previous: Placed | None, joined: BoolArray) -> Array:
        """Distances from the step rows to the steps before them: int32 [T, N], 0 at the beginnings of episodes."""
        backs = np.full(fragment.valid.shape, fragment.meta.envs, np.int32)
        backs[1:][fragment.boundary[:-1] | ~fragment.valid[:-1]] = 0
        backs[0] = 0
        if previous is not None:
            backs[0, joined & previous.running] = start - (previous.last_row - previous.envs + 1)
        return backs

    def _write(self, start: int, fragment: Fragment, ends: Array, backs: Array) -> int:
        """Write all rows of a fragment from position `start` on; returns how many are valid."""
        meta, packed = fragment.meta, self.packed
        steps, spare = meta.steps * meta.envs, len(ends) + meta.envs
        at = start % self.capacity
        with packed.block(at, steps + spare) as block:
            first = block[:steps]
            for key in self.spec.obs:
                self._write_obs(f"obs.{key}", at, block, fragment.obs[key], fragment.final_obs[key])
            for name in self.extras:
                self._write_steps(f"extras.{name}", at, first, fragment.extras[name], spare)
            packed.set_part(first, "action", fragment.action)
            packed.set_part(first, "reward", fragment.reward)
            packed.set_part(first, "bootstrap", ~fragment.terminated)
            # Final and tail rows hold an obs only. Nobody reads their other columns, but a ring that was made again
            # from the same fragments shall be the same to the last bit.
            block[steps:, packed.behind("obs.")] = 0.0
        links = np.zeros((steps + spare, 3), np.int32)
        links[:steps, HOP], links[:steps, VERSION] = hops(meta.steps, meta.envs, ends), meta.weights_version
        links[:steps, BACK] = backs.reshape(-1)
        self.links.write(at, links)
        self.truncated.write(at, padded(fragment.truncated.reshape(-1), spare))
        self.valid.write(at, padded(fragment.valid.reshape(-1), spare))
        if self._watchers:
            slots = (at + np.arange(steps + spare)) % self.capacity
            valid = self.valid_slots.take(slots)
            for watcher in self._watchers:
                watcher.written(slots, valid)
        return int(np.count_nonzero(fragment.valid))

    def _write_obs(self, name: str, at: int, block: Array, obs: Array, final: Array) -> None:
        """Write the obs of all rows: those of the steps, the final ones, those of the tail."""
        envs, one = obs.shape[1], obs.shape[2:]
        steps, tail = (len(obs) - 1) * envs, len(block) - envs
        if name in self.packed:
            self.packed.set_part(block[:steps], name, obs[:-1])
            self.packed.set_part(block[steps:tail], name, final)
            self.packed.set_part(block[tail:], name, obs[-1])
        else:
            rows = np.concatenate((obs[:-1].reshape(steps, *one), final, obs[-1]))
            self.separate[name].write(at, rows)

    def _write_steps(self, name: str, at: int, block: Array, array: Array, spare: int) -> None:
        """Write one array [T, N, ...] of the step rows, and nothing to the `spare` rows behind them."""
        if name in self.packed:
            self.packed.set_part(block, name, array)
        else:
            self.separate[name].write(at, padded(array.reshape(len(block), *array.shape[2:]), spare))

    def _relink(self, previous: Placed, start: int, joined: BoolArray) -> None:
        """Lead the last steps of the joined envs (bool [N]) on to the first rows of their next fragment."""
        if previous.tail == start:
            return  # the new rows lie where the tail rows lay: the links are right as they are
        rows = previous.last_row - previous.envs + 1 + np.flatnonzero(joined & previous.running)
        # The new fragment may have overwritten them already.
        slots = rows[rows >= self._oldest] % self.capacity
        if len(slots):
            self.links.put(slots, start - (previous.last_row - previous.envs + 1), lane=HOP)

    def _remember(self, placed: Placed, previous: Placed | None) -> None:
        if previous is not None:
            previous.forget_seam()
        self._order.append(placed)
        self._added += 1
        self._by_slot.setdefault(placed.slot, deque()).append(placed)

    # --- as it was ----------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Which fragments lie where now."""
        numbers = self._register.follow(self._order, self._added)
        placed = tuple(self._order)
        return Layout(self._oldest, self._head, self._size, self._inserted, self._voided, self._newest, placed, numbers)

    def restore(self, layout: Layout) -> None:
        """Take over a layout; `restored` follows when the rows from `oldest` to `head` have been written again.

        Of a ring that was larger the newest rows are kept. Raises ValueError if this ring has been used.
        """
        if self._head:
            raise ValueError("a ring can be restored only while nothing was inserted")
        self._head, self._newest = layout.head, layout.newest
        self._oldest = max(layout.oldest, layout.head - self.capacity)
        self._inserted, self._voided = layout.inserted, layout.voided
        for placed in layout.placed:
            if placed.last_row >= self._oldest:
                self._remember(replace(placed), self._previous(placed.slot))

    @property
    def columns(self) -> list[Column]:
        """All columns of a row, in an order that depends on the spec alone."""
        return [self.packed, *self.separate.values(), self.links, self.valid, self.truncated]

    def write_alone(self, fragment: Fragment) -> None:
        """Write a fragment's rows to the slots from 0 on, as if it had no neighbours; positions stay as they are."""
        check_schema(self.spec, self.extras, fragment)
        nobody = np.zeros(fragment.meta.envs, np.bool_)
        self._write(0, fragment, np.flatnonzero(fragment.boundary), self._backs(0, fragment, None, nobody))

    def restored(self, gaps: Sequence[tuple[int, int]] = ()) -> None:
        """Go on from the rows that were written since `restore`.

        Args:
            gaps: positions [first, end) whose rows are missing; they cannot be sampled, nor can rows that lead there.
        """
        self._void_gaps(gaps, lambda slots: self.valid.put(slots, False))
        self._size = int(np.count_nonzero(self.valid_slots))
        for of_slot in self._by_slot.values():
            newest = of_slot[-1]
            obs = self.obs_at(torch.arange(newest.tail, newest.tail + newest.envs))
            newest.last_obs = {key: one.cpu().numpy() for key, one in obs.items()}
        self._forget_seams(gaps)
        self.changes += 1
        for watcher in self._watchers:
            for first in range(self._oldest, self._head, AT_ONCE):
                slots = np.arange(first, min(first + AT_ONCE, self._head)) % self.capacity
                watcher.written(slots, self.valid_slots.take(slots))

    def lose(self, gaps: Sequence[tuple[int, int]]) -> None:
        """Do to a whole ring what `restored` does where rows are missing."""
        self._void_gaps(gaps, self.mask)
        self._forget_seams(gaps)

    def _forget_seams(self, gaps: Sequence[tuple[int, int]]) -> None:
        """Where what would be compared is gone, nothing may be joined to it."""
        for of_slot in self._by_slot.values():
            newest = of_slot[-1]
            if any(first < newest.tail + newest.envs and newest.tail < end for first, end in gaps):
                newest.produced = -1

    def _void_gaps(self, gaps: Sequence[tuple[int, int]], void: Callable[[Array], object]) -> None:
        """Void (some slots at a time) the rows that are missing, and those that lead to them."""
        ordered = np.array(sorted(gaps), np.int64).reshape(-1, 2)
        for first in range(self._oldest, self._head, AT_ONCE) if len(ordered) else ():
            rows = np.arange(first, min(first + AT_ONCE, self._head))
            slots = rows % self.capacity
            lost = within(ordered, rows) | within(ordered, rows + self.links_of(slots)[:, HOP])
            void(slots[lost])

    # --- checks -------------------------------------------------------------------------------------------------

    def check_valid(self) -> tuple[bool, str]:
        """Do all invariants hold? For tests and post-mortems; reads the whole ring.

        Returns:
            (True, "") or (False, what is wrong).
        """
        live = self._head - self._oldest
        if not 0 <= live <= self.capacity:
            return False, f"{live} live rows in a ring of {self.capacity}"
        valid = int(np.count_nonzero(self.valid_slots))
        if valid != self._size:
            return False, f"size {self._size}, but {valid} rows are marked valid"
        rows = self.sampleable_rows()
        if len(rows) and not (self._oldest <= rows[0] and rows[-1] < self._head):
            return False, "a row outside of the live rows is marked valid"
        hop = self.links_of(rows % self.capacity)[:, HOP]
        if len(rows) and not ((hop > 0).all() and (rows + hop < self._head).all()):
            return False, "a valid row has no live successor"
        return self._check_placed(rows)

    def _check_placed(self, rows: Array) -> tuple[bool, str]:
        """Are the remembered fragments disjoint, in order, live, and the only ones that own valid rows?"""
        owned, end = 0, -1
        for placed in self._order:
            if placed.start <= end or placed.last_row < self._oldest or placed.last_row >= self._head:
                return False, f"{placed.slot} {placed.epoch}-{placed.seq} overlaps, or is not live"
            end = placed.last_row
            owned += int(np.count_nonzero((rows >= placed.start) & (rows <= end)))
        if owned != len(rows):
            return False, f"{len(rows) - owned} valid rows belong to no remembered fragment"
        if sum(map(len, self._by_slot.values())) != len(self._order) or not all(self._by_slot.values()):
            return False, "fragments by slot and fragments by age differ"
        return True, ""


def hops(steps: int, envs: int, ends: Array) -> Array:
    """Distance from each step row to the row of the obs that came after it.

    Args:
        steps: T.
        envs: N.
        ends: flat indices (t·N + env) of the boundaries, ascending.

    Returns:
        int32 [T·N].
    """
    total = steps * envs
    hop = np.full(total, envs, np.int32)
    hop[total - envs :] += len(ends)  # tail rows lie behind the final rows
    hop[ends] = total + np.arange(len(ends)) - ends
    return hop


def padded(rows: Array, spare: int) -> Array:
    """Rows [R, ...] and `spare` rows of zeros behind them."""
    return np.concatenate((rows, np.zeros((spare, *rows.shape[1:]), rows.dtype)))


def within(spans: Array, positions: Array) -> BoolArray:
    """Which positions (int64 [R]) lie in one of the spans (int64 [S, 2]: first, end; ascending, disjoint)."""
    index = np.searchsorted(spans[:, 0], positions, side="right") - 1
    found: BoolArray = (index >= 0) & (positions < spans[np.maximum(index, 0), 1])
    return found


def pick_from(walk: Sequence[Array], steps: Array) -> Array:
    """Where each of B walks was after its own number of steps.

    Args:
        walk: where all were after 0, 1, 2 ... steps, each int64 [B].
        steps: int64 [B].

    Returns:
        int64 [B].
    """
    picked: Array = np.stack(walk)[steps, np.arange(len(steps))]
    return picked
