"""The tally: what a reader that keeps every entry as it is did with them, for its published ledger.

A learner has a ledger of its own (`clawq.replay.ledger`), which tells inserted from refused and counts env steps too.
An archive or an exporter takes every entry over, or has it already; what went away before it came is a gap.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from clawq.core import Entry, Slots, Stream, Vanished
from clawq.places import BEFORE, NOTHING_FOUND, TRIMMED, Places, loss
from clawq.transport.books import Position, positions_of


@dataclass(slots=True)
class _Sums:
    """As of any ledger: a reader like this refuses nothing and counts no env steps."""

    entries: int = 0
    committed: int = 0
    duplicates: int = 0
    gaps: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    dropped_steps: dict[str, int] = field(default_factory=dict)
    committed_steps: int = 0
    produced_steps: int = 0
    refused_steps: int = 0
    unaccounted_steps: int = 0
    missed_steps: int = 0


class Tally:
    """Counts; one thread uses it.

    Args:
        published: what an earlier process of this reader published, to go on from; None = it begins.
    """

    def __init__(self, published: tuple[Mapping[str, Position], Mapping[str, Any]] | None = None) -> None:
        positions, sums = published or ({}, {})
        known = {name: sums[name] for name in _Sums.__dataclass_fields__ if name in sums}
        self._sums = _Sums(**known)
        gone = [*sums.get("gone", (0, 0)), sums.get("before", 0)]
        places = {slot: (one.settled, 0, one.at, one.gap, one.born) for slot, one in positions.items()}
        self._places = Places(places, gone)
        self._server = ""
        #: Slot -> its stream, of those that were there when this reader began.
        self._found: dict[str, int] = {}

    def take(self, entry: Entry, new: bool = True) -> None:
        """An entry was taken over; or it was before (`new` is False)."""
        self._count_before(entry, entry.ordinal - 1)
        self._sums.entries += 1
        self._sums.committed += new
        self._sums.duplicates += not new
        self._places.settle(entry.slot, f"{entry.epoch}-{entry.seq}", entry.stream)

    def miss(self, entry: Entry) -> None:
        """The word that entries went away unread."""
        self._count_before(entry, entry.ordinal - entry.missed)
        self._gap(TRIMMED, entry.slot, entry.stream, entry.ordinal, entry.missed)

    def _count_before(self, entry: Entry, upto: int) -> None:
        """With the first that is heard of a stream, count what had gone from it when this reader began."""
        if entry.ordinal and self._found.get(entry.slot) == entry.stream.born:
            del self._found[entry.slot]
            self._gap(BEFORE, entry.slot, entry.stream, upto, upto - entry.stream.before)

    def caught_up(self, slot: str, stream: Stream, ids: Iterable[str]) -> None:
        """These entries were taken over by an earlier process, which did not come to publish it."""
        for entry_id in ids:
            self._sums.entries += 1
            self._sums.committed += 1
            self._places.settle(slot, entry_id, stream)

    def _gap(self, reason: str, slot: str, stream: Stream, upto: int, missed: int) -> None:
        if missed > 0:
            self._places.miss(slot, stream, upto, missed)
            self._count(reason, missed)

    def _count(self, reason: str, missed: int) -> None:
        self._sums.gaps[reason] = self._sums.gaps.get(reason, 0) + missed

    def on_server(self, server: str, found: Mapping[str, Vanished]) -> None:
        """See StreamReader.tell_server; called when all that was read before was taken over."""
        before, self._server = self._server, server
        if before in ("", server):
            return
        for slot in {*found, *self._places.all()}:
            one = found.get(slot, NOTHING_FOUND)
            self._places.vanished(slot, one, 0)
            if one.lost:
                self._count(loss(before, server), one.lost)
        self._places.moved()

    def on_slots(self, slots: Slots) -> None:
        """See StreamReader.tell_slots; called when all that was read before was taken over."""
        if slots.first:
            self._found = dict(slots.born)
            before = self._places.begin(slots.swept)
            if before:
                self._count(BEFORE, before)
        self._places.look(slots.epochs, slots.swept)
        self._found = {slot: born for slot, born in self._found.items() if slots.born.get(slot) == born}

    @property
    def missed(self) -> int:
        """Entries that went away unread since this reader began."""
        return sum(count for reason, count in self._sums.gaps.items() if reason != BEFORE)

    def snapshot(self) -> tuple[dict[str, Position], dict[str, Any]]:
        """(positions, sums), to be published."""
        gone = self._places.gone
        sums = {**asdict(self._sums), "gone": [gone.entries, gone.gap], "before": self._places.before}
        return positions_of(self._places.all()), sums
