"""The learner's consumer: a thread that turns stream entries into fragments that are fit for the ring.

    read -> repetition? -> decode -> check -> stale? -> stage                     (bounded by bytes, see staging.py)

Guarantees: every entry read is settled once, as committed, duplicate or refused with its reason (a structural fault
goes to the dead letters too). When Redis is away the thread waits with back-off and says so in `state`. Any other error
stops it and is raised again by `take`: it never dies silently. A refused fragment's notices of void rows are handed on
by the next good fragment of its slot. Does not decide when to insert (rate limiter), nor touch the ring.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from clawq.core import BYGONE, Entry, FragmentSource, Slots, Vanished
from clawq.errors import StoreFull, StoreUnavailable, TransportError
from clawq.places import Place
from clawq.replay.ledger import STALE, Counts, Lives, Marks, Missed
from clawq.replay.staging import Staged, Staging
from clawq.replay.staleness import StalenessRule
from clawq.replay.validation import Examiner, Fault
from clawq.replay.voiding import KeptNotices
from clawq.types import Fragment, Voided

#: Payload bytes staged for the learner. Beyond this the thread stops reading, the streams grow up to their windows,
#: and the actors are paced.
STAGED_BYTES = 64_000_000
#: How long one read waits for entries, seconds: what closing may take.
READ_S = 0.2
#: Back-off while Redis is away, seconds: first and longest.
BACKOFF_S = (0.05, 2.0)


class Consumer:
    """Reads, checks and stages the fragments of a run.

    Args:
        source: where entries come from.
        examiner: decodes and checks.
        staleness: how old a fragment may be.
        learner_version: gives the learner's weights version now.
        dead_letter: keeps (entry, reason, detail) of a faulty entry; if Redis is away the letter is lost, and counted.
        state: `state_dict` of a checkpoint to go on from; its `cursors` must be given to the source too.
        staged_bytes: most bytes staged.
    """

    def __init__(
        self,
        source: FragmentSource,
        examiner: Examiner,
        staleness: StalenessRule,
        learner_version: Callable[[], int],
        dead_letter: Callable[[Entry, str, str], None],
        *,
        state: Mapping[str, Any] | None = None,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        self._source, self._examiner, self._dead_letter = source, examiner, dead_letter
        #: May be replaced at any time.
        self.staleness = staleness
        self._learner_version = learner_version
        self._staging = Staging(staged_bytes, state)
        #: What the thread has seen; runs ahead of the ledger's marks by what is staged or taken.
        self._seen = Marks(self._staging.marks, self._staging.horizon)
        self._lives = Lives(self._staging.produced, self._staging.horizon)
        #: Ids to be mirrored in Redis; those of a checkpoint first, since the mirror may have been lost.
        self._handled = self._staging.cursors
        self._notices = KeptNotices(self._staging.notices)
        self._state = "not started"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clawq-consumer", daemon=True)
        self.dead_letters_lost = 0

    # --- the learner's side -------------------------------------------------------------------------------------

    def start(self) -> "Consumer":
        """Start the thread; returns self."""
        self._state = "reading"
        self._thread.start()
        return self

    def take(self, most: int = 1, timeout_s: float = 0.0) -> list[Staged]:
        """Up to `most` fragments in the order of reading; waits up to `timeout_s` for the first.

        Each is to be given to `commit` once it is in the ring. Raises what ended the thread, once nothing is left.
        """
        return self._staging.take(most, timeout_s)

    def commit(self, staged: Staged) -> None:
        """Say that a taken fragment is in the ring."""
        self._staging.commit(staged)

    def refuse(self, staged: Staged, reason: str) -> None:
        """Say that a taken fragment will not go into the ring; its notices of void rows are the caller's to heed."""
        self._staging.commit(staged, reason)

    def committed_cursors(self) -> dict[str, str]:
        """Of each slot the id up to which all is settled: where a resume reads on, and how far trimming may go."""
        return self._staging.cursors

    @property
    def marks(self) -> dict[str, dict[int, int]]:
        """Of each slot and epoch the highest seq settled."""
        return self._staging.marks

    @property
    def counts(self) -> Counts:
        """What became of all settled entries."""
        return self._staging.counts

    @property
    def missed(self) -> dict[str, Missed]:
        """Of each slot what was trimmed before it was read; nothing of it for a required reader."""
        return self._staging.missed

    def hold(self, most_bytes: int) -> None:
        """Stage at most so many payload bytes from now on."""
        self._staging.hold(most_bytes)

    @property
    def books(self) -> tuple[dict[str, Any], dict[str, Place]]:
        """Sums, and of each slot where reading stands in its stream, of one moment."""
        return self._staging.books

    def on_server(self, server: str, found: Mapping[str, Vanished]) -> None:
        """The source tells, in this consumer's thread, which server (run id) it reads, and what its streams are."""
        self._staging.on_server(server, found)

    def on_slots(self, slots: Slots) -> None:
        """The source tells, in this consumer's thread, which streams there are: what is gone for long is forgotten."""
        forgotten = self._staging.look(slots)
        self._seen.forget(forgotten)
        self._lives.forget(forgotten)
        self._notices.forget(forgotten)
        self._lives.horizon = self._seen.horizon

    def newest(self, slot: str) -> tuple[int, int]:
        """(epoch, seq) up to which entries of a slot were read, staged or not; for the source, in this thread."""
        return self._seen.newest(slot)

    @property
    def staged(self) -> tuple[int, int]:
        """Fragments that wait to be taken, and their bytes."""
        return self._staging.queued

    @property
    def state(self) -> str:
        """What the thread does, for people: reading, full, waiting for Redis (why), stopped, failed (why)."""
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if it did not end well."""
        return self._staging.failure

    def state_dict(self) -> dict[str, Any]:
        """Marks, cursors and counts of all that is settled, for a checkpoint: dicts, lists, strings, integers."""
        return self._staging.state_dict()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; what is not committed is read again by a resume. Idempotent."""
        self._stop.set()
        self._staging.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check_valid(self) -> tuple[bool, str]:
        """Do queue, open entries and ledger agree? (True, "") or (False, what is wrong)."""
        return self._staging.check_valid()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_on()
            self._state = "stopped"
        except BaseException as error:
            self._state = f"failed: {type(error).__name__}: {error}"
            self._staging.fail(error)

    def _read_on(self) -> None:
        backoff_s = BACKOFF_S[0]
        while not self._stop.is_set():
            try:
                entries = self._source.read(READ_S)
            except (StoreUnavailable, StoreFull) as error:
                self._state = f"waiting for Redis: {error}"
                self._stop.wait(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_S[1])
                continue
            self._state, backoff_s = "reading", BACKOFF_S[0]
            for entry in entries:
                if not self._accept(entry):
                    return
            self._acknowledge()

    def _accept(self, entry: Entry) -> bool:
        """Settle one entry, or stage its fragment; False if we were stopped before there was room."""
        slot, epoch, seq = entry.slot, entry.epoch, entry.seq
        if entry.missed:
            self._staging.miss(entry)
            self._seen.advance(slot, epoch, max(seq, self._seen.last(slot, epoch)))
        elif not self._seen.is_new(slot, epoch, seq):
            self._staging.drop(entry, "duplicate")
            seq = max(seq, self._seen.last(slot, epoch))
        else:
            found = self._examine(entry)
            if isinstance(found, Fault):
                self._staging.drop(entry, found.reason, found.meta)
            elif not self._lives.is_new(slot, found.meta):
                self._staging.drop(entry, "repeated", found.meta)
            elif self._staging.wait_for_room(len(entry.payload), self._when_full):
                self._state = "reading"
                inherited = self._notices.take(found.meta)
                self._staging.put(entry, with_notices(found, inherited), inherited)
            else:
                return False
            if found.meta is not None:
                self._lives.advance(slot, found.meta)
            self._seen.advance(slot, epoch, seq)
        if entry.stream != BYGONE:
            # (Of what is read from elsewhere no actor waits to hear.)
            self._handled[slot] = f"{epoch}-{seq}"
        return True

    def _examine(self, entry: Entry) -> Fragment | Fault:
        """The fragment if it is fit to be used; else its fault, after a dead letter and with its notices kept."""
        found = self._examiner.examine(entry)
        if isinstance(found, Fault):
            self._bury(entry, found)
        else:
            version, now = found.meta.weights_version, self._learner_version()
            if not self.staleness.admit(version, now):
                found = Fault(STALE, f"weights version {version}, learner at {now}", found.meta)
        if isinstance(found, Fault) and found.meta is not None:
            self._notices.keep(found.meta)
        return found

    def _when_full(self) -> None:
        # Actors are paced by what we have taken over: tell them before we wait.
        self._acknowledge()
        self._state = "full"

    def _bury(self, entry: Entry, fault: Fault) -> None:
        try:
            self._dead_letter(entry, fault.reason, fault.detail)
        except TransportError:
            self.dead_letters_lost += 1

    def _acknowledge(self) -> None:
        """Mirror how far we are, for pacing. If Redis is away, the next call says it all again."""
        if not self._handled:
            return
        try:
            self._source.acknowledge(self._handled)
            self._handled = {}
        except (StoreUnavailable, StoreFull) as error:
            self._state = f"waiting for Redis: {error}"


def with_notices(fragment: Fragment, inherited: tuple[Voided, ...]) -> Fragment:
    """The fragment with these notices before its own."""
    if not inherited:
        return fragment
    return replace(fragment, meta=replace(fragment.meta, voided=(*inherited, *fragment.meta.voided)))
