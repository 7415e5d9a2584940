"""Following a running run for an export: its fragments as they come, as one more reader of its streams, until it ends.

The reader begins with what the streams hold. As an optional one it is never waited for, and is told exactly what was
trimmed before it came; as a required one it holds trimming, actors and the end of the run back, and misses nothing. It
publishes its ledger as every reader does (`clawq log ledger RUN --reader NAME`), and leaves the registry at its end.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator

from clawq.core import Entry
from clawq.errors import StoreFull, StoreUnavailable, TransportError, UserError
from clawq.programs.source_end import SourceEnd
from clawq.specs import EnvSpec
from clawq.transport.books import Books
from clawq.transport.client import connect
from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.keys import LEARNER, NAME_PATTERN
from clawq.transport.readers import StreamReader
from clawq.transport.tally import Tally

log = logging.getLogger(__name__)

#: How long one read waits, and how often it is told how far this reader is, seconds.
READ_S, TELL_S = 0.2, 0.5
#: A Redis that is away for so long counts as gone, seconds.
PATIENCE_S = 60.0


def find_running(run_id: str, broker_url: str) -> RunRecord:
    """The run, if it is alive; UserError otherwise."""
    registry = RunRegistry(connect(broker_url))
    record = registry.get(run_id)
    if record is None:
        others = ", ".join(run.run_id for run in registry.list()) or "none"
        raise UserError(
            f"there is no run {run_id!r} alive on this Redis to follow; there are {others}. Without --follow, what a "
            "run's log holds is exported"
        )
    return record


def reader_name(wanted: str | None) -> str:
    """The name under which an export reads; UserError if it cannot be one."""
    if wanted is None:
        return re.sub(r"[^A-Za-z0-9._-]", "-", f"export-{socket.gethostname()}-{os.getpid()}")
    if wanted == LEARNER or not NAME_PATTERN.fullmatch(wanted):
        raise UserError(f"--reader: {wanted!r} cannot be the name of a reader; choose another")
    return wanted


class FollowedRun:
    """The fragments of one running run.

    Args:
        record: of the run.
        urls: of broker and data server.
        reader: under which name it is read.
        required: whether everything waits for this reader.

    Attributes:
        spec: of its environment.
        ended: why reading ended, in words.
    """

    def __init__(self, record: RunRecord, urls: tuple[str, str], reader: str, required: bool) -> None:
        broker, self._data = connect(urls[0]), connect(urls[1])
        what = f"export on {socket.gethostname()}, pid {os.getpid()}"
        self._reader = StreamReader(self._data, record.keys, reader, required=required, what=what)
        self._end = SourceEnd(self._data, broker, record.run_id, record.tag)
        self._tally, self._books = Tally(), Books(self._data, record.keys, reader)
        self._reader.tell_server(self._tally.on_server)
        self._reader.tell_slots(self._tally.on_slots)
        self.spec, self._run_id = EnvSpec.from_json(record.spec), record.run_id
        self.ended = ""
        self._told_s = 0.0

    @property
    def missed(self) -> int:
        """Fragments that were trimmed before they were read."""
        return self._tally.missed

    def entries(
        self, slots: Collection[str], stop: threading.Event, say: Callable[[str], None]
    ) -> Generator[Entry, None, None]:
        """Its fragments, those of a slot in the order of its stream, until it ends or `stop` is set.

        Args:
            slots: only these; none = all.
            stop: set by whoever wants the end.
            say: told when Redis is away.

        Raises:
            UserError: the name is taken by another reader, or this one was dropped.
        """
        try:
            yield from self._follow(slots, stop, say)
        finally:
            self._leave()

    def _follow(self, slots: Collection[str], stop: threading.Event, say: Callable[[str], None]) -> Iterator[Entry]:
        away_s: float | None = None
        while not self.ended:
            try:
                entries = self._reader.read(READ_S)
                away_s = None
            except (StoreUnavailable, StoreFull) as error:
                now_s = time.monotonic()
                if away_s is None:
                    say(f"waiting for Redis: {error}")
                away_s = now_s if away_s is None else away_s
                if stop.wait(READ_S) or now_s - away_s >= PATIENCE_S:
                    self.ended = f"Redis is away: {error}"
                continue
            except TransportError as error:
                raise UserError(f"{self._run_id} cannot be followed any more: {error}") from None
            for entry in entries:
                if entry.missed:
                    self._tally.miss(entry)
                    continue
                if not slots or entry.slot in slots:
                    yield entry
                # What was given out is written by now, as far as whole episodes are.
                self._tally.take(entry)
            self._look(stop)

    def _look(self, stop: threading.Event) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < TELL_S and not stop.is_set():
            return
        self._told_s = now_s
        try:
            self._tell()
            self._end.look(sum(self._reader.unread_entries().values()))
        except (StoreUnavailable, StoreFull):
            # The next read tells it.
            return
        if self._end.how is not None:
            self.ended = f"the run has {self._end.how}"
        elif stop.is_set():
            self.ended = "you stopped it; the run goes on"

    def _tell(self) -> None:
        if self._reader.server_changed():
            self._books.forget()
        self._books.publish(*self._tally.snapshot())
        cursors = self._reader.cursors()
        self._reader.acknowledge(cursors)
        self._reader.checkpointed(cursors)

    def _leave(self) -> None:
        try:
            self._reader.leave()
        except TransportError as error:
            log.info("while leaving: %s", error)
