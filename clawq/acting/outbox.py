"""The outbox: fragments that wait to be sent, bounded, between the env loop and the sender thread.

When it is full the declared policy acts, and every dropped env step is counted:

    block         the env loop waits for room (nothing is dropped)
    drop_oldest   the oldest waiting fragment goes
    drop_newest   the new fragment goes

What a dropped fragment had to report (its own steps, and its notices of void rows) travels on with the fragment that
follows it, so that the header of every fragment is exact about everything before it.

`take` hands a fragment over for good: what the sender holds is neither counted as waiting nor ever dropped.
"""

import threading
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Literal

from clawq.types import Fragment, Voided

OnFull = Literal["block", "drop_oldest", "drop_newest"]
#: The name under which the outbox's drops are counted in fragment headers.
FULL = "outbox_full"


@dataclass(frozen=True, slots=True)
class Parcel:
    """A fragment, and what happened since the one before it.

    Attributes:
        fragment: the fragment.
        dropped: env steps dropped between the fragment before and this one, by reason.
    """

    fragment: Fragment
    dropped: Counter[str] = field(default_factory=Counter)


class Outbox:
    """A bounded queue with one producer and one consumer.

    Args:
        capacity: fragments that may wait.
        on_full: what happens when they do.
    """

    def __init__(self, capacity: int, on_full: OnFull) -> None:
        self._capacity, self._on_full = capacity, on_full
        self._parcels: deque[Parcel] = deque()
        self._changed = threading.Condition()
        self._pending = _Pending()
        self._dropped: Counter[str] = Counter()
        self._interrupted = False

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def dropped(self) -> dict[str, int]:
        """Env steps dropped so far, by reason."""
        with self._changed:
            return dict(self._dropped)

    def put(self, fragment: Fragment, timeout_s: float) -> bool:
        """Add a fragment; False if there was no room within the timeout (only under `block`)."""
        with self._changed:
            if len(self._parcels) >= self._capacity:
                if self._on_full == "drop_newest":
                    self._count(fragment, self._pending)
                    return True
                if self._on_full == "drop_oldest":
                    self._drop_oldest()
                elif not self._changed.wait_for(lambda: len(self._parcels) < self._capacity, timeout_s):
                    return False
            self._parcels.append(self._pending.hand_to(Parcel(fragment)))
            self._pending = _Pending()
            self._changed.notify_all()
        return True

    def take(self, timeout_s: float) -> Parcel | None:
        """The oldest fragment, or None if none came within the timeout or `interrupt` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._parcels or self._interrupted, timeout_s)
            if not self._parcels:
                self._interrupted = False
                return None
            parcel = self._parcels.popleft()
            self._changed.notify_all()
            return parcel

    def interrupt(self) -> None:
        """Let `take` return None now, or as soon as nothing waits any more."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def _drop_oldest(self) -> None:
        oldest = self._parcels.popleft()
        carry = _Pending(oldest.dropped)
        self._count(oldest.fragment, carry)
        if self._parcels:
            self._parcels[0] = carry.hand_to(self._parcels[0])
        else:
            self._pending = carry

    def _count(self, fragment: Fragment, carry: "_Pending") -> None:
        steps = fragment.meta.steps * fragment.meta.envs
        carry.dropped[FULL] += steps
        carry.voided += fragment.meta.voided
        self._dropped[FULL] += steps


class _Pending:
    """What dropped fragments left for the next one to report."""

    def __init__(self, dropped: Counter[str] | None = None) -> None:
        self.dropped: Counter[str] = Counter(dropped or {})
        self.voided: tuple[Voided, ...] = ()

    def hand_to(self, parcel: Parcel) -> Parcel:
        if not self.dropped and not self.voided:
            return parcel
        meta = replace(parcel.fragment.meta, voided=self.voided + parcel.fragment.meta.voided)
        return Parcel(replace(parcel.fragment, meta=meta), self.dropped + parcel.dropped)


__all__ = ["FULL", "OnFull", "Outbox", "Parcel"]
