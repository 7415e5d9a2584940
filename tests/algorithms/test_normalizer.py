from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.algorithms.normalizer import EPSILON, RunningNorm
from clawq.errors import CheckpointInvalid

CPU = torch.device("cpu")


def make_norm(size: int = 3, clip: float = 5.0) -> RunningNorm:
    return RunningNorm(size, clip, CPU)


def seen(norm: RunningNorm, rows: torch.Tensor, valid: torch.Tensor) -> None:
    """Steps in one view."""
    norm.update(rows.unsqueeze(1), valid)


def all_valid(rows: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(rows), dtype=torch.bool)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 1000))
def test_C49_any_division_into_updates_gives_the_statistics_of_all_valid_rows(cuts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(40, 3)) * [1.0, 100.0, 1e-3] + [0.0, 1e4, -7.0]).astype(np.float32)
    valid = rng.random(40) < 0.7
    norm = make_norm()
    edges = [0, *sorted(cuts), 40]
    for first, end in pairwise(edges):
        seen(norm, torch.from_numpy(rows[first:end]), torch.from_numpy(valid[first:end]))
    kept = rows[valid].astype(np.float64)
    assert norm.count == len(kept)
    if len(kept):
        np.testing.assert_allclose(norm.mean.numpy(), kept.mean(0), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(norm.var.numpy(), kept.var(0), rtol=1e-6, atol=1e-15)


def test_invalid_rows_count_for_nothing_even_if_they_are_not_finite() -> None:
    norm = make_norm()
    rows = torch.tensor([[1.0, 2.0, 3.0], [float("nan")] * 3, [3.0, 4.0, 5.0]])
    seen(norm, rows, torch.tensor([True, False, True]))
    assert norm.mean.tolist() == [2.0, 3.0, 4.0]
    assert (norm.count, norm.refused) == (2, 0)


def test_a_valid_row_that_is_not_finite_is_refused_and_counted() -> None:
    norm = make_norm()
    seen(norm, torch.tensor([[1.0, 2.0, 3.0], [1.0, float("inf"), 0.0]]), torch.tensor([True, True]))
    assert norm.mean.tolist() == [1.0, 2.0, 3.0]
    assert (norm.count, norm.refused) == (1, 1)


def test_before_any_row_values_pass_clipped() -> None:
    out = make_norm(clip=2.0).normalize(torch.tensor([[0.5, -9.0, 9.0]]), torch.empty(1, 3))
    torch.testing.assert_close(out, torch.tensor([[0.5, -2.0, 2.0]]))


def test_normalised_values_equal_the_formula() -> None:
    norm = make_norm(clip=1.5)
    rows = torch.randn(500, 3) * 3 + 7
    seen(norm, rows, all_valid(rows))
    exact = rows.double()
    expected = ((exact - exact.mean(0)) / (exact.var(0, correction=0) + EPSILON).sqrt()).clamp(-1.5, 1.5).float()
    torch.testing.assert_close(norm.normalize(rows, torch.empty_like(rows)), expected, rtol=1e-5, atol=1e-5)


def test_steps_in_several_views_count_once_and_all_views_are_in_the_statistics() -> None:
    norm = make_norm()
    views = torch.randn(20, 2, 3)
    views[3, 1, 0] = float("nan")  # one view that is not finite refuses the step
    valid = all_valid(views)
    valid[7] = False
    norm.update(views, valid)
    kept = np.delete(views.double().numpy(), [3, 7], 0).reshape(-1, 3)
    np.testing.assert_allclose(norm.mean.numpy(), kept.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var.numpy(), kept.var(0), rtol=1e-12)
    assert (norm.count, norm.refused) == (18, 1)


def test_a_constant_column_stays_finite() -> None:
    norm = make_norm(1)
    rows = torch.full((10, 1), 3.25)
    seen(norm, rows, all_valid(rows))
    assert norm.normalize(torch.tensor([[3.25], [4.0]]), torch.empty(2, 1)).flatten().tolist() == [0.0, 5.0]


def test_state_round_trip_normalises_bit_identically_and_shares_nothing() -> None:
    norm, other = make_norm(), make_norm()
    rows = torch.randn(50, 3)
    seen(norm, rows, all_valid(rows))
    state = norm.state_dict()
    other.load_state_dict(state)
    state["mean"].zero_()
    assert torch.equal(norm.normalize(rows, torch.empty_like(rows)), other.normalize(rows, torch.empty_like(rows)))
    seen(norm, rows + 1, all_valid(rows))
    seen(other, rows + 1, all_valid(rows))
    assert torch.equal(norm.mean, other.mean)
    assert torch.equal(norm.var, other.var)
    assert norm.count == other.count == 100


def test_state_of_another_width_is_refused() -> None:
    with pytest.raises(CheckpointInvalid, match="4 columns, this run has 3"):
        make_norm(3).load_state_dict(make_norm(4).state_dict())
