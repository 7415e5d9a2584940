"""Between the consumer's thread and the learner: a queue bounded by bytes, and the order in which entries are settled.

    thread:   wait_for_room(...) -> put(entry, fragment)      or  drop(entry, outcome)
    learner:  take(...) -> ring.insert(staged.fragment) -> commit(staged)

Entries stay open from `put` to `commit`. The ledger moves over an entry only when all before it in its stream are
settled, so its cursors never pass a fragment that is not in the ring. One lock; any thread may call any method.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clawq.core import BYGONE, Entry, Slots, Stream, Vanished
from clawq.places import NOTHING_FOUND, SERVER_LOST, TRIMMED, Place
from clawq.replay.ledger import Counts, Ledger, Missed, Settled
from clawq.types import Fragment, FragmentMeta, Voided


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A fragment that waits to be committed.

    Attributes:
        fragment: decoded; its arrays are views of the entry's payload.
        entry: where it was, and its bytes.
        inherited: the notices among the fragment's that are not its own, but of refused fragments before it.
    """

    fragment: Fragment
    entry: Entry
    inherited: tuple[Voided, ...] = ()

    @property
    def id(self) -> str:
        """The stream id."""
        return f"{self.entry.epoch}-{self.entry.seq}"


@dataclass(slots=True, eq=False)
class _Open:
    """One entry that was read, in the order of its stream; `settled` is None until its fate is known."""

    epoch: int
    seq: int
    stream: Stream
    ordinal: int
    settled: Settled | None

    @classmethod
    def of(cls, entry: Entry, settled: Settled | None) -> "_Open":
        """That entry."""
        return cls(entry.epoch, entry.seq, entry.stream, entry.ordinal, settled)


class Staging:
    """The bounded queue and the ledger behind it.

    Args:
        most_bytes: most payload bytes queued; one fragment is always let in.
        state: the ledger's state in a checkpoint to go on from.
    """

    def __init__(self, most_bytes: int, state: Mapping[str, Any] | None = None) -> None:
        self._most_bytes = most_bytes
        self._ledger = Ledger(state)
        self._changed = threading.Condition()
        self._queue: deque[Staged] = deque()
        self._queued_bytes = 0
        self._open: dict[str, deque[_Open]] = {}
        self._closed = False
        self._failure: BaseException | None = None

    def hold(self, most_bytes: int) -> None:
        """Queue at most so many payload bytes from now on (one fragment is always let in)."""
        if most_bytes != self._most_bytes:
            with self._changed:
                self._most_bytes = most_bytes
                self._changed.notify_all()

    def wait_for_room(self, size_bytes: int, when_full: Callable[[], None]) -> bool:
        """Wait until `size_bytes` fit; False if the queue was closed. Calls `when_full` once before it waits."""
        with self._changed:
            if self._has_room(size_bytes):
                return not self._closed
        when_full()
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(size_bytes) or self._closed)
            return not self._closed

    def _has_room(self, size_bytes: int) -> bool:
        return not self._queue or self._queued_bytes + size_bytes <= self._most_bytes

    def put(self, entry: Entry, fragment: Fragment, inherited: tuple[Voided, ...] = ()) -> None:
        """Queue a fragment that is fit to be used (see Staged)."""
        with self._changed:
            self._open.setdefault(entry.slot, deque()).append(_Open.of(entry, None))
            self._queue.append(Staged(fragment, entry, inherited))
            self._queued_bytes += len(entry.payload)
            self._changed.notify_all()

    def drop(self, entry: Entry, outcome: str, meta: FragmentMeta | None = None) -> None:
        """Note an entry that will not be used (outcome: see ledger.Settled; meta: if it can be believed)."""
        self._settle(entry, Settled(entry.epoch, entry.seq, outcome, meta))

    def miss(self, entry: Entry) -> None:
        """Note the word that entries went away before they were read."""
        why = SERVER_LOST if entry.stream == BYGONE else TRIMMED
        self._settle(entry, Settled(entry.epoch, entry.seq, why, missed=entry.missed))

    def _settle(self, entry: Entry, settled: Settled) -> None:
        with self._changed:
            self._open.setdefault(entry.slot, deque()).append(_Open.of(entry, settled))
            self._advance(entry.slot)

    def take(self, most: int, timeout_s: float) -> list[Staged]:
        """Up to `most` fragments in the order of reading; waits up to `timeout_s` for the first.

        Raises what `fail` was given, once nothing is left to take.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._failure or self._closed, timeout_s)
            if self._failure is not None and not self._queue:
                raise self._failure
            taken = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            self._queued_bytes -= sum(len(staged.entry.payload) for staged in taken)
            self._changed.notify_all()
            return taken

    def commit(self, staged: Staged, outcome: str = "committed") -> None:
        """Settle a taken fragment (outcome: see ledger.Settled). Raises ValueError if it is not open."""
        entry = staged.entry
        with self._changed:
            for one in self._open.get(entry.slot, ()):
                if (one.epoch, one.seq) == (entry.epoch, entry.seq) and one.settled is None:
                    one.settled = Settled(entry.epoch, entry.seq, outcome, staged.fragment.meta, heeded=True)
                    break
            else:
                raise ValueError(f"{entry.slot} {staged.id} was committed before, or was never taken from here")
            self._advance(entry.slot)

    def _advance(self, slot: str) -> None:
        """Move the ledger over the settled entries at the front of a slot's stream."""
        entries = self._open[slot]
        while entries and (settled := entries[0].settled) is not None:
            one = entries.popleft()
            self._ledger.settle(slot, replace(settled, stream=one.stream, ordinal=one.ordinal))
        if not entries:
            del self._open[slot]

    def close(self) -> None:
        """Let nobody wait any more; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let `take` raise `error` once the queue is empty."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What `fail` was given."""
        return self._failure

    @property
    def queued(self) -> tuple[int, int]:
        """Fragments queued, and their payload bytes."""
        with self._changed:
            return len(self._queue), self._queued_bytes

    @property
    def cursors(self) -> dict[str, str]:
        """Of each slot the id up to which everything is settled; a copy."""
        with self._changed:
            return dict(self._ledger.cursors)

    @property
    def marks(self) -> dict[str, dict[int, int]]:
        """Of each slot and epoch the highest seq settled; a copy."""
        with self._changed:
            return self._ledger.marks.state()

    @property
    def notices(self) -> list[list[str | int]]:
        """Notices of settled refused fragments that nobody has handed on yet (voiding.KeptNotices.state)."""
        with self._changed:
            return self._ledger.notices.state()

    @property
    def produced(self) -> dict[str, dict[int, int]]:
        """Of each slot and life of an actor the env steps packed, as far as settled; a copy."""
        with self._changed:
            return self._ledger.produced

    @property
    def counts(self) -> Counts:
        """What became of all settled entries; a copy."""
        with self._changed:
            return self._ledger.counts.copy()

    @property
    def ordinals(self) -> dict[str, int]:
        """Of each slot the ordinal of the entry at its cursor, where it is known; a copy."""
        with self._changed:
            return dict(self._ledger.ordinals)

    @property
    def missed(self) -> dict[str, Missed]:
        """Of each slot what was trimmed before it was read; copies."""
        with self._changed:
            return {slot: replace(missed) for slot, missed in self._ledger.missed.items()}

    @property
    def books(self) -> tuple[dict[str, Any], dict[str, Place]]:
        """Sums and places of one moment; copies."""
        with self._changed:
            return self._ledger.sums, self._ledger.places

    def look(self, slots: Slots) -> list[str]:
        """Which streams there are, by now; returns the slots that were forgotten (Ledger.look)."""
        with self._changed:
            return self._ledger.look(slots, self._open)

    @property
    def horizon(self) -> int:
        """The largest epoch that was forgotten."""
        with self._changed:
            return self._ledger.marks.horizon

    def on_server(self, server: str, found: Mapping[str, Vanished]) -> None:
        """Which server is read from, and what its streams are; called when all that was read before was put here."""
        with self._changed:
            if not self._ledger.on_server(server):
                return
            for slot in {*found, *self._open, *self._ledger.places}:
                # What is of no stream that is there, an archive had: it is none of this one's.
                there = found.get(slot, NOTHING_FOUND)
                waiting = [one for one in self._open.get(slot, ()) if one.stream != BYGONE]
                # What was missed was not read.
                read = sum(not (one.settled and one.settled.missed) for one in waiting)
                self._ledger.vanished(slot, there, read)
                for one in waiting:
                    # The place tells how many of them are of this stream; their ordinals may be of the old one.
                    one.stream, one.ordinal = there.stream, 0
            self._ledger.moved()

    def state_dict(self) -> dict[str, Any]:
        """The ledger's state."""
        with self._changed:
            return self._ledger.state_dict()

    def check_valid(self) -> tuple[bool, str]:
        """Do queue, open entries and ledger agree? (True, "") or (False, what is wrong)."""
        with self._changed:
            if self._queued_bytes != sum(len(staged.entry.payload) for staged in self._queue):
                return False, "queued bytes do not add up"
            for slot, entries in self._open.items():
                if not entries or entries[0].settled is not None:
                    return False, f"{slot} has settled entries that the ledger does not know"
            waiting = sum(one.settled is None for entries in self._open.values() for one in entries)
            if waiting < len(self._queue):
                return False, f"{len(self._queue)} fragments queued, but only {waiting} entries are open"
            return self._ledger.check_valid()
