"""Upkeep: keeps a run's streams within their budget and the server's memory, and says who holds them up.

Called by the learner's link, in its thread: `tend` a few times a second, `look` once a second (it takes drained
streams of gone actors away too), `squeeze` when the
server refused a write for want of memory. The streams' budget is a share of the server's memory, so the server runs
full only when somebody else fills it, or when entries are so small that their overhead counts: then the streams shrink
below their budget, by as much as the memory in use is above `FULL_SHARE`.

Nothing here forces anything: what a required reader has not checkpointed stays, the streams fill up to their budget,
and actors wait. `held` says so, with the reader's name and what to do; `pressed` asks the learner for a checkpoint.
"""

import logging
from collections.abc import Callable, Mapping

from clawq.amounts import bytes_text
from clawq.transport.keys import ARCHIVE, LEARNER
from clawq.transport.readers import StreamReader
from clawq.transport.registry import ReaderRecord, Readers

log = logging.getLogger(__name__)

#: Share of the server's memory above which the streams give way.
FULL_SHARE = 0.9
#: Share of the memory in use from which the server counts as out of it.
OUT_SHARE = 0.98
#: Share of the budget that all windows together may take, and the least that one is narrowed to, bytes.
WINDOWS_SHARE, LEAST_WINDOW_BYTES = 0.5, 65_536


class Kept:
    """Tells how far a reader's checkpoint goes, once for each checkpoint.

    Args:
        reader: whose it is.

    Attributes:
        told: slot -> id behind which all is in the checkpoint that was told last.
    """

    def __init__(self, reader: StreamReader) -> None:
        self.told: dict[str, str] = {}
        self._reader = reader

    def tell(self, checkpointed: Mapping[str, str]) -> None:
        """Tell it, if it is another one."""
        if checkpointed != self.told:
            self._reader.checkpointed(checkpointed)
            self.told = dict(checkpointed)


class Upkeep:
    """See the module's text.

    Args:
        reader: the learner's.
        readers: the registry.
        memory: gives used and most bytes of the data server; most is 0 if it has no limit.
        budget_bytes: what the streams may hold.
        run_id: for people.

    Attributes:
        held: why actors wait for a reader, None if they do not.
        pressed: a checkpoint of the learner would make room that is needed.
    """

    def __init__(
        self,
        reader: StreamReader,
        readers: Readers,
        memory: Callable[[], tuple[int, int]],
        budget_bytes: int,
        run_id: str,
    ) -> None:
        self.held: str | None = None
        self.pressed = False
        self._reader, self._readers, self._memory = reader, readers, memory
        self._budget_bytes = self._allowed_bytes = budget_bytes
        self._run_id = run_id
        self._kept = Kept(reader)
        self._out_of_memory: str | None = None
        self._found_before = False

    def window(self, wanted_bytes: int) -> int:
        """The window that fits the budget: what is wanted, or less where there are many slots."""
        return fitting_window(wanted_bytes, self._budget_bytes, self._reader.slots, self._reader.largest_bytes)

    def tend(self, checkpointed: Mapping[str, str], window_bytes: int, beside: Mapping[str, Mapping[str, str]]) -> None:
        """Trim as far as checkpoints allow and budget and memory demand.

        Args:
            checkpointed: slot -> id behind which all is in the learner's checkpoint.
            window_bytes: what each slot may hold that is not taken over.
            beside: the like of readers that are waited for whatever their role: the learner's own archive.
        """
        self._reader.trim(checkpointed, self._allowed_bytes, window_bytes, beside)
        self._kept.tell(checkpointed)

    def squeeze(
        self, checkpointed: Mapping[str, str], window_bytes: int, beside: Mapping[str, Mapping[str, str]]
    ) -> None:
        """The server is full: let the streams give way now."""
        self._weigh()
        self._reader.trim(checkpointed, self._allowed_bytes, window_bytes, beside)
        self.pressed = True

    def look(self, window_bytes: int) -> dict[str, float]:
        """Look at memory and readers; returns figures by metric name."""
        self._reader.sweep()
        self._weigh()
        records = self._readers.list()
        stored, trimming = self._reader.stored_bytes(), self._reader.trimming
        unread = sum(self._reader.unread_entries().values())
        figures = {"unread_fragments": float(unread), "stored_bytes": float(stored)}
        figures["unread_bytes"] = float(self._reader.unread_bytes())
        for record in records:
            for what, cursors in (("unread", record.taken), ("uncheckpointed", record.kept)):
                behind = self._reader.uncheckpointed_bytes(cursors) + self._reader.unread_bytes()
                figures[f"reader/{record.name}/{what}_bytes"] = float(behind)
        waiting = self._reader.withheld_bytes() > 0
        squeezed = self._allowed_bytes < self._budget_bytes
        self.pressed = LEARNER in trimming.holding and (waiting or (squeezed and stored > self._allowed_bytes))
        before, found = self.held, None
        if waiting and trimming.holding:
            names = {record.name: record for record in records}
            holding = [names.get(name, ReaderRecord(name, True)) for name in trimming.holding]
            found = full_text(holding, stored, self._allowed_bytes, self._run_id)
        else:
            slow = [record for record in records if record.required and self._fills_a_window(record, window_bytes)]
            if slow:
                found = slow_text(slow, self._run_id)
        # What is over by the next look (a slot joined, and windows were narrowed for it) is not worth a word.
        self.held = self._out_of_memory or (found if self._found_before else None)
        self._found_before = found is not None
        if self.held and not before:
            log.warning("%s", self.held)
        return figures

    def _fills_a_window(self, record: ReaderRecord, window_bytes: int) -> bool:
        """Whether a reader other than the learner makes actors wait."""
        behind = self._reader.slot_bytes_after(record.taken) if record.name != LEARNER else {}
        return any(bytes_ >= window_bytes for bytes_ in behind.values())

    def _weigh(self) -> None:
        used, most = self._memory()
        self._out_of_memory = memory_text(used, most)
        self._allowed_bytes = squeezed_budget(self._budget_bytes, self._reader.stored_bytes(), used, most)


def fitting_window(wanted_bytes: int, budget_bytes: int, slots: int, largest_bytes: int) -> int:
    """A window for each slot (and one slot more) that leaves room in the budget for what is taken over."""
    fits = int(WINDOWS_SHARE * budget_bytes) // (slots + 1) - largest_bytes
    return min(wanted_bytes, max(LEAST_WINDOW_BYTES, fits))


def squeezed_budget(budget_bytes: int, stored_bytes: int, used_bytes: int, most_bytes: int) -> int:
    """The budget, or less where the server as a whole is nearly full."""
    excess = used_bytes - FULL_SHARE * most_bytes if most_bytes else 0
    return budget_bytes if excess <= 0 else max(0, min(budget_bytes, int(stored_bytes - excess)))


def memory_text(used_bytes: int, most_bytes: int) -> str | None:
    """What to say if the data server refuses writes for want of memory, or is about to."""
    if not most_bytes or used_bytes < OUT_SHARE * most_bytes:
        return None
    return (
        f"the data Redis is out of memory (OOM: {bytes_text(used_bytes)} of {bytes_text(most_bytes)}): actors wait; it "
        "goes on by itself when the learner has trimmed the streams, or others have made room"
    )


def full_text(holding: list[ReaderRecord], stored_bytes: int, budget_bytes: int, run_id: str) -> str:
    """Why actors wait while trimming does."""
    names = " and ".join(map(_named, holding))
    share = f"{bytes_text(stored_bytes)}, and {bytes_text(budget_bytes)} with every window full"
    text = f"actors wait: the streams are full ({share}), and trimming waits for a checkpoint of {names}"
    return text + _advice(holding, run_id)


def slow_text(slow: list[ReaderRecord], run_id: str) -> str:
    """Why actors wait while everything is being checkpointed."""
    names = " and ".join(map(_named, slow))
    return f"actors wait: {names} is required, and has not taken over what they sent" + _advice(slow, run_id)


def _named(record: ReaderRecord) -> str:
    if record.name in (LEARNER, ARCHIVE):
        return f"the {record.name}"
    return f"reader {record.name}" + ("" if record.holder else ", which is not there")


def _advice(records: list[ReaderRecord], run_id: str) -> str:
    gone = [record.name for record in records if record.name not in (LEARNER, ARCHIVE) and not record.holder]
    if not gone:
        return ""
    return f"; start it again, or give up its claim on the log: `clawq reader drop {run_id} {gone[0]}`"
