"""`clawq bisect`: which fragment made learning go wrong. By replaying; nothing of the run is changed.

    1. one replay from the beginning, up to the first update that is wrong (`clawq.programs.divergence`)
    2. the fragments committed shortly before are suspects; learning is taken up again from just before them, with only
       the first k of them and some more updates: the smallest k with which it still goes wrong names the culprit
    3. all suspects but the culprit: if learning stays sound, it was that one; if not, there are more, and 2 is repeated

Leaving fragments out changes which rows are drawn, so learning may meet the poison later than the run did: that is what
the `SLACK` updates at the end of each try are for.
"""

import copy
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from clawq.core import Entry
from clawq.errors import UserError
from clawq.metrics import Writers
from clawq.programs import learning
from clawq.programs.divergence import Limits, Watch
from clawq.programs.recording import Pupil, Recording
from clawq.programs.resume import bring_back_ring
from clawq.programs.run import Run, make_folders
from clawq.programs.schedule import FragmentCommitted, Record, UpdatesTried

#: Fragments between two places at which learning can be taken up again; the older of the last two is used.
APART = 64
#: Updates beyond the wrong one that a try may take until it counts as sound.
SLACK = 300
#: Culprits that are looked for.
MOST_CULPRITS = 5


@dataclass(frozen=True, slots=True)
class Suspect:
    """A fragment, by its number in the schedule."""

    number: int
    record: FragmentCommitted


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        updates: made in the recording, or up to the wrong one.
        wrong: what went wrong, None if nothing did.
        culprits: the fragments that it goes wrong with; empty if it goes wrong without any of them.
        confirmed: without the culprits, and with all others, learning stays sound.
        fragments: committed up to there.
    """

    updates: int
    wrong: str | None
    culprits: tuple[Suspect, ...] = ()
    confirmed: bool = False
    fragments: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where learning can be taken up again: after so many records and fragments."""

    records: int
    fragments: int
    state: Mapping[str, Any] | None
    watch: Watch


@dataclass(frozen=True, slots=True)
class _Wrong:
    """The first wrong update: after so many records, tries and fragments."""

    what: str
    records: int
    tried: int
    fragments: int
    last: UpdatesTried


class _Found(Exception):
    """An update is wrong; caught here."""


class Stopped(Exception):
    """Somebody asked for the end."""


class Bisection:
    """Looks for the culprit.

    Args:
        recording: of the run.
        limits: what counts as wrong.
        stop: set it to give up; `find` raises Stopped.
        say: one line for people.
    """

    def __init__(self, recording: Recording, limits: Limits, stop: threading.Event, say: Callable[[str], None]) -> None:
        self._recording, self._limits, self._stop, self._say = recording, limits, stop, say
        self._places = [_Place(0, 0, None, Watch(limits))]
        self._updates = 0
        #: Whether the last try made any update.
        self._learned = False

    def find(self) -> Verdict:
        """The verdict. Raises what replaying raises (ExperienceGone, ScheduleInvalid), or Stopped."""
        with self._learner() as pupil:
            wrong = self._first_wrong(pupil)
        if wrong is None:
            return Verdict(self._updates, None)
        self._say(f"update {wrong.tried} goes wrong, after {wrong.fragments} fragments: {wrong.what}")
        nearest = self._places[-2] if len(self._places) > 2 else self._places[0]
        for place in dict.fromkeys((nearest, self._places[0])):
            suspects = self._suspects(place, wrong)
            if not self._goes_wrong(place, wrong, suspects, set()):
                return self._accuse(place, wrong, suspects)
            self._say("it goes wrong without these fragments too")
        return Verdict(wrong.tried, wrong.what, fragments=wrong.fragments)

    def _accuse(self, place: _Place, wrong: _Wrong, suspects: list[Suspect]) -> Verdict:
        culprits: list[Suspect] = []
        while len(culprits) < MOST_CULPRITS:
            left = [suspect for suspect in suspects if suspect not in culprits]
            if not left:
                break
            culprits.append(self._smallest(place, wrong, suspects, left))
            kept = {suspect.number for suspect in suspects if suspect not in culprits}
            if not self._goes_wrong(place, wrong, suspects, kept):
                if not self._learned:
                    # Nothing is left to learn from: that clears nobody.
                    break
                return Verdict(wrong.tried, wrong.what, tuple(culprits), True, wrong.fragments)
        if len(culprits) == MOST_CULPRITS:
            return Verdict(wrong.tried, wrong.what, tuple(culprits), False, wrong.fragments)
        return Verdict(wrong.tried, wrong.what, fragments=wrong.fragments)

    def _smallest(self, place: _Place, wrong: _Wrong, suspects: list[Suspect], left: list[Suspect]) -> Suspect:
        """The last of the fewest first of `left` with which it goes wrong; with all of them it does."""
        sound, bad = 0, len(left)
        while bad - sound > 1:
            middle = (sound + bad) // 2
            if self._goes_wrong(place, wrong, suspects, {suspect.number for suspect in left[:middle]}):
                bad = middle
            else:
                sound = middle
        return left[bad - 1]

    # --- replaying ------------------------------------------------------------------------------------------------

    @contextmanager
    def _learner(self, place: _Place | None = None) -> Iterator[Pupil]:
        """A learner as it was at a place, in a folder that goes away."""
        recorded = self._recording
        config = recorded.config
        # That it is not finite is what we look for; it must not end there.
        lenient = config.learner.model_copy(update={"max_non_finite": 10**9, "snapshot": "never"})
        with tempfile.TemporaryDirectory(prefix="clawq-bisect-") as folder:
            config = config.model_copy(update={"learner": lenient})
            run = Run(recorded.run.id, recorded.run.tag, Path(folder), config, recorded.run.spec)
            make_folders(run)
            pupil = Pupil(run, recorded, Writers({}))
            try:
                if place is not None and place.state is not None:
                    bring_back_ring(pupil.parts, place.state["ring"], (), self._fetch, recorded.examiner)
                    pupil.trainer.state.load_state_dict(place.state, 0)
                yield pupil
            finally:
                pupil.close()

    def _fetch(self, slot: str, epoch: int, seq: int) -> Entry | None:
        return self._recording.fetch(slot, epoch, seq)

    def _first_wrong(self, pupil: Pupil) -> _Wrong | None:
        """Follow the whole schedule up to the first wrong update, leaving places behind."""
        watch, done, fragments, tried = self._places[0].watch, 0, 0, 0
        watch = copy.deepcopy(watch)
        last: Record | None = None

        def counted() -> Iterator[Record]:
            nonlocal done
            records = self._recording.as_configured(
                "Nothing goes wrong up to there; what follows is no matter of one fragment. Look at what was changed"
            )
            for record in records:
                yield record
                done += 1
                if isinstance(record, FragmentCommitted) and fragments % APART == 0:
                    state = pupil.trainer.state.state_dict()
                    here = _Place(done, fragments, state, copy.deepcopy(watch))
                    self._places[1:] = [*self._places[1:], here][-2:]

        def after(record: Record) -> None:
            nonlocal fragments, tried, last
            if self._stop.is_set():
                raise Stopped
            if isinstance(record, FragmentCommitted):
                fragments += 1
            elif isinstance(record, UpdatesTried):
                tried, last = tried + 1, record
                found = self._judge(pupil, watch)
                if found is not None:
                    raise _Found(found)

        try:
            learning.apply(counted(), self._fetch, pupil.parts, self._recording.examiner, after=after)
        except _Found as found:
            assert isinstance(last, UpdatesTried)
            return _Wrong(str(found), done, tried, fragments, last)
        finally:
            self._updates = tried
        return None

    def _judge(self, pupil: Pupil, watch: Watch) -> str | None:
        # The first one that is skipped ends it.
        updater = pupil.parts.updater
        try:
            return watch.observe(updater.metrics, updater.skipped > 0)
        except KeyError as error:
            known = ", ".join(updater.metrics)
            raise UserError(f"--metric {error.args[0]}: this algorithm reports {known}") from None

    def _suspects(self, place: _Place, wrong: _Wrong) -> list[Suspect]:
        found, number = [], place.fragments
        for record in islice(self._recording.records(), place.records, wrong.records + 1):
            if isinstance(record, FragmentCommitted):
                number += 1
                found.append(Suspect(number, record))
        return found

    def _goes_wrong(self, place: _Place, wrong: _Wrong, suspects: list[Suspect], kept: set[int]) -> bool:
        """Whether learning goes wrong from that place on with only these of the suspects, by number."""
        watch = copy.deepcopy(place.watch)
        self._learned = False
        with self._learner(place) as pupil:
            skipped = pupil.parts.updater.skipped

            def after(record: Record) -> None:
                if self._stop.is_set():
                    raise Stopped
                if isinstance(record, UpdatesTried):
                    self._learned = True
                    updater = pupil.parts.updater
                    if watch.observe(updater.metrics, updater.skipped > skipped) is not None:
                        raise _Found

            records = self._without(pupil, place, wrong, kept)
            try:
                learning.apply(records, self._fetch, pupil.parts, self._recording.examiner, after=after)
            except _Found:
                is_wrong = True
            else:
                is_wrong = False
        self._say(f"with {len(kept)} of {len(suspects)} suspects: {'goes wrong' if is_wrong else 'sound'}")
        return is_wrong

    def _without(self, pupil: Pupil, place: _Place, wrong: _Wrong, kept: set[int]) -> Iterator[Record]:
        """The schedule from a place to the wrong update, without the other suspects, and some more updates."""
        parts, number = pupil.parts, place.fragments
        batch_size = parts.config.replay.batch_size
        for record in islice(self._recording.records(), place.records, wrong.records + 1):
            if isinstance(record, FragmentCommitted):
                number += 1
                if number in kept:
                    yield record
            elif isinstance(record, UpdatesTried):
                one = replace(record, count=1)
                # With less in the ring there may be nothing to draw from yet.
                yield from (one for _ in range(record.count) if parts.sampler.ready(batch_size))
            else:
                yield record
        one = replace(wrong.last, count=1)
        yield from (one for _ in range(SLACK) if parts.sampler.ready(batch_size))
