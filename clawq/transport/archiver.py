"""The archive's reader of the streams: a thread of the learner that writes every entry to disk, once.

It is a reader of its own (`archive`), with its own cursors, which are nothing but the last records of the archive: what
was written is never read again, what was not is read again. It is a *required* reader: the streams are trimmed only
behind what is on the disk for sure (`holds`).

When the disk refuses (full, gone), that is told, the entry at hand is kept and tried again, training goes on, and the
streams hold what is not archived for as long as their budget allows. Then `on_full` decides: `gap` lets the streams be
trimmed all the same (what goes is missing from the archive, and counted), `block` does not (the streams fill, and
actors are held back). While Redis is away the thread waits. It never ends the run.
"""

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Literal

from clawq.core import Entry, Slots
from clawq.errors import StoreFull, StoreUnavailable
from clawq.transport.archive_writer import ArchiveWriter
from clawq.transport.books import Books
from clawq.transport.readers import StreamReader
from clawq.transport.tally import Tally
from clawq.types import Metrics

log = logging.getLogger(__name__)

#: How long one read waits for entries, seconds: what closing may take beyond the writing.
READ_S = 0.2
#: Pause after a refusal of the disk or of Redis, seconds: first and longest.
BACKOFF_S = (0.1, 5.0)


class Archiver:
    """Copies the streams into an archive until it is closed.

    Args:
        reader: of the streams, with the writer's cursors; nobody else reads with it.
        writer: closed with this.
        on_full: see the module's text.
        ledger: what was done with the entries so far, and where that is published.
    """

    def __init__(
        self,
        reader: StreamReader,
        writer: ArchiveWriter,
        on_full: Literal["gap", "block"] = "gap",
        ledger: tuple[Tally, Books] | None = None,
    ) -> None:
        self._reader, self._writer, self._on_full = reader, writer, on_full
        self._lock = threading.Lock()
        self._durable = writer.durable_cursors()
        self._tally = Tally() if ledger is None else ledger[0]
        self._books = None if ledger is None else ledger[1]
        #: What is on the disk for sure: cursors, and the tally up to there.
        self._synced, self._settled = self._durable, self._tally.snapshot()
        reader.tell_server(self._tally.on_server)
        reader.tell_slots(self._on_slots)
        self._metrics = self._read_metrics()
        self._pending: deque[Entry] = deque()
        #: What was told: slot -> id taken over.
        self._taken: dict[str, str] = {}
        self._refused = False
        #: Why it is not getting on, for people; None while all is well.
        self.trouble: str | None = None
        #: The unexpected error that ended the thread.
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._deadline_s = 0.0
        self._thread = threading.Thread(target=self._run, name="clawq-archiver", daemon=True)

    def start(self) -> "Archiver":
        """Begin; returns self."""
        self._thread.start()
        return self

    def holds(self) -> dict[str, str] | None:
        """Slot -> id up to which the streams may be trimmed; None: this reader does not hold them back now."""
        if (self._refused or self.failure is not None) and self._on_full == "gap":
            return None
        with self._lock:
            return dict(self._durable)

    def metrics(self) -> Metrics:
        """`archive/...` by the names of clawq.metrics.CATALOGUE."""
        with self._lock:
            return dict(self._metrics)

    def close(self, timeout_s: float = 5.0) -> None:
        """Archive what the streams hold now, as far as that is done in time, and end. Idempotent."""
        self._deadline_s = time.monotonic() + timeout_s
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s + 2.0)
        if self._thread.ident is None:
            self._writer.close()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._copy()
            self._end()
        # It must not end the run; whoever looks at `failure` or the log learns of it.
        except BaseException as error:
            log.exception("the archive is not written any more")
            self.failure = error
            self.trouble = f"the archive is not written any more: {error}"

    def _copy(self) -> None:
        backoff_s = BACKOFF_S[0]
        while True:
            # Asked before reading: what came before the stop is in.
            last = self._stop.is_set()
            if self._turn() and last:
                return
            if last and time.monotonic() >= self._deadline_s:
                log.warning("the archive ends with entries unread: %s", self.trouble or "there was no time for them")
                return
            if self.trouble is None:
                backoff_s = BACKOFF_S[0]
                continue
            # Not an event's wait: what is to be written before the end is tried again in short steps.
            time.sleep(BACKOFF_S[0]) if last else self._stop.wait(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    def _turn(self) -> bool:
        """Read and write once; True if there was nothing (more) to write."""
        try:
            self._read()
            drained = not self._pending
            self._write()
            self._acknowledge()
        except (StoreUnavailable, StoreFull) as error:
            self._troubled(f"the archive waits for Redis: {error}", refused=False)
        except OSError as error:
            self._troubled(refused_text(self._writer.folder, error, self._on_full), refused=True)
        else:
            self._recovered()
            return drained
        return False

    def _end(self) -> None:
        try:
            self._writer.sync()
            self._settle()
            self._acknowledge()
        except (StoreUnavailable, StoreFull, OSError) as error:
            log.warning("while closing the archive: %s", error)
        self._writer.close()

    def _read(self) -> None:
        if not self._pending:
            # What was trimmed before it was read shows as a gap of the archive.
            for entry in self._reader.read(READ_S):
                self._pending.append(entry)

    def _write(self) -> None:
        while self._pending:
            entry = self._pending[0]
            if entry.missed:
                self._tally.miss(entry)
            else:
                self._tally.take(entry, self._writer.append(entry))
            self._pending.popleft()
            self._sync()
        self._sync()

    def _sync(self) -> None:
        if self._writer.sync_if_due():
            self._settle()

    def _settle(self) -> None:
        """All that was written is on the disk."""
        self._synced, self._settled = self._writer.durable_cursors(), self._tally.snapshot()

    def _on_slots(self, slots: Slots) -> None:
        self._tally.on_slots(slots)
        self._writer.forget([slot for slot in self._writer.cursors() if slot not in slots.epochs])

    def _acknowledge(self) -> None:
        """Pass on what was taken over, so that actors go on, and what is on the disk by now, so that it is trimmed."""
        written, durable = self._writer.cursors(), self._synced
        metrics = self._read_metrics()
        if self._reader.server_changed():
            self._taken = {}
            if self._books is not None:
                self._books.forget()
        # Before it is trimmed.
        if self._books is not None:
            self._books.publish(*self._settled)
        with self._lock:
            self._durable, self._metrics = durable, metrics
        # The disk is synced once a second: waiting for that, an actor could send one window a second.
        self._reader.acknowledge({slot: entry for slot, entry in written.items() if self._taken.get(slot) != entry})
        self._taken = written
        self._reader.checkpointed(durable)

    def _read_metrics(self) -> Metrics:
        writer = self._writer
        return {
            "archive/bytes": writer.file_bytes,
            "archive/fragments": writer.entries - writer.dropped_entries,
            "archive/dropped_fragments": writer.dropped_entries,
            "archive/gap_fragments": writer.gap_fragments,
        }

    def _troubled(self, text: str, *, refused: bool) -> None:
        if self.trouble is None:
            log.warning("%s", text)
        self.trouble, self._refused = text, refused

    def _recovered(self) -> None:
        if self.trouble is not None:
            log.warning("the archive is being written again")
        self.trouble, self._refused = None, False


def refused_text(folder: Path, error: OSError, on_full: Literal["gap", "block"]) -> str:
    """What to say of a disk that refuses: why, what follows, and what to do."""
    follows = {
        "gap": "training goes on; what the streams cannot keep meanwhile will be missing there (archive.on_full: gap)",
        "block": "nothing is lost: the streams keep it, and actors wait when these are full (archive.on_full: block)",
    }
    why = error.strerror or error
    return f"the archive {folder} cannot be written: {why}; {follows[on_full]}. Make room there: it goes on by itself"
