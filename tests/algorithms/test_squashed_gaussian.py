import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from clawq.algorithms.squashed_gaussian import LARGEST_LOG_STD, Draw, draw, mean_action


def drawn(rows: int = 500, spread: float = 1.5, dtype: torch.dtype = torch.float64) -> Draw:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(rows, 6, generator=generator, dtype=dtype) * spread
    return draw(head, torch.randn(rows, 3, generator=generator, dtype=dtype))


def test_the_log_probability_is_that_of_torch_distributions() -> None:
    mine = drawn()
    normal = Normal(mine.head[:, :3], mine.head[:, 3:].clamp(-20, 2).exp())
    squashed = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    # The cache gives torch the number before tanh, without which it cannot know it near the bounds.
    before = normal.loc + normal.scale * mine.noise
    action = squashed.transforms[0](before)
    torch.testing.assert_close(mine.action, action)
    expected: Tensor = squashed.log_prob(action).sum(1)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mine.log_prob, expected)


def test_the_density_of_actions_sums_to_one() -> None:
    mean, log_std = 0.4, -0.3
    action = torch.linspace(-1, 1, 200_003, dtype=torch.float64)[1:-1]
    noise = ((action.atanh() - mean) / math.exp(log_std)).unsqueeze(1)
    head = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(action), 2)
    mine = draw(head, noise)
    torch.testing.assert_close(mine.action[:, 0], action)
    assert torch.trapezoid(mine.log_prob.exp(), action).item() == pytest.approx(1.0, abs=1e-6)


def test_where_tanh_rounds_to_one_the_log_probability_is_still_exact() -> None:
    # log N(0; 0, 1) − log(1 − tanh(20)²), where 1 − tanh(u)² = 4·exp(−2u) to 17 digits
    mine = draw(torch.tensor([[20.0, 0.0]]), torch.zeros(1, 1))
    assert mine.action.item() == 1.0
    assert mine.log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - (math.log(4.0) - 40.0), rel=1e-6)


@pytest.mark.parametrize("spread", [0.5, 4.0])  # with 4 a share of the log stds is beyond its bounds
def test_the_gradient_is_that_of_autograd(spread: float) -> None:
    mine = drawn(spread=spread)
    assert (spread > 1) == bool((mine.head[:, 3:] > LARGEST_LOG_STD).any())
    weight = torch.tensor([0.3], dtype=torch.float64)
    by_action = torch.randn(500, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    head: Tensor = mine.head.clone().requires_grad_()
    again = draw(head, mine.noise)
    loss = weight * again.log_prob.sum() + (again.action * by_action).sum()
    (expected,) = torch.autograd.grad(loss, head)
    out = torch.empty_like(mine.head)
    mine.write_slope(by_action, weight, out)
    torch.testing.assert_close(out, expected)


def test_the_mean_action_is_a_draw_without_noise() -> None:
    mine = drawn()
    torch.testing.assert_close(mean_action(mine.head), draw(mine.head, torch.zeros_like(mine.noise)).action)
