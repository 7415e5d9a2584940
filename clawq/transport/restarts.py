"""Restarts: a data server that came back, empty or older than it was, as one reader notices and mends it.

It is noticed by its changed run id (a finished run that goes on, its keys deleted meanwhile, by a token in them). Then
every cursor that lies above what its stream has ever given out is set back, because XREAD from there would return
nothing, for ever, without an error. A server that is not the one of which the cursors are (from a checkpoint) is told
of, with what was found there.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis

from clawq.core import Stream, Vanished
from clawq.transport.backlog import Backlog
from clawq.transport.books import added_entries
from clawq.transport.client import translated
from clawq.transport.keys import RunKeys
from clawq.transport.positions import START, Positions
from clawq.transport.stream import id_text, last_generated, parse_trimmed

_NOTHING = (-1, -1)


def server_of(client: redis.Redis, keys: RunKeys, before: str = "") -> str:
    """What the streams of a run are on: another one when the server was restarted, or the run's keys made anew.

    Args:
        client: of the data server.
        keys: of the run.
        before: what it was; while the keys are deleted it is that still.
    """
    pipe: Any = client.pipeline(transaction=False)
    pipe.info("server")
    pipe.get(keys.born)
    with translated(client):
        about, born = pipe.execute()
    run_id = str(about["run_id"])
    if born is None:
        return before if before.startswith(run_id) else f"{run_id}/"
    return f"{run_id}/{born[:64].decode(errors='replace')}"


def bear(client: redis.Redis, keys: RunKeys) -> None:
    """Begin a life of the run's keys, if they have none."""
    with translated(client):
        client.set(keys.born, secrets.token_hex(8), nx=True)


class Restarts:
    """Follows which server it is.

    Args:
        client: of the data server.
        keys: of the run.
        positions: of the reader; set back where that is needed.
        backlog: of the reader.
        server: that the positions are of (`server_of`); empty if they are of none.

    Attributes:
        server: as it was last looked at; empty before that.
        on_server: told when the server is another one: which, and for each slot what was found.
        kept: gives of a slot how many entries that were not read are not lost with it: an archive has them.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, positions: Positions, backlog: Backlog, server: str) -> None:
        self.server = ""
        self.on_server: Callable[[str, Mapping[str, Vanished]], None] = lambda server, found: None
        self.kept: Callable[[str], int] = lambda slot: 0
        self._client: Any = client
        self._keys, self._positions, self._backlog = keys, positions, backlog
        self._told_server, self._changed = server, False
        #: Slots of that server: they are told of though their cursors were set back, and the server is empty by now.
        self._known = {*positions.cursors, *backlog.unread}

    def take_changed(self) -> bool:
        """Whether the server was restarted since the last call. Under the lock of the positions."""
        changed, self._changed = self._changed, False
        return changed

    def set_back_vanished(self, slots: Iterable[str]) -> None:
        """Begin anew where a stream has never given out what we read from it: it is another stream by now."""
        for slot in slots:
            last = last_generated(self._client, self._keys.stream(slot)) or _NOTHING
            if last < self._positions.at(slot) and not self._was_swept(slot):
                with self._positions.lock:
                    self._positions.set_back(slot, last)

    def _was_swept(self, slot: str) -> bool:
        """Whether the slot's stream was taken away when all that we read had been trimmed from it."""
        with translated(self._client):
            told = self._client.hget(self._keys.trimmed, slot)
        return parse_trimmed(told)[0] >= self._positions.at(slot) > START

    def tell(self, server: str, streams: Mapping[str, Stream]) -> None:
        """If this is another server than was told of, say what its streams are; entries not read of the old are lost.

        Args:
            server: which it is now.
            streams: of the slots that it knows.
        """
        if server != self._told_server:
            if self._told_server:
                with self._positions.lock:
                    # (A writer that has not noticed yet goes on in its epoch: then nothing was set back.)
                    self._positions.count_anew(())
            slots = self._known.union(streams, self._positions.cursors, self._backlog.unread)
            found = {slot: self._found(slot, streams.get(slot)) for slot in slots} if self._told_server else {}
            self.on_server(server, found)
            self._told_server = server
        self._known = set(streams)

    def _found(self, slot: str, known: Stream | None) -> Vanished:
        lost = max(0, self._backlog.of(slot) - self.kept(slot))
        if known is None:
            # A writer that has not noticed the new server may have written here: when its slot is registered, the
            # stream is read from its beginning.
            return Vanished(0, lost, id_text(START))
        stream, cursor = self._keys.stream(slot), id_text(self._positions.at(slot))
        pipe = self._client.pipeline(transaction=True)
        pipe.xinfo_stream(stream)
        pipe.xlen(stream)
        # Few: the stream is as young as the server.
        pipe.xrange(stream, max=cursor)
        with translated(self._client):
            about, length, behind = pipe.execute(raise_on_error=False)
        added = added_entries(self._client, about)
        if isinstance(length, Exception) or isinstance(behind, Exception):
            return Vanished(0, lost, cursor, known)  # something of another type: no stream
        trimmed = 0 if added is None else added - length
        return Vanished(trimmed + len(behind), lost, cursor, known)

    def settle(self, server: str, slots: Iterable[str]) -> None:
        """All that follows from which server it is was done.

        Args:
            server: which it is now.
            slots: that were known before.
        """
        with self._positions.lock:
            # A reader that was just made has missed nothing.
            if self.server and server != self.server:
                self._changed = True
                self._positions.count_anew(slots)
            self.server = server
