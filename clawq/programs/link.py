"""The learner's line to Redis: one thread, so that no update ever waits for the network.

The learner's main thread leaves things here: new weights and numbers for the board (the newest of each wins);
the thread sends them when it can, keeps the learner's claim alive, trims the streams behind the last checkpoint and
brings back the run's events. While Redis is away it waits with back-off and says so in `trouble`.

If the data server comes back empty (its run id changed), everything that it must hold is written again: control record
and last weights. Losing the claim to another learner ends the run: `failure` is set, and the main thread raises it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from clawq.core import Control
from clawq.errors import ClaimLost, RecordUnreadable, StoreFull, StoreUnavailable, TransportError
from clawq.programs.following import Following
from clawq.programs.upkeep import Upkeep
from clawq.transport.archiver import Archiver
from clawq.transport.books import Books, Position
from clawq.transport.claims import Claim
from clawq.transport.control import Board, ControlRecord, Event, Events, Heartbeats, Orders, PaceRecord
from clawq.transport.keys import ARCHIVE
from clawq.transport.lives import LostLives
from clawq.transport.readers import StreamReader
from clawq.transport.stream import parse_id
from clawq.transport.weights import WeightsPublisher
from clawq.types import Array

log = logging.getLogger(__name__)

#: How often numbers are sent, streams trimmed and events read, seconds.
TICK_S = 0.2
#: Pause after a failure of Redis, seconds.
RETRY_S = 0.5
#: How often streams and workers are looked at, seconds.
SWEEP_INTERVAL_S = 1.0
#: Events that wait for the main thread; more are dropped oldest first (they stay in Redis).
EVENTS_HELD = 1000


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One weights version on its way out; with a `pin` it is sent whatever comes after it, and kept under that name."""

    version: int
    arrays: dict[str, Array]
    updates: int
    metadata: dict[str, Any]
    pin: str | None = None


@dataclass(frozen=True, slots=True)
class Wires:
    """The Redis side that a link works with."""

    claim: Claim
    publisher: WeightsPublisher
    control: ControlRecord
    events: Events
    orders: Orders
    board: Board
    reader: StreamReader
    heartbeats: Heartbeats
    upkeep: Upkeep | Following
    archiver: Archiver | None = None
    books: Books | None = None
    pace: PaceRecord | None = None
    lives: LostLives | None = None


class Link:
    """See the module's text. Everything public may be called from the main thread at any time.

    Args:
        wires: the Redis side.
        desired: the control record that actors shall see (its head is moved by publishing).
        stream_budget_bytes: how much the streams may hold before they are trimmed.
        after: ids of the last event and of the last order of earlier sessions, which are not for this one.
        first_window: the window until the coordinator has decided one; None = the largest.
    """

    def __init__(
        self,
        wires: Wires,
        desired: Control,
        stream_budget_bytes: int,
        after: tuple[str, str] = ("0-0", "0-0"),
        first_window: int | None = None,
    ) -> None:
        self._wires = wires
        self._desired = desired
        self.stream_budget_bytes = stream_budget_bytes
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ending = threading.Event()
        #: On their way out, by version: the newest, and before it those that are pinned.
        self._weights: deque[Outgoing] = deque()
        self._sent: Outgoing | None = None
        self._control_due = True
        self._window_bytes = desired.window_bytes
        #: The window until the coordinator decides, and then what it decided; None = the largest.
        self._paced: int | None = None if wires.pace is None else first_window
        self._board: dict[str, float | str] = {}
        self._checkpointed: dict[str, str] = {}
        self._events: deque[Event] = deque(maxlen=EVENTS_HELD)
        self._last_event, self._last_order = after
        self._notices: deque[tuple[str, dict[str, Any]]] = deque(maxlen=EVENTS_HELD)
        self._figures: dict[str, float] = {}
        self._shortened = 0
        #: Actors that ended without a word, on this data server and on those before it.
        self.lost_lives = 0
        self._swept_s = 0.0
        #: Gives the reader's positions and sums, to be published; None = they are not.
        self.books: Callable[[], tuple[Mapping[str, Position], Mapping[str, Any]]] | None = None
        self.trouble: str | None = None
        #: How often the data server was found to have lost what it held.
        self.restores = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="clawq-link", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Send what is left and end; whether everything was sent in time. Idempotent."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._weights

    # --- what the main thread leaves here ------------------------------------------------------------------------

    def publish(self, outgoing: Outgoing) -> None:
        """Publish these weights soon; those that still wait are replaced, but for pinned ones: somebody wants them."""
        with self._lock:
            kept = {each.pin: each for each in self._weights if each.pin is not None and each.pin != outgoing.pin}
            self._weights = deque([*kept.values(), outgoing])
        self._wake.set()

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """A checkpoint with these cursors is on disk: what lies before them may be trimmed."""
        with self._lock:
            self._checkpointed = dict(cursors)

    def show(self, metrics: Mapping[str, float | str]) -> None:
        """Numbers for the board."""
        with self._lock:
            self._board.update(metrics)

    def notify(self, kind: str, **facts: Any) -> None:
        """Append an event to the run's events soon."""
        with self._lock:
            self._notices.append((kind, facts))
        self._wake.set()

    def allow(self, window_bytes: int) -> None:
        """The most that may lie unread in one slot's stream, from now on."""
        with self._lock:
            self._desired = replace(self._desired, window_bytes=window_bytes)
            self._control_due = True
        self._wake.set()

    @property
    def window_bytes(self) -> int:
        """The window that actors see: what the coordinator asked for, within what configuration and budget allow."""
        with self._lock:
            most = self._window_bytes
            return most if self._paced is None else max(1, min(self._paced, most))

    def end_actors(self) -> None:
        """The run is over: actors end."""
        with self._lock:
            self._desired = replace(self._desired, stop=True)
            self._control_due = True
        self._wake.set()

    def take_events(self) -> list[Event]:
        """The run's events since the last call."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
        return taken

    @property
    def published_version(self) -> int:
        """Newest version that is in Redis, 0 if none."""
        return self._sent.version if self._sent is not None else 0

    def figures(self) -> dict[str, float]:
        """What this side knows of streams and workers, by metric name."""
        archiver = self._wires.archiver
        with self._lock:
            return {**self._figures, **(archiver.metrics() if archiver is not None else {})}

    @property
    def note(self) -> str | None:
        """What is wrong with Redis or the archive, and why actors wait, for people; None while all is well."""
        archiver = self._wires.archiver
        return self.trouble or (archiver.trouble if archiver is not None else None) or self._wires.upkeep.held

    @property
    def pressed(self) -> bool:
        """Whether the streams need room that a checkpoint would make."""
        return self._wires.upkeep.pressed

    @property
    def source_ended(self) -> str | None:
        """How the run that is followed ended (`finished`, `stopped`), once nothing is left to read there."""
        upkeep = self._wires.upkeep
        return upkeep.source_ended if isinstance(upkeep, Following) else None

    def leave_source(self) -> None:
        """This follower is done for good: nobody shall wait for it."""
        if isinstance(self._wires.upkeep, Following):
            with contextlib.suppress(TransportError):
                self._wires.reader.leave()

    def release_reader(self) -> None:
        """This process reads no more; its place among the readers is kept."""
        with contextlib.suppress(TransportError):
            self._wires.reader.close()

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self.failure is not None:
            raise self.failure

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = False
        while not last:
            last = self._ending.is_set()
            try:
                self._tick()
                self._recovered()
            except (StoreUnavailable, StoreFull) as error:
                self._troubled(error)
                if isinstance(error, StoreFull):
                    self._make_room()
                if not last:
                    self._ending.wait(RETRY_S)
            # Whatever it is, the main thread must learn of it: nothing dies quietly.
            except BaseException as error:
                if not isinstance(error, ClaimLost):
                    log.exception("the learner's line to Redis failed")
                self.failure = error
                return
            if not last:
                self._wake.wait(TICK_S)
                self._wake.clear()

    def _tick(self) -> None:
        if self._wires.claim.renewal_due and self._wires.claim.renew():
            log.warning("the learner's claim had lapsed and was taken anew")
            self._restore()
        if self._wires.reader.server_changed():
            log.warning("the data Redis was restarted; control record and weights are written again")
            self._restore()
        self._tell_shortened()
        self._fit_window()
        self._follow_pace()
        self._send_control()
        self._send_weights()
        self._send_small()
        # Before trimming: what was settled, but is not published as settled, must not leave the streams.
        self._publish_books()
        self._wires.upkeep.tend(self._checkpointed, self._window_bytes, self._beside())
        self._receive()
        self._look_around()

    def _make_room(self) -> None:
        """Whatever was refused for want of memory waits; trimming is not refused."""
        with contextlib.suppress(StoreUnavailable, StoreFull):
            self._wires.upkeep.squeeze(self._checkpointed, self._window_bytes, self._beside())

    def _beside(self) -> Mapping[str, Mapping[str, str]]:
        """What this process's archive has on the disk for sure, if trimming is to wait for it."""
        archiver = self._wires.archiver
        archived = archiver.holds() if archiver is not None else None
        return {} if archived is None else {ARCHIVE: archived}

    def _tell_shortened(self) -> None:
        """Say which streams lost their end: what was in it is in the ring, but the log has it no more."""
        for slot, (was, now) in self._wires.reader.take_shortened().items():
            self._shortened += 1
            self.notify("stream_shortened", slot=slot, read_up_to=was, ends_at=now)
            log.warning(
                "the data Redis lost the end of %s's stream: it was read up to %s, and ends at %s; it is read on from "
                "what actors send now",
                slot, was, now,
            )  # fmt: skip

    def _send_weights(self) -> None:
        while True:
            with self._lock:
                outgoing = self._weights[0] if self._weights else None
            if outgoing is None:
                return
            self._wires.publisher.publish(
                outgoing.arrays, outgoing.version, outgoing.updates, outgoing.metadata, outgoing.pin
            )
            with self._lock:
                self._sent = outgoing
                if self._weights and self._weights[0] is outgoing:
                    self._weights.popleft()

    def _send_small(self) -> None:
        with self._lock:
            board, notices = self._board, list(self._notices)
            self._board = {}
            self._notices.clear()
        try:
            for kind, facts in notices:
                self._wires.events.append(kind, **facts)
            self._wires.board.write(board)
        except TransportError:
            with self._lock:
                self._board = board | self._board
                self._notices.extendleft(reversed(notices))
            raise

    def _publish_books(self) -> None:
        if self.books is not None and self._wires.books is not None:
            self._wires.books.publish(*self.books())

    def _receive(self) -> None:
        events, orders = self._wires.events.read(self._last_event), self._wires.orders.read(self._last_order)
        self._last_event = events[-1].id if events else self._last_event
        self._last_order = orders[-1].id if orders else self._last_order
        with self._lock:
            self._events.extend([*events, *orders])

    def _fit_window(self) -> None:
        """Narrow the window where there are too many slots for the budget."""
        with self._lock:
            fits = self._wires.upkeep.window(self._desired.window_bytes)
            self._control_due |= fits != self._window_bytes
            self._window_bytes = fits

    def _follow_pace(self) -> None:
        """Take over what this session's coordinator decided: it decides, we alone write, under our claim."""
        if self._wires.pace is None:
            return
        paced = self._wires.pace.read()
        with self._lock:
            if paced is not None and paced != self._paced:
                self._paced, self._control_due = paced, True

    def _send_control(self) -> None:
        with self._lock:
            due, desired = self._control_due, self._desired
            self._control_due = False
        if not due:
            return
        try:
            self._wires.control.write(
                stop=desired.stop, window_bytes=self.window_bytes, config_epoch=desired.config_epoch
            )
        except TransportError:
            self._control_due = True
            raise

    def _restore(self) -> None:
        """Write again what the data server must hold; it came back empty or our claim had run out."""
        # What the server had is gone, and its clock may be behind.
        if parse_id(self._wires.events.newest_id()) < parse_id(self._last_event):
            self._last_event = "0-0"
        if parse_id(self._wires.orders.newest_id()) < parse_id(self._last_order):
            self._last_order = "0-0"
        if self._wires.books is not None:
            self._wires.books.forget()
        with self._lock:
            self._control_due = True
            if not self._weights and self._sent is not None:
                self._weights.append(self._sent)
        self.restores += 1

    def _look_around(self) -> None:
        """Note what streams and workers look like, and take drained streams of gone actors away."""
        now_s = time.monotonic()
        if now_s - self._swept_s < SWEEP_INTERVAL_S:
            return
        self._swept_s = now_s
        self._mend_control()
        beats = self._wires.heartbeats.prune()
        readers = self._wires.upkeep.look(self.window_bytes)
        if self._wires.lives is not None:
            self.lost_lives = self._wires.lives.count()
        with self._lock:
            self._figures = {
                **readers,
                "shortened_streams": float(self._shortened),
                "workers": float(len(beats)),
                "slots": float(sum(beat.slots for beat in beats.values())),
            }

    def _mend_control(self) -> None:
        """Write the control record again if it is gone or spoiled: it is ours, and actors wait for it."""
        try:
            if self._wires.control.read() is not None:
                return
            why = "it is gone"
        except RecordUnreadable as error:
            why = str(error)
        log.warning("the control record is written again: %s", why)
        with self._lock:
            fields: dict[str, int] = {"stop": self._desired.stop, "config_epoch": self._desired.config_epoch}
        if self._sent is not None:
            fields["head"] = self._sent.version
        self._wires.control.write(window_bytes=self.window_bytes, **fields)
        self._wires.reader.tell_required()

    def _troubled(self, error: TransportError) -> None:
        if self.trouble is None:
            log.warning("Redis: %s; going on when it is back", error)
        self.trouble = str(error)

    def _recovered(self) -> None:
        if self.trouble is not None:
            log.warning("Redis is back")
        self.trouble = None
