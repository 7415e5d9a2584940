"""The balance of a run's ledger: does what Redis acknowledged agree with what became of it, slot by slot? Pure.

    acknowledged = settled by the reader + still in the stream + gap(reason)       of each slot, in fragments
    settled      = inserted + duplicates + rejected(reason)                        of all together
    produced     = inserted + dropped(reason) + refused + missed + unaccounted     in env steps, by the actors' headers

The left side of the first line is Redis' own count, the right side is what the reader knows and where it stands;
neither is derived from the other. Streams that were swept away are one row, GONE, on both sides. Entries that were read
but are not settled (staged, or waiting for the rate limiter) are still in the stream. What servers that are gone had
acknowledged only the reader can tell: it is shown as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawq.transport.books import Position, View

#: In place of a slot's name: all streams that were swept away.
GONE = "@gone"

#: Sums that a ledger must have: numbers, and numbers by reason.
_COUNTS = (
    *("entries", "committed", "committed_steps", "duplicates", "produced_steps"),
    *("refused_steps", "unaccounted_steps", "missed_steps"),
)
_BY_REASON = ("rejected", "dropped_steps", "gaps")


@dataclass(frozen=True, slots=True)
class Row:
    """One slot's stream, in fragments.

    Attributes:
        slot: name.
        acknowledged: Redis' own count; None if this Redis does not count.
        settled: by the reader.
        in_stream: still there.
        gap: went away unread, and counted as such.
    """

    slot: str
    acknowledged: int | None
    settled: int
    in_stream: int
    gap: int

    @property
    def difference(self) -> int:
        """Acknowledged fragments that nothing accounts for; below 0: more was settled than was ever there."""
        return 0 if self.acknowledged is None else self.acknowledged - self.settled - self.in_stream - self.gap


@dataclass(frozen=True, slots=True)
class Balance:
    """A ledger at one moment.

    Attributes:
        reader: whose.
        source: where the numbers are from, for people.
        rows: slots, by name; empty if no stream could be looked at.
        sums: `Counts` of the reader as a dict, `before` (entries of servers that are gone) and `lost_unacked` (bound).
        finished: the run was over: what was still in its streams was deleted with them.
    """

    reader: str
    source: str
    rows: tuple[Row, ...] = ()
    sums: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False

    @property
    def in_stream(self) -> int:
        """Fragments that are still in the streams."""
        return sum(row.in_stream for row in self.rows)

    @property
    def unread(self) -> dict[str, int]:
        """Slot -> fragments that are still in its stream."""
        return {row.slot: row.in_stream for row in self.rows if row.slot != GONE}

    @property
    def acknowledged(self) -> int:
        """All that Redis acknowledged: by its own count where it has one, else by the reader's."""
        now = sum(r.settled + r.in_stream + r.gap if r.acknowledged is None else r.acknowledged for r in self.rows)
        return now + self.earlier if self.rows else int(self.sums.get("entries", 0)) + self._gaps

    @property
    def earlier(self) -> int:
        """What servers that are gone had acknowledged, as far as the reader knows."""
        gap_here = sum(row.gap for row in self.rows)
        return int(self.sums.get("before", 0)) + self._gaps - gap_here

    @property
    def _gaps(self) -> int:
        return sum(self.sums.get("gaps", {}).values())

    @property
    def wrong(self) -> tuple[Row, ...]:
        """The slots that do not balance."""
        return tuple(row for row in self.rows if row.difference)

    def problems(self) -> list[str]:
        """What does not add up, and what that could mean; empty if all does."""
        return [_explain(row) for row in self.wrong] + _sums_problems(self.sums)

    def to_json(self) -> dict[str, Any]:
        """For programs; `from_json` is its inverse."""
        rows = [
            {
                "slot": r.slot,
                "acknowledged": r.acknowledged,
                "settled": r.settled,
                "in_stream": r.in_stream,
                "gap": r.gap,
                "difference": r.difference,
            }
            for r in self.rows
        ]
        facts = {"acknowledged": self.acknowledged, "in_stream": self.in_stream, "earlier_servers": self.earlier}
        sums = dict(self.sums)
        head = {"reader": self.reader, "source": self.source, "finished": self.finished}
        head |= {"balances": not self.problems(), **facts}
        return {**head, "sums": sums, "slots": rows, "problems": self.problems()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Balance":
        """Inverse of `to_json`; raises KeyError, TypeError or ValueError for something else."""
        rows = tuple(
            Row(
                str(row["slot"]),
                None if row["acknowledged"] is None else int(row["acknowledged"]),
                *(int(row[name]) for name in ("settled", "in_stream", "gap")),
            )
            for row in raw["slots"]
        )
        sums = dict(raw["sums"])
        if sums:
            sums |= {name: int(sums[name]) for name in _COUNTS}
            sums |= {name: {str(why): int(count) for why, count in sums[name].items()} for name in _BY_REASON}
        return cls(str(raw["reader"]), str(raw["source"]), rows, sums, bool(raw.get("finished")))


def balance(
    reader: str,
    source: str,
    positions: Mapping[str, Position],
    view: View | None,
    sums: Mapping[str, Any],
) -> Balance:
    """Put both sides together, slot by slot.

    Args:
        reader: name.
        source: for people.
        positions: where the reader stands.
        view: what Redis says of each stream, seen from those positions; None if it was not asked.
        sums: see Balance.
    """
    if view is None:
        return Balance(reader, source, (), dict(sums))
    here, (settled, gap) = split(positions, view, sums)
    rows = [
        Row(slot, seen.acknowledged, here[slot].settled, seen.after, here[slot].gap)
        for slot, seen in view.streams.items()
    ]
    if settled or gap or view.swept:
        rows.append(Row(GONE, view.swept, settled, 0, gap))
    return Balance(reader, source, tuple(rows), dict(sums))


def split(
    positions: Mapping[str, Position], view: View, sums: Mapping[str, Any]
) -> tuple[dict[str, Position], tuple[int, int]]:
    """(slot -> position in the stream that is there; entries settled, and gone away unread, of all that are gone)."""
    here = {
        slot: position
        for slot, seen in view.streams.items()
        if (position := positions.get(slot, Position())).born == seen.stream.born
    }
    settled, gap = sums.get("gone", (0, 0))
    over = [position for slot, position in positions.items() if slot not in here]
    total = settled + sum(one.settled for one in over), gap + sum(one.gap for one in over)
    return {slot: here.get(slot, Position()) for slot in view.streams}, total


def _explain(row: Row) -> str:
    k = abs(row.difference)
    where = "slots that are gone" if row.slot == GONE else f"slot {row.slot}"
    if row.difference > 0:
        meaning = (
            "entries left the stream before the reader had them (XTRIM, XDEL or MAXLEN by somebody else, or a stream "
            "deleted), or the reader passed over them"
        )
        return f"{where}: {k} acknowledged fragments are accounted for nowhere: {meaning}"
    meaning = (
        "the stream was deleted and begun anew, or the server lost the tail of it, without the reader noticing; or "
        "entries were counted twice"
    )
    return f"{where}: {k} fragments more are accounted for than Redis ever acknowledged: {meaning}"


def _sums_problems(sums: Mapping[str, Any]) -> list[str]:
    if not sums:
        return []
    problems = []
    outcomes = sums["committed"] + sums["duplicates"] + sum(sums["rejected"].values())
    if sums["entries"] != outcomes:
        problems.append(f"{sums['entries']} fragments are settled, but the outcomes add up to {outcomes}")
    fates = sums["committed_steps"] + sum(sums["dropped_steps"].values())
    fates += sums["refused_steps"] + sums["unaccounted_steps"] + sums["missed_steps"]
    if sums["produced_steps"] != fates:
        problems.append(f"{sums['produced_steps']} env steps were produced, but what became of them adds up to {fates}")
    return problems
