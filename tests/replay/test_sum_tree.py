"""The sum tree against running totals of plain numbers."""

import numpy as np
import pytest

from clawq.replay import sum_tree
from clawq.replay.sum_tree import GROUP, SumTree
from clawq.types import Array

SIZES = [1, GROUP - 1, GROUP, GROUP + 1, 1000]


@pytest.fixture(autouse=True, params=[GROUP, 1 << 20], ids=["many levels", "one level"])
def levels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_tree, "LONG", request.param)


def tree_of(numbers: Array) -> SumTree:
    tree = SumTree(len(numbers))
    tree.set(np.arange(len(numbers)), numbers)
    return tree


@pytest.mark.parametrize("size", SIZES)
def test_marks_are_found_where_the_running_total_passes_them(size: int) -> None:
    rng = np.random.default_rng(size)
    # Small whole numbers: all sums are exact, in whatever order they are made. Many zeros among them.
    numbers = np.zeros(size)
    tree = SumTree(size)
    for _ in range(30):
        slots = rng.integers(0, size, size=rng.integers(1, 2 * size + 1))
        values = rng.integers(0, 4, size=size).astype(float)
        numbers[slots] = values[slots]
        tree.set(slots, values[slots])
        assert tree.check_valid() == (True, "")
        assert tree.total == numbers.sum()
        if numbers.sum():
            marks = np.concatenate((rng.uniform(0, numbers.sum(), 200), np.arange(numbers.sum())))
            expected = np.searchsorted(np.cumsum(numbers), marks, side="right")
            np.testing.assert_array_equal(tree.find(marks), expected)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_whose_number_is_0_is_ever_found_not_even_at_the_very_end(size: int) -> None:
    numbers = np.random.default_rng(0).uniform(0.0, 1.0, size) ** 20
    numbers[1::2] = 0.0
    tree = tree_of(numbers)
    total = tree.total
    marks = np.concatenate((np.random.default_rng(1).uniform(0, total, 5000), [total, 2 * total, 0.0]))
    assert (tree.get(tree.find(marks)) > 0).all()


def test_tiny_numbers_beside_huge_ones_neither_vanish_nor_drift() -> None:
    numbers = np.full(1000, 1e-6)
    tree = tree_of(numbers)
    for _ in range(1000):
        tree.set(np.array([5]), 1e12)
        tree.set(np.array([5]), 1e-6)
    assert tree.total == pytest.approx(1e-3, rel=1e-6)


def test_all_numbers_are_raised_to_a_power() -> None:
    tree = tree_of(np.array([0.0, 1.0, 4.0, 9.0]))
    tree.raise_to(0.5)
    assert tree.get(np.arange(4)).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert tree.total == 6.0
    assert tree.check_valid() == (True, "")


def test_a_sum_that_does_not_fit_is_noticed() -> None:
    tree = tree_of(np.ones(4000))
    if len(tree._levels) == 1:
        pytest.skip("there are no sums to differ from")
    tree._levels[-2][0, 3] = 2.0
    assert tree.check_valid() == (False, "a group's sum is not that of its numbers")
