"""Acknowledgements: what a reader tells of how far it has come, mirrored in Redis for actors and for trimming.

taken over     actors are paced by it; the learner's are held back while the streams have no room for more
checkpointed   never to be read again: trimming may go so far for this reader
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis

from clawq.transport.client import translated
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.retained import EntryId
from clawq.transport.stream import id_text, parse_ids
from clawq.transport.trimming import Trimming

#: What a reader wrote of itself is forgotten after so long, seconds: its run may have ended meanwhile.
_FORGOTTEN_S = 7 * 86_400
#: All that is taken over is told again this often, seconds, in case that somebody overwrote it.
TELL_ALL_S = 5.0
_NOTHING = (-1, -1)


class Acknowledgements:
    """Tells them.

    Args:
        client: of the data server.
        keys: of the run.
        reader: whose they are.
        lock: guards what is handled, and what `trimming` retains.
        trimming: of the learner's reader, knows how much room there is; None = no matter.
    """

    def __init__(
        self, client: redis.Redis, keys: RunKeys, reader: str, lock: threading.Lock, trimming: Trimming | None
    ) -> None:
        self._client: Any = client
        self._keys, self._reader = keys, reader
        self._lock, self._telling = lock, threading.Lock()
        self._trimming = trimming
        self._handled: dict[str, EntryId] = {}
        self._mirrored: dict[str, EntryId] = {}
        self._told_all_s = time.monotonic()
        self._kept: dict[str, str] = {}

    def acknowledge(self, cursors: Mapping[str, str]) -> None:
        """Entries up to these cursors were taken over."""
        with self._lock:
            self._handled |= parse_ids(cursors)
        self.tell()

    def tell(self) -> None:
        """Mirror what was taken over, as far as there is room."""
        with self._telling:
            with self._lock:
                due = self._handled
                if self._trimming is not None and self._trimming.room_bytes is not None:
                    due = self._trimming.retained.within(due, self._trimming.room_bytes)
                now_s = time.monotonic()
                if now_s - self._told_all_s >= TELL_ALL_S:
                    # Whatever became of it in Redis: an actor that waits for a cursor sends nothing that would move it.
                    self._told_all_s, due = now_s, dict(due)
                else:
                    due = {slot: entry for slot, entry in due.items() if entry != self._mirrored.get(slot)}
            if due:
                self._write(self._keys.cursors(self._reader), {slot: id_text(entry) for slot, entry in due.items()})
                self._mirrored |= due

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """Entries up to these cursors will never have to be read again; slots that are not named any more are gone."""
        with self._telling:
            with self._lock:
                before = self._kept
            changed = any(before.get(slot) != entry for slot, entry in cursors.items())
            gone = [slot for slot in before if slot not in cursors]
            if changed or gone:
                self._write(self._keys.kept(self._reader), cursors, gone)
            with self._lock:
                self._kept = dict(cursors) if before is self._kept else {}

    def begin_anew(self) -> None:
        """The server may have lost what was mirrored: tell all with the next call. Under the lock."""
        self._mirrored, self._kept = {}, {}

    def forget(self, slots: Iterable[str]) -> None:
        """The streams of these slots are gone. Under the lock."""
        for slot in slots:
            self._handled.pop(slot, None)
            self._mirrored.pop(slot, None)

    def withheld_bytes(self) -> int:
        """Bytes that were taken over and not told, for want of room; of a reader that trims. Under the lock."""
        assert self._trimming is not None
        retained = self._trimming.retained
        told = {slot: self._mirrored.get(slot, _NOTHING) for slot in self._handled}
        return retained.bytes_after(told) - retained.bytes_after(told | self._handled)

    def _write(self, key: str, cursors: Mapping[str, str], gone: Sequence[str] = ()) -> None:
        pipe = self._client.pipeline(transaction=False)
        if cursors:
            pipe.hset(key, mapping=dict(cursors))
        if gone:
            pipe.hdel(key, *gone)
        if self._reader != LEARNER:
            pipe.expire(key, _FORGOTTEN_S)
        with translated(self._client):
            pipe.execute()
