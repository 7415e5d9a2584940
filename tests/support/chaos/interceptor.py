"""A wire that reads along: it knows which Redis commands pass, and fails some of them in one of three ways.

    request    the commands never arrive
    response   they are carried out, and nobody is told
    flight     the line breaks in the midst of them

In each case both ends then see the connection end, as with Ray's injected failures of RPCs. What is failed is a batch:
all commands that were sent in one go, such as one pipeline.
"""

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random

from wire import Wire

#: The words of each command in a batch.
Batch = Sequence[Sequence[bytes]]
WAYS = ("request", "response", "flight")


class Interceptor(Wire):
    """A Wire that asks `judge` about each batch.

    Attributes:
        judge: batch -> one of WAYS, or "" to let it pass. Called in the thread of its connection; it may do harm of its
            own before it answers, while the batch waits.
        failed: (class of the batch, way) -> how often.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.judge: Callable[[Batch], str] = lambda batch: ""
        self.failed: Counter[tuple[str, str]] = Counter()
        self._after: Callable[[], None] | None = None
        super().__init__(target)

    def trap(self, suits: Callable[[Batch], bool], way: str, deed: Callable[[], None]) -> threading.Event:
        """Fail the first batch that suits, and do the deed: before it would go on, or (`response`) when it was done.

        Returns an event that is set when that has happened.
        """
        lock, sprung, done = threading.Lock(), threading.Event(), threading.Event()

        def act() -> None:
            deed()
            done.set()

        def judge(batch: Batch) -> str:
            with lock:
                if sprung.is_set() or not suits(batch):
                    return ""
                sprung.set()
            if way == "response":
                self._after = act
            else:
                act()
            return way

        self.judge = judge
        return done

    def answered(self) -> None:
        """A batch whose response is to be lost was carried out."""
        after, self._after = self._after, None
        if after is not None:
            after()

    def _carry(self, ours: socket.socket, theirs: socket.socket) -> Iterable[Callable[[], None]]:
        line = _Line(self, ours, theirs)
        return line.requests, line.responses


class _Line:
    """One connection."""

    def __init__(self, wire: Interceptor, ours: socket.socket, theirs: socket.socket) -> None:
        self._wire, self._ours, self._theirs = wire, ours, theirs
        #: The next response is not passed on, and is the last one.
        self._deaf = threading.Event()

    def requests(self) -> None:
        held = b""
        with contextlib.suppress(OSError):
            while chunk := self._ours.recv(1 << 20):
                held += chunk
                batch, size = parse(held)
                if not batch and held[:1] == b"*":
                    continue  # the rest of a command is still to come
                sent, held = (held[:size], held[size:]) if batch else (held, b"")
                way = self._wire.judge(batch) if batch else ""
                if way:
                    self._wire.failed[class_of(batch), way] += 1
                if way == "request":
                    break
                if way == "flight":
                    self._theirs.sendall(sent[: max(1, len(sent) // 2)])
                    break
                if way == "response":
                    self._deaf.set()
                if not self._wire.lost:
                    self._theirs.sendall(sent)
        if not self._deaf.is_set():
            self._wire._hang_up(self._ours, self._theirs)

    def responses(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := self._theirs.recv(1 << 20):
                if self._deaf.is_set():
                    self._wire.answered()
                    break
                if not self._wire.lost:
                    self._ours.sendall(chunk)
        self._wire._hang_up(self._ours, self._theirs)


def parse(held: bytes) -> tuple[list[list[bytes]], int]:
    """(the whole commands at the beginning, their length in bytes)."""
    batch: list[list[bytes]] = []
    at = 0
    while held[at : at + 1] == b"*":
        words: list[bytes] = []
        end = held.find(b"\r\n", at)
        if end < 0:
            break
        count, place = int(held[at + 1 : end]), end + 2
        for _ in range(count):
            end = held.find(b"\r\n", place)
            if end < 0:
                break
            size = int(held[place + 1 : end])
            if len(held) < end + 2 + size + 2:
                break
            words.append(held[end + 2 : end + 2 + size])
            place = end + 2 + size + 2
        if len(words) < count:
            break
        batch.append(words)
        at = place
    return batch, at


def class_of(batch: Batch) -> str:
    """What kind of call it is: its first command; of a transaction the first one inside."""
    names = [words[0].upper().decode() for words in batch]
    return next((name for name in names if name not in ("MULTI", "WATCH")), names[0])


def at_random(dice: Random, share: float, *classes: str) -> Callable[[Batch], str]:
    """A judge that fails that share of the batches (of these classes, or of all), in a way chosen at random."""
    lock = threading.Lock()

    def judge(batch: Batch) -> str:
        if classes and class_of(batch) not in classes:
            return ""
        with lock:
            return dice.choice(WAYS) if dice.random() < share else ""

    return judge


def has(command: str, part: str = "") -> Callable[[Batch], bool]:
    """Suits a batch with that command on a key (or with a word) that has `part` in it."""

    def suits(batch: Batch) -> bool:
        return any(
            words[0].upper().decode() == command and any(part.encode() in word[:200] for word in words[1:3])
            for words in batch
        )

    return suits
