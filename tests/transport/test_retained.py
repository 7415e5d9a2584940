from hypothesis import given
from hypothesis import strategies as st

from clawq.transport.retained import Retained

SLOTS = "abc"
steps = st.lists(st.tuples(st.sampled_from(SLOTS), st.integers(1, 100)), max_size=60)


def filled(read: list[tuple[str, int]]) -> tuple[Retained, list[tuple[str, tuple[int, int], int]]]:
    retained, noted = Retained(), []
    for seq, (slot, size) in enumerate(read, 1):
        retained.note(slot, (1, seq), size)
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
    assert dropped == {slot: entry for slot, entry, _ in noted[:count]}, "the last one dropped of each slot"
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
