"""What became of every stream entry, exactly, up to where the learner has settled.

An entry is *settled* when nothing can happen to it any more: its fragment is in the ring, or it was refused, or it is a
repetition. Entries of a slot are settled in the order of its stream, so the ledger's cursor of a slot says: all up to
here is counted in here, and nothing after it. A checkpoint that holds the ledger's state can therefore be resumed by
reading on from its cursors, and no fragment is lost, taken twice, or counted twice.

Marks: (slot, epoch) -> highest seq. An entry at or below its mark is a repetition. Lives: (slot, life of an actor) ->
env steps it had packed. A fragment at or below that is a repetition too, under another id: an actor whose claim lapsed
while it did not know whether a fragment had arrived sends it again in a new epoch.

Sums of env steps come from the actor's cumulative counters in the headers: what was packed (`produced`) but was neither
settled here nor dropped by the actor is `unaccounted` (lost in a stream that went away, or in refused bytes).

What an optional reader came too late for is a gap with the reason `trimmed`: in fragments exactly, slot by slot (the
entries' ordinals tell), in env steps as far as a later header of the same actor does.

Places (`clawq.places`): of each slot how many entries of its present stream are settled, and the id up to which they
are, and one total of all streams that are gone. Redis counts what it ever acknowledged in a stream, so that

    acknowledged = settled + after the place (still in the stream) + gap

holds exactly for every stream, at any moment and for any reader (`clawq.programs.balance`). A server that came back
empty begins anew; what it had acknowledged and nobody had read is a gap, unless it is read from an archive: then it is
settled as of a stream that is gone (`core.BYGONE`).

Slots that are gone for long are forgotten (`look`), all but the newest KEPT_GONE, so nothing here grows with the slots
that ever were. What is forgotten is replaced by its *horizon*, the largest epoch that was forgotten: an epoch at or
below it that is not known is one of those, and its entries are repetitions. (Epochs are times of the server, and a
slot is forgotten only when no entry can be on its way whose epoch is below its own and not known yet.) An actor whose
life is at or below the horizon and not known, and that goes on in a new epoch, may send again the one fragment of which
it did not know whether it had arrived: its first is taken for that repetition, and the next ones are new.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from clawq.core import FIRST, OVER, Slots, Stream, Vanished
from clawq.places import BEFORE, DELETED, SERVER_LOST, Place, Places, loss
from clawq.replay.voiding import KeptNotices
from clawq.types import FragmentMeta

#: Epochs, and lives of actors, remembered for one slot. An entry of an epoch older than all of these is taken for a
#: repetition.
KEPT_EPOCHS = 16
#: Slots that are gone and of which everything is remembered: more than Redis remembers (`transport.trimming`).
KEPT_GONE = 2048
#: Different reasons for drops that are told apart; further ones (names come from the wire) are counted as "other".
MOST_REASONS = 16
#: Above every seq.
_ENDLESS = 2**63
#: Reason of a refusal: the fragment is older than the staleness contract allows.
STALE = "stale"


class Marks:
    """High-water marks: which (slot, epoch, seq) were seen already.

    Attributes:
        horizon: the largest epoch that was forgotten.
    """

    def __init__(self, state: Mapping[str, Mapping[int, int]] | None = None, horizon: int = 0) -> None:
        self._seq = {slot: dict(epochs) for slot, epochs in (state or {}).items()}
        self.horizon = horizon

    def is_new(self, slot: str, epoch: int, seq: int) -> bool:
        """True unless this entry, or a later one of its epoch, was seen."""
        epochs = self._seq.get(slot, {})
        if epoch in epochs:
            return seq > epochs[epoch]
        if epoch <= self.horizon:
            return False
        return len(epochs) < KEPT_EPOCHS or epoch > min(epochs)

    def last(self, slot: str, epoch: int) -> int:
        """Highest seq seen of that epoch, 0 if none."""
        return self._seq.get(slot, {}).get(epoch, 0)

    def knows(self, slot: str) -> bool:
        """Whether anything was seen of a slot, and not forgotten."""
        return slot in self._seq

    def newest(self, slot: str) -> tuple[int, int]:
        """(epoch, seq) of the largest id seen of a slot; of one that is not known, above all that was forgotten."""
        return max(self._seq.get(slot, {}).items(), default=(self.horizon, _ENDLESS))

    def advance(self, slot: str, epoch: int, seq: int) -> list[int]:
        """Note a new entry; returns the epochs of the slot that were forgotten for it."""
        epochs = self._seq.setdefault(slot, {})
        epochs[epoch] = seq
        forgotten = sorted(epochs)[:-KEPT_EPOCHS]
        for old in forgotten:
            del epochs[old]
        return forgotten

    def forgettable(self, slots: Slots, busy: Container[str]) -> list[str]:
        """Slots that may be forgotten, so that KEPT_GONE are left of those that are gone; the oldest first.

        Args:
            slots: those that are there.
            busy: slots with entries whose fate is not known yet.
        """
        gone = [slot for slot in self._seq if slot not in slots.epochs and slot not in busy]
        if len(gone) <= KEPT_GONE:
            return []
        # Of a writer of which nothing was seen yet, what comes is above what was seen of its slot, or all is to come.
        unheard = [slot for slot, epoch in slots.epochs.items() if epoch not in self._seq.get(slot, {})]
        limits = [max(self._seq[slot]) if slot in self._seq else slots.born[slot] - 1 for slot in unheard]
        oldest = sorted((max(self._seq[slot]), slot) for slot in gone)[: len(gone) - KEPT_GONE]
        return [slot for newest, slot in oldest if all(newest <= limit for limit in limits)]

    def forget(self, slots: Iterable[str]) -> None:
        """Forget these; the horizon moves behind them."""
        for slot in slots:
            self.horizon = max(self.horizon, *self._seq.pop(slot, {0: 0}))

    def state(self) -> dict[str, dict[int, int]]:
        """Of each slot and epoch the highest seq; a copy."""
        return {slot: dict(epochs) for slot, epochs in self._seq.items()}


class Lives:
    """What each actor had told when its newest fragment was seen; `produced` of an actor's fragments only grows.

    Attributes:
        horizon: see the module's text.
    """

    def __init__(self, produced: Mapping[str, Mapping[int, int]] | None = None, horizon: int = 0) -> None:
        self._produced = {slot: dict(lives) for slot, lives in (produced or {}).items()}
        self.horizon = horizon

    def is_new(self, slot: str, meta: FragmentMeta) -> bool:
        """True unless this fragment, or a later one of its actor, was seen."""
        known = self._produced.get(slot, {}).get(life_of(meta))
        if known is None:
            return meta.produced > 0 and life_of(meta) > self.horizon
        return meta.produced > known

    def forget(self, slots: Iterable[str]) -> None:
        """Forget these."""
        for slot in slots:
            self._produced.pop(slot, None)

    def advance(self, slot: str, meta: FragmentMeta) -> None:
        """Note a fragment."""
        lives, life = self._produced.setdefault(slot, {}), life_of(meta)
        lives[life] = max(meta.produced, lives.get(life, 0))
        for old in sorted(lives)[:-KEPT_EPOCHS]:
            del lives[old]


def life_of(meta: FragmentMeta) -> int:
    """The life of the actor that made a fragment: its first epoch."""
    return meta.life or meta.epoch


@dataclass(slots=True)
class Counts:
    """Settled entries by what became of them, and env steps by the headers.

    entries = committed + duplicates + all of rejected, always.

    Attributes:
        entries: settled in all.
        committed: fragments that are in the ring.
        committed_steps: their env steps T·N, valid or not.
        duplicates: repetitions, ignored.
        rejected: fragments refused, by reason.
        gap_fragments: seq numbers that never came (dropped by the actor, or lost).
        produced_steps: env steps that actors packed into fragments.
        dropped_steps: of these, dropped by the actors' outboxes, by reason.
        refused_steps: of these, in fragments that were refused (where the header could be believed).
        stale_steps: of the refused ones, those of fragments that were too old.
        unaccounted_steps: of these, none of the above.
        gaps: entries that went away before they were read, by reason (`trimmed`, `server_lost`, `deleted_with_run`);
            no other count has them.
        missed_steps: of the produced ones, those in such entries, as far as they are known.
    """

    entries: int = 0
    committed: int = 0
    committed_steps: int = 0
    duplicates: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    gap_fragments: int = 0
    produced_steps: int = 0
    dropped_steps: dict[str, int] = field(default_factory=dict)
    refused_steps: int = 0
    unaccounted_steps: int = 0
    stale_steps: int = 0
    gaps: dict[str, int] = field(default_factory=dict)
    missed_steps: int = 0

    def copy(self) -> "Counts":
        """One of its own."""
        sums: dict[str, Any] = {name: dict(getattr(self, name)) for name in ("rejected", "dropped_steps", "gaps")}
        return replace(self, **sums)


@dataclass(slots=True)
class Missed:
    """What a reader missed of one slot.

    Attributes:
        fragments: trimmed before they were read.
        steps: env steps in them, as far as they are known.
        owed: some were missed since the last header of the slot.
    """

    fragments: int = 0
    steps: int = 0
    owed: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of one entry.

    Attributes:
        epoch: of the entry.
        seq: of the entry.
        outcome: `committed`; `duplicate` (its id was seen), `repeated` (its fragment was, under another id); or the
            reason of the refusal; TRIMMED or SERVER_LOST for entries that went away unread, up to this id.
        meta: the header, where it can be believed.
        ordinal: of the entry, 0 if it is not known.
        missed: how many went away, else 0.
        heeded: its notices of void rows were heeded, with those that it handed on.
        stream: in which of the slot's streams it is.
    """

    epoch: int
    seq: int
    outcome: str
    meta: FragmentMeta | None = None
    ordinal: int = 0
    missed: int = 0
    heeded: bool = False
    stream: Stream = FIRST


class Ledger:
    """Marks, cursors and counts of what was settled.

    Args:
        state: what `state_dict` gave, to go on from a checkpoint; with `finished` if the run had finished since, and
            its streams were deleted.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.marks = Marks(state.get("marks"), state.get("horizon", 0))
        self.cursors: dict[str, str] = dict(state.get("cursors", {}))
        self.notices = KeptNotices(state.get("notices", ()))
        self.counts = Counts(**state.get("counts", {})).copy()
        #: Slot -> ordinal of the entry at the cursor.
        self.ordinals: dict[str, int] = dict(state.get("ordinals", {}))
        self.missed = {slot: Missed(*missed) for slot, missed in state.get("missed", {}).items()}
        self._server: str = state.get("server", "")
        self._places = Places(state.get("places"), state.get("gone", ()))
        self._finished, self._lost = bool(state.get("finished")), SERVER_LOST
        #: Slot -> life of an actor -> the newest header's cumulative `produced` and `dropped`.
        self._told: dict[str, dict[int, tuple[int, dict[str, int]]]] = {}
        for slot, life, produced, dropped in state.get("told", []):
            self._told.setdefault(slot, {})[life] = (produced, dict(dropped))

    def settle(self, slot: str, settled: Settled) -> None:
        """Count one entry; entries of a slot must come in the order of its stream."""
        counts, stream = self.counts, settled.stream
        if settled.ordinal and not self.marks.knows(slot) and not self._places.begun(slot, stream):
            # What was trimmed before this reader began is nothing that it missed, but Redis has counted it.
            upto = settled.ordinal - (settled.missed or 1)
            before = max(0, upto - stream.before)
            if before:
                self._places.miss(slot, stream, upto, before)
                _add(counts.gaps, BEFORE, before)
                self.missed.setdefault(slot, Missed()).owed = True
                # Nor are the seq numbers before it missing.
                self.marks.advance(slot, settled.epoch, max(0, settled.seq - (settled.missed or 1)))
        if settled.ordinal:
            self.ordinals[slot] = max(settled.ordinal, self.ordinals.get(slot, 0))
        if settled.missed:
            # Without an ordinal it was on another server: no stream here lacks it.
            if settled.ordinal or stream == OVER:
                self._places.miss(slot, stream, settled.ordinal, settled.missed)
            self._miss(slot, settled)
            return
        counts.entries += 1
        self._places.settle(slot, f"{settled.epoch}-{settled.seq}", stream)
        if settled.outcome == "duplicate":
            counts.duplicates += 1
            return
        counts.gap_fragments += settled.seq - self.marks.last(slot, settled.epoch) - 1
        self.marks.advance(slot, settled.epoch, settled.seq)
        self.cursors[slot] = f"{settled.epoch}-{settled.seq}"
        if settled.outcome == "repeated":
            counts.duplicates += 1
            if settled.meta is not None:
                # Of an actor that was forgotten: what it makes from now on is counted.
                told = settled.meta.produced, dict(settled.meta.dropped)
                self._told.setdefault(slot, {}).setdefault(life_of(settled.meta), told)
            return
        steps = settled.meta.steps * settled.meta.envs if settled.meta else 0
        if settled.outcome == "committed":
            counts.committed += 1
            counts.committed_steps += steps
        else:
            _add(counts.rejected, settled.outcome, 1)
            counts.refused_steps += steps
            counts.stale_steps += steps if settled.outcome == STALE else 0
        if settled.meta is not None:
            if settled.heeded:
                self.notices.take(settled.meta)
            else:
                self.notices.keep(settled.meta)
            self._count_steps(slot, settled.meta, steps)

    def _miss(self, slot: str, settled: Settled) -> None:
        """Count entries that went away unread, up to this id, and seq numbers among them that never came."""
        _add(self.counts.gaps, settled.outcome, settled.missed)
        missed = self.missed.setdefault(slot, Missed())
        missed.fragments += settled.missed
        missed.owed = True
        last = self.marks.last(slot, settled.epoch)
        self.counts.gap_fragments += max(0, settled.seq - last - settled.missed)
        if settled.seq >= last:
            self.marks.advance(slot, settled.epoch, settled.seq)
            self.cursors[slot] = f"{settled.epoch}-{settled.seq}"

    def _count_steps(self, slot: str, meta: FragmentMeta, steps: int) -> None:
        """Add what the actor's cumulative counters grew by since its last header, which may be of an older epoch."""
        lives, life = self._told.setdefault(slot, {}), life_of(meta)
        produced_before, before = lives.get(life, (0, {}))
        produced, dropped = max(0, meta.produced - produced_before), 0
        for reason, total in meta.dropped.items():
            grown = max(0, total - before.get(reason, 0))
            _add(self.counts.dropped_steps, reason, grown)
            dropped += grown
        self.counts.produced_steps += produced
        # An actor may tell of drops before the fragments around them: what is missing never counts twice.
        rest, missed = produced - dropped - steps, self.missed.get(slot)
        if missed is not None and missed.owed and rest > 0:
            missed.steps += rest if missed.fragments else 0
            self.counts.missed_steps += rest
        else:
            self.counts.unaccounted_steps += rest
        if missed is not None:
            missed.owed = False
        lives[life] = (meta.produced, dict(meta.dropped) or before)
        for old in sorted(lives)[:-KEPT_EPOCHS]:
            del lives[old]

    def on_server(self, server: str) -> bool:
        """Note which server is read from, by its run id; whether the streams of another one were read before."""
        before, self._server = self._server, server
        if before in ("", server):
            return False
        self._lost, self._finished = DELETED if self._finished else loss(before, server), False
        return True

    def vanished(self, slot: str, found: Vanished, unsettled: int) -> None:
        """Begin anew with a slot's stream; see Places.vanished."""
        self._places.vanished(slot, found, unsettled)
        self.ordinals.pop(slot, None)
        if found.lost:
            _add(self.counts.gaps, self._lost, found.lost)

    def moved(self) -> None:
        """The server is another one, and all its slots were told of."""
        self._places.moved()

    def look(self, slots: Slots, busy: Container[str]) -> list[str]:
        """Fold and forget what is gone; returns the slots that were forgotten.

        Args:
            slots: those that are there.
            busy: slots with entries that were read and are not settled yet.
        """
        self._places.look(slots.epochs, slots.swept, busy)
        before = self._places.begin(slots.swept) if slots.first else 0
        if before:
            _add(self.counts.gaps, BEFORE, before)
        # No stream is there to be read on from, or to be trimmed.
        for slot in [slot for slot in self.cursors if slot not in slots.epochs and slot not in busy]:
            del self.cursors[slot]
        forgotten = self.marks.forgettable(slots, busy)
        self.marks.forget(forgotten)
        self.notices.forget(forgotten)
        for known in (self.ordinals, self.missed, self._told):
            for slot in forgotten:
                known.pop(slot, None)
        return forgotten

    @property
    def places(self) -> dict[str, Place]:
        """Of each slot where its reader stands in the stream that is there; copies."""
        return self._places.all()

    @property
    def sums(self) -> dict[str, Any]:
        """The counts, and those of streams that are gone, as plain values; a copy."""
        gone = self._places.gone
        total = {"gone": [gone.entries, gone.gap], "before": self._places.before}
        return {**asdict(self.counts), **total}

    @property
    def produced(self) -> dict[str, dict[int, int]]:
        """Of each slot and life the env steps packed, as its newest header told; a copy."""
        return {slot: {life: told[0] for life, told in lives.items()} for slot, lives in self._told.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, as dicts, lists, strings and integers; a copy."""
        counts = self.counts.copy()
        places, gone = self._places.state()
        return {
            "marks": self.marks.state(),
            "horizon": self.marks.horizon,
            "cursors": dict(self.cursors),
            "notices": self.notices.state(),
            "counts": {name: getattr(counts, name) for name in Counts.__dataclass_fields__},
            "ordinals": dict(self.ordinals),
            "missed": {slot: [one.fragments, one.steps, one.owed] for slot, one in self.missed.items()},
            "server": self._server,
            "places": places,
            "gone": gone,
            "told": [[slot, life, n, dict(d)] for slot, lives in self._told.items() for life, (n, d) in lives.items()],
        }

    def check_valid(self) -> tuple[bool, str]:
        """Do the sums agree? (True, "") or (False, what is wrong)."""
        c = self.counts
        if c.entries != c.committed + c.duplicates + sum(c.rejected.values()):
            return False, f"entries differ from their outcomes: {c}"
        told = c.committed_steps + sum(c.dropped_steps.values()) + c.refused_steps + c.unaccounted_steps
        told += c.missed_steps
        if c.produced_steps != told:
            return False, f"env steps produced differ from what became of them: {c}"
        if sum(c.gaps.values()) < sum(missed.fragments for missed in self.missed.values()):
            return False, f"more was missed than there are gaps: {c}"
        if c.gap_fragments < 0:
            return False, f"negative gap: {c}"
        if self._places.entries != c.entries:
            return False, f"entries differ from those of all slots: {c}"
        for slot, cursor in self.cursors.items():
            epoch, seq = map(int, cursor.split("-"))
            if self.marks.last(slot, epoch) != seq:
                return False, f"cursor {cursor} of {slot} is not its mark"
        return True, ""


def _add(sums: dict[str, int], reason: str, count: int) -> None:
    key = reason if reason in sums or len(sums) < MOST_REASONS else "other"
    sums[key] = sums.get(key, 0) + count
