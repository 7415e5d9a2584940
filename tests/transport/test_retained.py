from hypothesis import given
from hypothesis import strategies as st

from clawq.transport.retained import Retained, slowest

SLOTS = "abc"
steps = st.lists(st.tuples(st.sampled_from(SLOTS), st.integers(1, 100)), max_size=60)


def filled(read: list[tuple[str, int]]) -> tuple[Retained, list[tuple[str, tuple[int, int], int]]]:
    retained, noted = Retained(), []
    for seq, (slot, size) in enumerate(read, 1):
        retained.note(slot, (1, seq), size, 10 * seq)
        noted.append((slot, (1, seq), size))
    return retained, noted


@given(steps, st.dictionaries(st.sampled_from(SLOTS), st.integers(0, 70)), st.integers(0, 3000))
def test_taking_drops_a_covered_prefix_that_is_just_large_enough(
    read: list[tuple[str, int]], covered: dict[str, int], excess: int
) -> None:
    retained, noted = filled(read)
    cursors = {slot: (1, seq) for slot, seq in covered.items()}
    uncovered = sum(size for slot, entry, size in noted if entry > cursors.get(slot, (-1, -1)))
    assert retained.bytes_after(cursors) == uncovered
    total = retained.total_bytes
    dropped = retained.take_oldest(cursors, excess)
    saved = total - retained.total_bytes
    count = len(noted) - sum(retained.entries(slot) for slot in SLOTS)
    assert saved == sum(size for _, _, size in noted[:count])
    assert all(entry <= cursors[slot] for slot, entry, _ in noted[:count]), "nothing uncovered is dropped"
    last = {slot: (entry, 10 * entry[1]) for slot, entry, _ in noted[:count]}
    assert dropped == last, "the last one dropped of each slot"
    assert retained.bytes_after(cursors) == sum(
        size for slot, entry, size in noted[count:] if entry > cursors.get(slot, (-1, -1))
    )
    assert retained.uncovered(cursors) == (
        count < len(noted) and noted[count][1] > cursors.get(noted[count][0], (-1, -1))
    )
    if count:
        assert saved - noted[count - 1][2] < excess, "no more than needed"
    if saved < excess and count < len(noted):
        slot, entry, _ = noted[count]
        assert entry > cursors.get(slot, (-1, -1)), "it stops early only where a checkpoint is missing"


@given(steps, st.sampled_from(SLOTS))
def test_forgetting_a_slot_leaves_the_others_exact(read: list[tuple[str, int]], gone: str) -> None:
    retained, noted = filled(read)
    retained.forget(gone)
    left = [(slot, entry, size) for slot, entry, size in noted if slot != gone]
    assert retained.total_bytes == sum(size for _, _, size in left)
    assert retained.entries(gone) == 0
    assert set(retained.slots()) == {slot for slot, _, _ in left}
    assert retained.mean_bytes() == (retained.total_bytes / len(left) if left else 0)
    retained.take_oldest({slot: (9, 9) for slot in SLOTS}, 10**9)
    assert (retained.total_bytes, retained.slots()) == (0, [])


@given(steps, st.integers(0, 60), st.integers(0, 3000), st.dictionaries(st.sampled_from(SLOTS), st.integers(0, 70)))
def test_cursors_are_held_back_to_where_the_oldest_bytes_end(
    read: list[tuple[str, int]], dropped: int, room: int, wanted: dict[str, int]
) -> None:
    retained, noted = filled(read)
    everything = {slot: (9, 9) for slot in SLOTS}
    retained.take_oldest(everything, sum(size for _, _, size in noted[:dropped]))
    left = noted[dropped:]
    cursors = {slot: (1, seq) for slot, seq in wanted.items()}
    within = retained.within(cursors, room)
    told = 0
    for slot, entry, size in left:
        if entry <= within.get(slot, (-1, -1)):
            told += size
    assert told <= room, "what is told as taken over has room"
    fits, used = set(), 0
    for slot, entry, size in left:
        used += size
        if used <= room:
            fits.add((slot, entry))
    for slot, entry, _ in left:
        asked = entry <= cursors.get(slot, (-1, -1))
        assert ((slot, entry) in fits and asked) == (entry <= within.get(slot, (-1, -1)))


def test_a_long_life_keeps_sums_right_and_memory_bounded() -> None:
    retained = Retained()
    for seq in range(1, 10_001):
        retained.note("a", (1, seq), seq, seq)
        if seq > 100:
            assert retained.take_oldest({"a": (1, seq)}, 1) == {"a": ((1, seq - 100), seq - 100)}
    assert retained.entries("a") == 100
    assert retained.total_bytes == sum(range(9901, 10_001)) == retained.bytes_after({"a": (1, 9900)})
    assert retained.bytes_after({"a": (1, 9990)}) == sum(range(9991, 10_001))
    assert len(retained._columns["a"].ids) < 5000


def test_the_slowest_of_several_readers_counts_and_a_slot_that_one_lacks_is_not_covered() -> None:
    ahead, behind = {"a": (1, 9), "b": (2, 2)}, {"a": (1, 5), "c": (1, 1)}
    assert slowest([ahead, behind]) == slowest([behind, ahead]) == {"a": (1, 5)}
    assert slowest([ahead]) == ahead
