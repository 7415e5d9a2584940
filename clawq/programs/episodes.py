"""Episodes out of fragments: the rows of each env put together again, in order, and nothing that did not happen.

A fragment holds some steps of N envs; an episode runs over many fragments of one slot. `Stitcher` takes fragments
(those of a slot in the order of its stream) and gives episodes. Rules:

- Two fragments belong together if they are of one life of one actor and the second one's `produced` is the first one's
  plus its own steps: so a new epoch in mid-life is no break, and a fragment that was dropped, refused or lost is one.
- At a break, at a row that is not valid, and at the end of the log, the open episode is given as what there is of it:
  `ended` is False, and its last observation is the one after its last step. Rows after a break begin in the midst of an
  episode: `whole` is False.
- Rows that an actor took back (`voided`) are left out with their whole episode, since that is what it means.
- A fragment that was sent twice is taken once.

So each transition (s, a, r, s') that comes out did happen, once. Memory: the open episodes, bounded by MOST_OPEN_BYTES;
beyond it those of the slot that was silent for longest are given as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clawq.types import Array, BoolArray, FloatArray, Fragment, FragmentMeta, Obs

#: Bytes of all open episodes together.
MOST_OPEN_BYTES = 256_000_000
#: Longest piece of an episode; an env that never ends one is cut here.
MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """Consecutive steps of one env.

    Attributes:
        meta: header of the fragment in which it begins: worker, slot, epoch, seq, seed, provenance.
        env: index of the env in its actor, 0..N-1.
        obs: key -> [L+1, ...].
        action: float32 [L, A], policy space.
        reward: float32 [L], raw.
        terminated: bool [L]; only the last one may be True.
        truncated: bool [L]; the same.
        weights_version: int64 [L], under which each step was taken.
        extras: per-step policy outputs, name -> [L, ...].
        whole: it begins with a reset.
        ended: it ends with an end of the environment, and not because the log breaks off.
        success: 1 or 0 where the env reports it, else nan.
    """

    meta: FragmentMeta
    env: int
    obs: Obs
    action: FloatArray
    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    weights_version: Array
    extras: Obs
    whole: bool
    ended: bool
    success: float = float("nan")

    @property
    def steps(self) -> int:
        """L."""
        return len(self.reward)

    @property
    def complete(self) -> bool:
        """From reset to end."""
        return self.whole and self.ended


@dataclass(slots=True)
class _Chunk:
    """Rows of one env out of one fragment; `obs` without the one that follows."""

    obs: Obs
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    version: int
    extras: Obs


@dataclass(slots=True)
class _Open:
    """The episode that an env is in."""

    meta: FragmentMeta | None = None
    chunks: list[_Chunk] = field(default_factory=list)
    steps: int = 0
    size_bytes: int = 0
    whole: bool = False


@dataclass(slots=True)
class _Slot:
    """What is known of a slot's actor."""

    life: int
    produced: int
    envs: list[_Open]
    #: Observations after the last row, key -> [N, ...].
    last_obs: Obs


class Stitcher:
    """Puts episodes together.

    Args:
        most_open_bytes: see the module's text.
        most_steps: the same.
    """

    def __init__(self, most_open_bytes: int = MOST_OPEN_BYTES, most_steps: int = MOST_STEPS) -> None:
        self._most_bytes, self._most_steps = most_open_bytes, most_steps
        #: In the order in which they were heard of last.
        self._slots: dict[str, _Slot] = {}
        self._bytes = 0

    def add(self, fragment: Fragment) -> Iterator[Episode]:
        """The episodes that this fragment ends or breaks off. Exhaust it before the next call."""
        meta = fragment.meta
        self.void(meta)
        slot = self._slots.pop(meta.slot, None)
        if slot is not None and self._repeats(slot, meta):
            self._slots[meta.slot] = slot
            return
        if slot is None or not self._follows(slot, meta):
            if slot is not None:
                yield from self._break(slot)
            # Only an actor's first fragment begins with a reset.
            first = meta.produced == meta.steps * meta.envs
            slot = _Slot(_life(meta), 0, [_Open(whole=first) for _ in range(meta.envs)], {})
        else:
            yield from self._break_where_other_obs(slot, fragment)
        self._slots[meta.slot] = slot
        slot.produced = meta.produced
        # Copies: views would keep whole payloads alive.
        slot.last_obs = {key: np.array(column[-1]) for key, column in fragment.obs.items()}
        yield from self._rows(slot, fragment)
        while self._bytes > self._most_bytes and len(self._slots) > 0:
            yield from self._break(self._slots[next(iter(self._slots))])
            silent = next(iter(self._slots))
            self._slots[silent] = self._slots.pop(silent)

    def void(self, meta: FragmentMeta) -> None:
        """Leave out what this header takes back; of a refused fragment, too, if its header can be believed."""
        slot = self._slots.get(meta.slot)
        if slot is not None and slot.life == _life(meta):
            for notice in meta.voided:
                if notice.env < len(slot.envs):
                    self._forget(slot.envs[notice.env])

    def close(self) -> Iterator[Episode]:
        """What is still open, as it is."""
        for slot in self._slots.values():
            yield from self._break(slot)
        self._slots.clear()

    # --- does it go on? -----------------------------------------------------------------------------------------

    def _repeats(self, slot: _Slot, meta: FragmentMeta) -> bool:
        return _life(meta) == slot.life and meta.produced <= slot.produced

    def _follows(self, slot: _Slot, meta: FragmentMeta) -> bool:
        same_actor = _life(meta) == slot.life and meta.envs == len(slot.envs)
        return same_actor and meta.produced == slot.produced + meta.steps * meta.envs

    def _break_where_other_obs(self, slot: _Slot, fragment: Fragment) -> Iterator[Episode]:
        """Envs that begin the fragment with another obs than they ended the last one with were reset in between."""
        same = np.ones(len(slot.envs), np.bool_)
        for key, column in fragment.obs.items():
            before, now = slot.last_obs[key], column[0]
            alike = (before == now) | ((before != before) & (now != now))
            same &= alike.reshape(len(same), -1).all(axis=1)
        for env in np.flatnonzero(~same).tolist():
            yield from self._give(slot, env, {key: obs[env : env + 1] for key, obs in slot.last_obs.items()})
            slot.envs[env].whole = False

    def _break(self, slot: _Slot) -> Iterator[Episode]:
        """All open episodes of a slot, as they are; what follows begins in the midst."""
        for env, one in enumerate(slot.envs):
            if one.chunks:
                yield from self._give(slot, env, {key: obs[env : env + 1] for key, obs in slot.last_obs.items()})
                one.whole = False

    # --- rows ---------------------------------------------------------------------------------------------------

    def _rows(self, slot: _Slot, fragment: Fragment) -> Iterator[Episode]:
        boundary = fragment.boundary
        #: [T, N]: which row of final_obs belongs to a boundary.
        final = np.cumsum(boundary.reshape(-1)).reshape(boundary.shape) - 1
        summaries = _summaries(fragment.meta)
        for env in range(fragment.meta.envs):
            valid, ends = fragment.valid[:, env], boundary[:, env]
            at = 0
            for t in [*np.flatnonzero(~valid | ends).tolist(), fragment.meta.steps]:
                self._append(slot, env, fragment, at, min(t + 1, fragment.meta.steps) if _is(valid, t) else t)
                at = t + 1
                if t == fragment.meta.steps:
                    break
                if not valid[t]:
                    # Where nothing is open after an end, it is a reset that takes a step of its own.
                    fresh = slot.envs[env].whole and not slot.envs[env].chunks
                    after = {key: column[t, env : env + 1] for key, column in fragment.obs.items()}
                    yield from self._give(slot, env, after)
                    slot.envs[env].whole = fresh or bool(ends[t])
                    if ends[t] and summaries[env]:
                        summaries[env].pop(0)
                else:
                    last = int(final[t, env])
                    after = {key: rows[last : last + 1] for key, rows in fragment.final_obs.items()}
                    summary = summaries[env].pop(0) if summaries[env] else None
                    length, success = summary or (None, float("nan"))
                    yield from self._give(slot, env, after, True, length, success)
                    slot.envs[env].whole = True
            if slot.envs[env].steps >= self._most_steps:
                yield from self._give(slot, env, {key: obs[env : env + 1] for key, obs in slot.last_obs.items()})
                slot.envs[env].whole = False

    def _append(self, slot: _Slot, env: int, fragment: Fragment, start: int, stop: int) -> None:
        """Rows start..stop-1 of an env go to its open episode."""
        if stop <= start:
            return
        rows = slice(start, stop)
        chunk = _Chunk(
            {key: np.array(column[rows, env]) for key, column in fragment.obs.items()},
            np.array(fragment.action[rows, env]),
            np.array(fragment.reward[rows, env]),
            np.array(fragment.terminated[rows, env]),
            np.array(fragment.truncated[rows, env]),
            fragment.meta.weights_version,
            {name: np.array(column[rows, env]) for name, column in fragment.extras.items()},
        )
        size = sum(array.nbytes for array in (*chunk.obs.values(), chunk.action, chunk.reward, *chunk.extras.values()))
        one = slot.envs[env]
        one.meta = one.meta or fragment.meta
        one.chunks.append(chunk)
        one.steps += stop - start
        one.size_bytes += size
        self._bytes += size

    def _give(
        self,
        slot: _Slot,
        env: int,
        after: Obs,
        ended: bool = False,
        length: int | None = None,
        success: float = float("nan"),
    ) -> Iterator[Episode]:
        """The open episode of an env, with the observation [1, ...] after its last row; nothing if there is none."""
        one = slot.envs[env]
        if one.meta is not None and one.chunks:
            yield Episode(
                meta=one.meta,
                env=env,
                obs={key: np.concatenate([*(c.obs[key] for c in one.chunks), after[key]]) for key in after},
                action=np.concatenate([c.action for c in one.chunks]),
                reward=np.concatenate([c.reward for c in one.chunks]),
                terminated=np.concatenate([c.terminated for c in one.chunks]),
                truncated=np.concatenate([c.truncated for c in one.chunks]),
                weights_version=np.concatenate([np.full(len(c.reward), c.version, np.int64) for c in one.chunks]),
                extras={n: np.concatenate([c.extras[n] for c in one.chunks]) for n in _shared_extras(one.chunks)},
                # The actor counted the steps of the episode: the surest sign that none is missing.
                whole=one.whole if length is None else length == one.steps,
                ended=ended,
                success=success,
            )
        self._forget(one)

    def _forget(self, one: _Open) -> None:
        self._bytes -= one.size_bytes
        one.meta, one.chunks, one.steps, one.size_bytes = None, [], 0, 0


def _life(meta: FragmentMeta) -> int:
    return meta.life or meta.epoch


def _is(valid: BoolArray, t: int) -> bool:
    return t < len(valid) and bool(valid[t])


def _summaries(meta: FragmentMeta) -> list[list[tuple[int, float]]]:
    """Of each env (length, success) of the episodes that ended here, in order."""
    summaries: list[list[tuple[int, float]]] = [[] for _ in range(meta.envs)]
    for episode in meta.episodes:
        summaries[episode.env].append((episode.length, episode.success))
    return summaries


def _shared_extras(chunks: list[_Chunk]) -> list[str]:
    """Names of the extras that all chunks have, in one shape and dtype."""

    def kind(chunk: _Chunk, name: str) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        column = chunk.extras.get(name)
        return None if column is None else (column.shape[1:], column.dtype)

    return [name for name in chunks[0].extras if len({kind(chunk, name) for chunk in chunks}) == 1]
