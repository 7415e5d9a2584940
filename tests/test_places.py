"""Where a reader stands, and the total of what is gone: exact whatever comes, goes and comes back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.core import OVER, Stream, Vanished
from clawq.places import Place, Places

STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "read", "trim", "sweep", "look", "save"]), st.integers(0, 3)), max_size=120
)


class Run:
    """What a server counts of some slots, and a reader that settles what it reads at once.

    Args:
        optional: entries are trimmed though it has not read them.
    """

    def __init__(self, optional: bool) -> None:
        self.optional, self.places = optional, Places()
        self.streams: dict[str, Stream] = {}
        self.added: dict[str, int] = {}
        #: Slot -> ordinals in its stream; how many it ever had; and up to which the reader knows.
        self.there: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.swept = self.epoch = 0

    def send(self, slot: str) -> None:
        self.epoch += 1
        if slot not in self.streams:
            self.streams[slot], self.added[slot] = Stream(self.epoch, self.written.get(slot, 0)), 0
        self.written[slot] = self.written.get(slot, 0) + 1
        self.added[slot] += 1
        self.there.setdefault(slot, []).append(self.written[slot])

    def read(self, slot: str) -> None:
        known = self.known.get(slot, 0)
        ordinal = next((one for one in self.there.get(slot, ()) if one > known), None)
        if ordinal is None:
            return
        if ordinal > known + 1:
            self.places.miss(slot, self.streams[slot], ordinal - 1, ordinal - 1 - known)
        self.places.settle(slot, f"{ordinal}-0", self.streams[slot])
        self.known[slot] = ordinal

    def trim(self, slot: str) -> None:
        there = self.there.get(slot)
        if there and (self.optional or there[0] <= self.known.get(slot, 0)):
            there.pop(0)

    def sweep(self, slot: str) -> None:
        if slot in self.streams and not self.there[slot]:
            self.swept += self.added.pop(slot)
            del self.streams[slot]

    def look(self, _: str) -> None:
        for slot, written in self.written.items():
            behind = written - self.known.get(slot, 0)
            if behind and not self.there[slot]:
                self.places.miss(slot, self.streams.get(slot, OVER), written, behind)
                self.known[slot] = written
        self.places.look(self.streams, self.swept)

    def save(self, _: str) -> None:
        self.places = Places(*self.places.state())

    def differences(self) -> tuple[dict[str, int], int]:
        """(slot -> what nothing accounts for in its stream, the same of all that are gone)."""
        places, gone = self.places.all(), self.places.gone
        here, settled, gap = {}, gone.entries, gone.gap
        for slot, place in places.items():
            if slot not in self.streams or self.streams[slot].born != place.born:
                settled, gap = settled + place.settled[0], gap + place.gap
        for slot, stream in self.streams.items():
            place = places.get(slot, Place())
            place = place if place.born == stream.born else Place()
            at = int(place.at.partition("-")[0])
            after = sum(ordinal > at for ordinal in self.there[slot])
            here[slot] = self.added[slot] - place.settled[0] - after - place.gap
        return here, self.swept - settled - gap


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_of_every_stream_and_of_all_that_are_gone_both_sides_agree_at_any_moment(steps: list[tuple[str, int]]) -> None:
    run = Run(optional=False)
    for what, number in steps:
        getattr(run, what)(f"s{number}")
        here, gone = run.differences()
        assert not any(here.values())
        assert gone == 0
    run.look("")
    assert run.places.all().keys() <= run.streams.keys()


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_what_an_optional_reader_is_not_told_of_yet_is_all_that_differs(steps: list[tuple[str, int]]) -> None:
    run = Run(optional=True)
    for what, number in steps:
        getattr(run, what)(f"s{number}")
        here, gone = run.differences()
        untold = (
            sum(run.written.values())
            - sum(run.known.values())
            - sum(ordinal > run.known.get(slot, 0) for slot, there in run.there.items() for ordinal in there)
        )
        assert sum(here.values()) + gone == untold
        assert gone >= 0
    for slot in run.there:
        while any(ordinal > run.known.get(slot, 0) for ordinal in run.there[slot]):
            run.read(slot)
    run.look("")
    here, gone = run.differences()
    assert not any(here.values())
    assert gone == 0


def test_with_another_server_all_that_is_gone_is_earlier_but_what_came_back() -> None:
    places = Places()
    for number in range(5):
        places.settle("a", f"1-{number + 1}", Stream(1))
        places.settle("b", f"2-{number + 1}", Stream(2))
    places.look({"b": 2}, 5)
    assert (places.gone.entries, places.gone.earlier) == (5, 0)
    # It comes back empty; two of "b" were read and are not settled yet
    places.vanished("b", Vanished(0, 0, "0-0"), unsettled=2)
    places.moved()
    places.settle("b", "2-6", Stream(2))
    places.look({}, 0, busy={"b"})
    places.settle("b", "2-7", Stream(2))
    places.settle("b", "9-1", Stream(9))
    assert (places.gone.entries, places.gone.earlier, places.before) == (0, 12, 12)
    assert places.all() == {"b": Place(1, 0, "9-1", 0, 9)}
    assert places.entries == 13
    # Or in an older state, in which four had been swept
    older = Places(*places.state())
    older.vanished("b", Vanished(0, 0, "0-0"), unsettled=0)
    older.moved()
    older.look({}, 4)
    assert (older.gone.entries, older.gone.earlier, older.entries) == (4, 9, 13)


def test_who_begins_late_has_missed_nothing_of_what_was_swept_before() -> None:
    places = Places()
    assert places.begin(7) == 7
    # It was stopped before it had read anything, and begins again
    assert Places(*places.state()).begin(9) == 2
    places.settle("a", "3-1", Stream(3))
    assert places.begin(11) == 0
    places.look({}, 8)
    assert (places.gone.entries, places.gone.gap) == (1, 7)
