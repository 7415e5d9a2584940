"""The sender: the one thread of an actor that talks to Redis, so that the env loop never does.

It empties the outbox into the slot's stream in order, keeps the newest control record and the newest weights at hand,
renews the claim, and holds back while the learner has too much unread (`Control.window_bytes`). While Redis is away or
full it waits with growing pauses (logged once) and retries the same fragment under the same id; nothing later is sent
past it. When the stream refuses an id, or the claim is gone and free, it takes a new epoch and goes on with the same
fragment as number 1; when somebody else holds the slot, it ends with `claim_lost`.

Guarantees: fragments go out in order, once per epoch; the header of each says exactly how many env steps this actor
packed and dropped up to it, over all its epochs, so that what went away with a stream shows as missing. Not done here:
nothing is written to disk; what waits when the process dies is lost, at most the outbox, the fragment in flight and the
one being built.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from clawq.acting.outbox import Outbox, Parcel
from clawq.core import Control, FragmentSink, Weights, WeightsSource
from clawq.errors import (
    ClaimHeld,
    ClaimLost,
    StoreFull,
    StoreUnavailable,
    StreamRejected,
    WeightsCorrupt,
    WeightsGone,
)
from clawq.types import Fragment, Voided

log = logging.getLogger(__name__)
T = TypeVar("T")


class OpenSink(FragmentSink, Protocol):
    """A sink that holds a claim until it is closed."""

    def close(self, all_sent: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long the sender waits for what, in seconds.

    Attributes:
        poll_s: between looks at the control record while there is nothing to send.
        eager_s: the same while there are no weights yet, while the learner has too much unread, and while the env loop
            waits for newer weights.
        first_s: the first pause when Redis is away; it doubles up to
        longest_s: the longest one.
    """

    poll_s: float = 0.25
    eager_s: float = 0.05
    first_s: float = 0.05
    longest_s: float = 2.0


class Sender:
    """Sends an outbox and follows control record and weights, in a thread of its own.

    Args:
        outbox: what to send.
        sink: the slot's stream, claimed; closed by `close`.
        reopen: takes a new claim and epoch on the same slot.
        encode: fragment -> bytes.
        weights: where weights come from.
        pauses: how long to wait for what.
    """

    def __init__(
        self,
        outbox: Outbox,
        sink: OpenSink,
        reopen: Callable[[], OpenSink],
        encode: Callable[[Fragment], bytes | bytearray],
        weights: WeightsSource,
        pauses: Pauses | None = None,
    ) -> None:
        self._outbox, self._sink, self._reopen = outbox, sink, reopen
        self._encode, self._source = encode, weights
        self._pauses = pauses or Pauses()
        self._books = _Books(sink.epoch)
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._changed = threading.Event()
        self._view = View()
        self._away = self._hurried = False
        #: Whether a fragment was taken from the outbox, and is not known to be sent.
        self._stranded = False
        #: How long sending waited because Redis was out of memory (`full`) or not there (`away`).
        self.waited_s = {"full": 0.0, "away": 0.0}
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    @property
    def view(self) -> "View":
        """What is known now; replaced, never changed."""
        return self._view

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the view changes, or for the timeout."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def look(self) -> None:
        """Look for control record and weights now, instead of at the next regular time."""
        self._outbox.interrupt()

    def hurry(self, on: bool) -> None:
        """Look often from now on, since the env loop waits for newer weights; or not any more."""
        if on and not self._hurried:
            self._outbox.interrupt()
        self._hurried = on

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything in the outbox was sent; False if that took too long or cannot happen any more."""
        self._idle.clear()
        if not self._thread.is_alive():
            return False
        self._outbox.interrupt()
        return self._idle.wait(timeout_s) and not len(self._outbox) and self._view.ended is None

    def close(self) -> None:
        """Stop the thread and give the slot back. Idempotent; what was not sent is lost, and counted by the sink."""
        self._stop.set()
        self._outbox.interrupt()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        try:
            control = self._view.control
            over = control is not None and control.stop
            # What a run that is over does not want any more is not lost.
            self._sink.close(all_sent=over or not (len(self._outbox) or self._stranded or self._view.failure))
        except (StoreUnavailable, StoreFull, ClaimLost):
            log.info("the claim of the slot was not given back; it ends by itself")

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self._view.ended is None:
                parcel = self._outbox.take(self._pause())
                if parcel is None:
                    self._idle.set()
                    self._try(lambda: self._sink.poll())
                else:
                    self._deliver(parcel)
                self._fetch_weights()
        except BaseException as error:  # the env loop raises it again in its own thread
            self._note(failure=error)
        finally:
            self._idle.set()

    def _pause(self) -> float:
        known = self._view
        settled = known.control is not None and known.weights is not None and not (known.paced or self._hurried)
        return self._pauses.poll_s if settled else self._pauses.eager_s

    def _deliver(self, parcel: Parcel) -> None:
        """Send one fragment, however long it takes."""
        self._stranded = True
        self._books.open(parcel)
        self._hold_back()
        sent = self._try(lambda: self._sink.send(*self._stamped(parcel.fragment)))
        if sent:
            self._books.sent(parcel.fragment)
        self._stranded = not sent

    def _stamped(self, fragment: Fragment) -> tuple[int, bytes | bytearray]:
        stamped = self._books.stamp(fragment)
        return stamped.meta.seq, self._encode(stamped)

    def _hold_back(self) -> None:
        """Wait while the learner has more unread than the window allows."""
        while (control := self._view.control) and self._sink.unread_bytes() >= control.window_bytes:
            if control.stop or self._stop.wait(self._pauses.eager_s) or not self._try(lambda: self._sink.poll()):
                return

    def _try(self, call: Callable[[], Control | None]) -> bool:
        """Do it until it works; False if it never will (we stop, or somebody else has the slot)."""
        pause_s = self._pauses.first_s
        while not self._stop.is_set() and self._view.ended is None:
            try:
                self._seen(call())
                return True
            except (StreamRejected, ClaimLost) as error:
                log.warning("%s; taking a new epoch", error)
                self._new_epoch()
            except (StoreUnavailable, StoreFull) as error:
                if not self._away:
                    log.warning("%s; waiting for it", error)
                self._away = True
                self._note(attempts=self._view.attempts + 1)
                self.waited_s["full" if isinstance(error, StoreFull) else "away"] += pause_s
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, self._pauses.longest_s)
        return False

    def _seen(self, control: Control | None) -> None:
        if self._away:
            log.warning("Redis is back")
            self._away = False
        paced = control is not None and self._sink.unread_bytes() >= control.window_bytes
        self._note(control=control, paced=paced, attempts=self._view.attempts + 1)

    def _new_epoch(self) -> None:
        try:
            self._sink.close()
            self._sink = self._reopen()
            self._books.new_epoch(self._sink.epoch)
        except (ClaimHeld, ClaimLost) as error:
            log.warning("this actor ends: %s", error)
            self._note(ended="claim_lost")
        except (StoreUnavailable, StoreFull):
            self._stop.wait(self._pauses.first_s)

    def _fetch_weights(self) -> None:
        known = self._view
        have = known.weights.version if known.weights else 0
        if known.control is None or known.control.head <= have:
            return
        try:
            newer = self._source.fetch_newer(have)
        except (StoreUnavailable, StoreFull, WeightsGone):
            return  # the next look finds them
        except WeightsCorrupt as error:
            log.error("%s; going on with version %d", error, have)
            return
        if newer is not None:
            self._note(weights=newer)

    def _note(self, **changes: object) -> None:
        self._view = replace(self._view, **changes)  # type: ignore[arg-type]
        self._changed.set()


@dataclass(frozen=True, slots=True)
class View:
    """What a sender knows.

    Attributes:
        control: the control record, None if the run has none (yet, or not any more).
        weights: the newest weights that were fetched.
        paced: the learner has more unread than its window allows: act no further for now.
        attempts: finished tries to reach Redis, good or bad; it grows while the sender is alive.
        ended: why nothing will be sent any more.
        failure: the unexpected error that ended the sender.
    """

    control: Control | None = None
    weights: Weights | None = None
    paced: bool = False
    attempts: int = 0
    ended: str | None = None
    failure: BaseException | None = None


class _Books:
    """Turns an actor's running numbers into those of the epoch under which it sends; sums go on over its life."""

    def __init__(self, epoch: int) -> None:
        self._epoch = self._life = epoch
        self._index = self._first_index = 1
        self._dropped: Counter[str] = Counter()

    def open(self, parcel: Parcel) -> None:
        """That parcel is sent next."""
        self._index = parcel.fragment.meta.seq
        self._dropped += parcel.dropped

    def sent(self, fragment: Fragment) -> None:
        """It arrived: a new epoch would begin after it."""
        self._index = fragment.meta.seq + 1

    def new_epoch(self, epoch: int) -> None:
        """From the next fragment on (or the one in flight) numbers begin at 1."""
        self._epoch, self._first_index = epoch, self._index

    def stamp(self, fragment: Fragment) -> Fragment:
        meta = replace(
            fragment.meta,
            epoch=self._epoch,
            seq=self._seq(fragment.meta.seq),
            dropped=dict(self._dropped),
            voided=tuple(self._renumbered(notice) for notice in fragment.meta.voided),
            life=self._life,
        )
        return replace(fragment, meta=meta)

    def _renumbered(self, notice: Voided) -> Voided:
        # Rows that went out under an earlier epoch cannot be named any more; those of this one still are.
        seq = self._seq(notice.seq)
        return Voided(notice.env, seq, notice.t) if seq >= 1 else Voided(notice.env, 1, 0)

    def _seq(self, index: int) -> int:
        return index - self._first_index + 1


__all__ = ["OpenSink", "Pauses", "Sender", "View"]
