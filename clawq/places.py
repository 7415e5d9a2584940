"""Places: where one reader stands in each stream of a run, and one total for all streams that are gone. Pure.

A slot's *stream* lives from its first writer until it is swept away; a slot that comes back later has another stream,
known by the epoch with which it began (`core.Stream`). Of each stream that is there the reader counts what it has
settled; when the stream is gone its counts go into the total. Redis does the same with what it acknowledged. So for
any reader, at any moment, whatever either side has folded by then,

    of each stream that is there:   acknowledged = settled + after the place + gap
    of all that are gone:           acknowledged = settled + gap

and what is kept is bounded by the slots that are there, not by those that ever were. What is read from an archive, of
streams that went away with their server, is settled with these.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from clawq.core import BYGONE, OVER, Stream, Vanished

#: The id before all others.
START = "0-0"
#: Why acknowledged entries were never read: trimming did not wait for this reader; or it was before the reader began.
TRIMMED, BEFORE = "trimmed", "before_it_began"
#: The same: the server came back without them; or the run had finished, and its streams were deleted with it.
SERVER_LOST, DELETED = "server_lost", "deleted_with_run"
#: Of a slot that another server does not know.
NOTHING_FOUND = Vanished(0, 0, START)


@dataclass(slots=True)
class Place:
    """Where a reader stands in a slot's stream.

    Attributes:
        entries: settled of the stream.
        before: of these, in streams that went away with their server.
        at: id of the last one settled, `0-0` = none of the present stream.
        gap: entries of the present stream that went away unread, and are counted as such.
        born: epoch with which the stream began; 0 = not known.
    """

    entries: int = 0
    before: int = 0
    at: str = START
    gap: int = 0
    born: int = 0

    @property
    def settled(self) -> tuple[int, str]:
        """(entries of the present stream that are settled, id up to which they are)."""
        here = self.entries - self.before
        return (here, self.at) if here > 0 else (0, START)


@dataclass(slots=True)
class Gone:
    """Streams that are gone.

    Attributes:
        entries: settled of those that were swept away on this server.
        gap: of these streams, entries that went away unread, and are counted as such.
        earlier: settled of streams that went away with their server.
    """

    entries: int = 0
    gap: int = 0
    earlier: int = 0


class Places:
    """See the module's text.

    Args:
        places: slot -> place, from `state`.
        gone: from `state`.
    """

    def __init__(self, places: Mapping[str, Iterable[Any]] | None = None, gone: Iterable[int] = ()) -> None:
        self._of = {slot: Place(*place) for slot, place in (places or {}).items()}
        self.gone = Gone(*gone)
        #: The server is another one since its swept streams were last asked for.
        self._elsewhere = False

    def state(self) -> tuple[dict[str, list[Any]], list[int]]:
        """(places, gone) as plain values; copies."""
        return {slot: list(astuple(place)) for slot, place in self._of.items()}, list(astuple(self.gone))

    def all(self) -> dict[str, Place]:
        """Slot -> place in the stream that is there; copies."""
        return {slot: replace(place) for slot, place in self._of.items()}

    @property
    def entries(self) -> int:
        """Settled in all, ever."""
        return self.gone.entries + self.gone.earlier + sum(place.entries for place in self._of.values())

    @property
    def before(self) -> int:
        """Settled of streams that are gone with their server."""
        return self.gone.earlier + sum(place.entries - place.settled[0] for place in self._of.values())

    def begun(self, slot: str, stream: Stream) -> bool:
        """Whether anything of that stream was noted."""
        place = self._of.get(slot)
        return stream == OVER or (place is not None and place.born == stream.born and place != Place(born=stream.born))

    def settle(self, slot: str, entry_id: str, stream: Stream) -> None:
        """An entry of that stream was settled; those of a slot come in their order."""
        if stream == OVER:
            self.gone.entries += 1
            return
        if stream == BYGONE:
            self.gone.earlier += 1
            return
        place = self._place(slot, stream)
        place.entries += 1
        place.at = entry_id

    def miss(self, slot: str, stream: Stream, upto: int, missed: int) -> None:
        """Entries went away unread.

        Args:
            slot: of the stream.
            stream: the slot's.
            upto: ordinal of the last of them; what is not above `stream.before` was in streams before this one.
            missed: how many.
        """
        old = missed if stream == OVER else max(0, min(missed, stream.before - (upto - missed)))
        self.gone.gap += old
        if missed > old:
            self._place(slot, stream).gap += missed - old

    def _place(self, slot: str, stream: Stream) -> Place:
        place, unsettled = self._of.get(slot), 0
        if place is not None and place.born != stream.born:
            unsettled, place = self._fold(slot), None
        if place is None:
            place = self._of[slot] = Place(before=unsettled, born=stream.born)
        return place

    def _fold(self, slot: str) -> int:
        """The stream is gone; returns how many of its server's, which is gone too, are still to be settled."""
        place = self._of.pop(slot)
        here = place.entries - place.before
        self.gone.entries += max(0, here)
        self.gone.earlier += min(place.entries, place.before)
        self.gone.gap += place.gap
        return max(0, -here)

    def vanished(self, slot: str, found: Vanished, unsettled: int) -> None:
        """The server is another one: begin anew with a slot's stream.

        Args:
            slot: of the stream.
            found: see Vanished.
            unsettled: entries that were read, of either stream, and are not settled yet: they are settled in the
                stream that was found, too.
        """
        place = self._of.setdefault(slot, Place())
        place.before = place.entries + unsettled - found.read
        place.gap, place.born = 0, found.stream.born
        if not unsettled:
            place.at = found.cursor

    def moved(self) -> None:
        """The server is another one, and all slots were told of."""
        self._elsewhere = True

    def look(self, registered: Container[str], swept: int, busy: Container[str] = ()) -> None:
        """Fold what is gone.

        Args:
            registered: slots whose streams are there.
            swept: entries of all streams that were swept away on this server.
            busy: slots with entries that were read and are not settled yet: they wait.
        """
        if self._elsewhere:
            # An older state of a server may come back: what was swept there was settled.
            gone = self.gone
            self.gone, self._elsewhere = Gone(swept, 0, gone.earlier + gone.entries - swept), False
        for slot in [slot for slot in self._of if slot not in registered and slot not in busy]:
            self._fold(slot)

    def begin(self, swept: int) -> int:
        """This reader begins: what was swept away by now is nothing that it missed; returns how many that are."""
        before = swept - self.gone.gap
        if self._of or self.gone.entries or before <= 0:
            return 0
        self.gone.gap = swept
        return before


def loss(before: str, now: str) -> str:
    """Why what was unread on the server `before` is lost, when it is `now` (see transport.restarts.server_of)."""
    # On the same server process only the run's keys can have been deleted.
    return DELETED if before.partition("/")[0] == now.partition("/")[0] else SERVER_LOST


__all__ = [
    "BEFORE",
    "DELETED",
    "NOTHING_FOUND",
    "SERVER_LOST",
    "START",
    "TRIMMED",
    "Gone",
    "Place",
    "Places",
    "loss",
]
