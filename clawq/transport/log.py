"""The run's experience as one log: what the live streams hold and what the archive holds, read as one.

`RunLog` reads whichever of the two is there. An entry that both hold is given once. Order: within a slot that of its
stream; over slots by the time in the fragments' headers, the same whether an entry comes from Redis or from disk. So a
replay, an export or a rebuilt ring is the same wherever the log is read from.

The streams are read as they are at that moment and change while they are read (the learner trims); what went meanwhile
is passed over. Damaged records of the archive are passed over too, unless the streams still have them; both are told
through `losses`. Reading takes one payload of each slot at a time, whatever the log's size.
"""

import heapq
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis

from clawq.core import Entry
from clawq.errors import ArchiveDamaged, LogGone
from clawq.transport.archive import Archive, Located, Place
from clawq.transport.keys import RunKeys
from clawq.transport.live_streams import Found, LiveStreams
from clawq.transport.retained import EntryId
from clawq.transport.stream import id_text, parse_id

log = logging.getLogger(__name__)

#: Losses that are kept in words; further ones are only counted.
LOSSES_TOLD = 100


@dataclass(frozen=True, slots=True)
class Held:
    """What the log holds of one slot: its first and last id and time, and how much in each place."""

    first: EntryId
    last: EntryId
    first_ms: int
    last_ms: int
    archived: int
    streamed: int


class RunLog:
    """Reads a run's log.

    Args:
        streams: client of the data server and the run's keys, None if Redis is not there.
        archive: the archive on disk, None if there is none.

    Attributes:
        losses: what could not be read, in words (at most LOSSES_TOLD).
        lost: how many entries that were.
    """

    def __init__(self, streams: tuple[redis.Redis, RunKeys] | None, archive: Archive | None) -> None:
        self._streams = LiveStreams(*streams) if streams is not None else None
        self._archive = archive
        self.losses: list[str] = []
        self.lost = 0

    # --- what is held -------------------------------------------------------------------------------------------

    def slots(self) -> list[str]:
        """Slots that have entries."""
        named = set(self._archive.slots() if self._archive else ())
        return sorted(named | set(self._streams.slots() if self._streams else ()))

    def held(self) -> dict[str, Held]:
        """Slot -> what the log holds of it."""
        held = {slot: self._held(slot) for slot in self.slots()}
        return {slot: one for slot, one in held.items() if one is not None}

    def _held(self, slot: str) -> Held | None:
        summaries = [s.summary.slots[slot] for s in self._archived_segments() if slot in s.summary.slots]
        edges = self._streams.edges(slot) if self._streams else None
        first = [s.first for s in summaries] + ([edges.first.id] if edges else [])
        last = [s.last for s in summaries] + ([edges.last.id] if edges else [])
        if not first:
            return None
        times = [s.first_ms for s in summaries] + [s.last_ms for s in summaries]
        times += [edges.first.made_ms, edges.last.made_ms] if edges else []
        times = [at for at in times if at] or [0]
        archived = sum(s.entries for s in summaries)
        return Held(min(first), max(last), min(times), max(times), archived, edges.entries if edges else 0)

    def _archived_segments(self) -> Iterable[Any]:
        return self._archive.segments if self._archive else ()

    @property
    def archive_dropped(self) -> int:
        """Fragments that went with the archive's oldest segments."""
        return self._archive.dropped[0] if self._archive else 0

    def damages(self) -> list[str]:
        """What is known to be damaged: found when the archive was opened, and while it was read."""
        return [*(self._archive.losses if self._archive else ()), *self.losses]

    # --- reading ------------------------------------------------------------------------------------------------

    def get(self, slot: str, epoch: int, seq: int) -> Entry:
        """That entry.

        Raises:
            LogGone: neither place holds it; the text says what is held.
            ArchiveDamaged: only the archive has it, and its record is damaged.
        """
        found = self.find(slot, epoch, seq)
        if not found:
            raise LogGone(f"the log does not hold fragment {slot} {epoch}-{seq}; {self.describe([slot])}")
        try:
            return found[0].entry()
        except ArchiveDamaged:
            if len(found) > 1:
                return found[1].entry()
            raise

    def find(self, slot: str, epoch: int, seq: int) -> list[Found]:
        """That entry in each place that holds it, the archive first."""
        located = self._archive.find(slot, epoch, seq) if self._archive else None
        streamed = self._streams.find(slot, (epoch, seq)) if self._streams else None
        return ([self._archived(located)] if located else []) + ([streamed] if streamed else [])

    def entries(
        self,
        slots: Iterable[str] | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        after: Mapping[str, str] | None = None,
        upto: Mapping[str, str] | None = None,
    ) -> Iterator[Entry]:
        """The entries in the order of the log; see `find_all` for the arguments. Damaged ones are passed over."""
        for found in self.find_all(slots, since_ms, until_ms, after, upto):
            entry = self.load(found)
            if entry is not None:
                yield entry

    def find_all(
        self,
        slots: Iterable[str] | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        after: Mapping[str, str] | None = None,
        upto: Mapping[str, str] | None = None,
    ) -> Iterator[Found]:
        """The entries in the order of the log; payloads in the archive are not read yet.

        Args:
            slots: only these.
            since_ms: only what was made at or after that time.
            until_ms: only what was made before that time.
            after: slot -> only ids above that one; slots that are not named are whole.
            upto: slot -> only ids up to that one; slots that are not named are left out.
        """
        chosen = self.slots() if slots is None else list(slots)
        if upto is not None:
            chosen = [slot for slot in chosen if slot in upto]
        limits = [
            (slot, parse_id(after[slot]) if after and slot in after else None, parse_id(upto[slot]) if upto else None)
            for slot in chosen
        ]
        merged = heapq.merge(*(self._of_slot(*limit) for limit in limits), key=_order)
        for found in merged:
            if (since_ms is None or found.made_ms >= since_ms) and (until_ms is None or found.made_ms < until_ms):
                yield found

    def load(self, found: Found) -> Entry | None:
        """The entry with its payload; None, and told, if that cannot be read."""
        try:
            return found.entry()
        except ArchiveDamaged as error:
            streamed = self._streams.find(found.slot, found.id) if self._streams else None
            if streamed is not None:
                return streamed.entry()
            self._lose(str(error))
            return None

    def _of_slot(self, slot: str, after: EntryId | None, upto: EntryId | None) -> Iterator[Found]:
        """The archive's entries, then those that only the streams have."""
        behind: Place = (0, 0)
        last = after
        while True:
            for located in self._archive.records(slot, after, upto, behind) if self._archive else ():
                behind, last = located.place, (located.record.epoch, located.record.seq)
                yield self._archived(located)
            after = last
            while (found := self._streams.next(slot, last, upto) if self._streams else None) is not None:
                if self._went_to_archive(slot, last, found.id, behind):
                    after = last
                    break
                last = found.id
                yield found
            else:
                return

    def _went_to_archive(self, slot: str, last: EntryId | None, next_id: EntryId, behind: Place) -> bool:
        """Whether entries between these two ids left the streams while we read, and are in the archive by now."""
        if self._archive is None or (last is not None and next_id == (last[0], last[1] + 1)):
            return False
        self._archive.refresh()
        return any(self._archive.records(slot, last, (next_id[0], next_id[1] - 1), behind))

    def _archived(self, located: Located) -> Found:
        record, archive = located.record, self._archive
        assert archive is not None
        return Found(
            record.slot, record.epoch, record.seq, record.made_ms, record.size, record.steps, "archive",
            lambda: archive.read(located),
        )  # fmt: skip

    def _lose(self, text: str) -> None:
        self.lost += 1
        log.warning("%s; it is left out", text)
        if len(self.losses) < LOSSES_TOLD:
            self.losses.append(text)

    # --- in words -----------------------------------------------------------------------------------------------

    def describe(self, slots: Iterable[str] | None = None) -> str:
        """What is held, in one sentence."""
        held = self.held()
        wanted = {slot: held[slot] for slot in slots if slot in held} if slots is not None else held
        if not held:
            return "the log holds nothing"
        if not wanted:
            return f"it holds slots {', '.join(sorted(held)[:8])}{' ...' if len(held) > 8 else ''}"
        if len(wanted) == 1:
            [(slot, one)] = wanted.items()
            return (
                f"of {slot} it holds {id_text(one.first)} to {id_text(one.last)} ({_span(one.first_ms, one.last_ms)})"
            )
        first, last = min(one.first_ms for one in wanted.values()), max(one.last_ms for one in wanted.values())
        return f"it holds {len(wanted)} slots, {_span(first, last)}"

    def require(self, since_ms: int | None, slots: Iterable[str] | None = None) -> None:
        """LogGone unless the log has those slots, and reaches back to that time or to the beginning of the run."""
        held = self.held()
        missing = [slot for slot in slots or () if slot not in held]
        if missing or not held:
            raise LogGone(f"the log holds nothing of {', '.join(missing) or 'this run'}; {self.describe()}")
        begins = min(one.first_ms for one in held.values())
        whole = not self.archive_dropped and all(one.first[1] == 1 for one in held.values())
        if since_ms is not None and since_ms < begins and not whole:
            raise LogGone(f"the log does not reach back to {clock(since_ms)}; {self.describe()}")


def _order(found: Found) -> tuple[int, int, int]:
    return found.made_ms, found.epoch, found.seq


def clock(at_ms: int) -> str:
    """A time for people, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))


def _span(first_ms: int, last_ms: int) -> str:
    return f"{clock(first_ms)} to {clock(last_ms)}"
