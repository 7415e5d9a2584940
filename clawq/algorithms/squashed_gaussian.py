"""The squashed Gaussian policy of SAC: a = tanh(u), u ~ N(mean, std²), with its exact log-probability.

The head of the network, [B, 2A], is the mean and the logarithm of std, side by side. Learner and actors draw by the
same function. The density of a takes the change of variables into account (Haarnoja et al. 2018, arXiv:1812.05905,
appendix C): log π(a) = log N(u) − Σ log(1 − tanh(u)²), where log(1 − tanh(u)²) = 2·(log 2 − u − softplus(−2u)) stays
exact where tanh(u) rounds to 1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

#: Bounds of log std (those of the paper's authors): outside them the network's output has no gradient.
LEAST_LOG_STD, LARGEST_LOG_STD = -20.0, 2.0
_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """Actions that were drawn, and how.

    Attributes:
        head: [B, 2A], what they were drawn from.
        noise: [B, A], the standard normal numbers that were used.
        std: [B, A].
        action: [B, A], in [-1, 1].
        log_prob: [B], of the actions.
    """

    head: Tensor
    noise: Tensor
    std: Tensor
    action: Tensor
    log_prob: Tensor

    def write_slope(self, by_action: Tensor, by_log_prob: Tensor, out: Tensor) -> None:
        """The gradient of a loss by the head, the noise held fixed (reparameterisation).

        Args:
            by_action: [B, A], of the loss by the actions where they come in directly.
            by_log_prob: 0-dim or [B, 1], by the log-probabilities.
            out: takes it, [B, 2A].
        """
        size = self.action.shape[1]
        # −log(1 − tanh(u)²) rises by 2·tanh(u) with u.
        by_mean = by_action * (1.0 - self.action.square()) + 2.0 * by_log_prob * self.action
        raw = self.head[:, size:]
        inside = (raw >= LEAST_LOG_STD) & (raw <= LARGEST_LOG_STD)
        out[:, :size] = by_mean
        out[:, size:] = (by_mean * self.std * self.noise - by_log_prob) * inside


def draw(head: Tensor, noise: Tensor) -> Draw:
    """Draw actions with given standard normal numbers [B, A]."""
    mean, raw = head.chunk(2, 1)
    log_std = raw.clamp(LEAST_LOG_STD, LARGEST_LOG_STD)
    std = log_std.exp()
    before = torch.addcmul(mean, std, noise)
    squash = 2.0 * (math.log(2.0) - before - softplus(-2.0 * before))
    log_prob = (-0.5 * noise.square() - log_std - _HALF_LOG_2_PI - squash).sum(1)
    return Draw(head, noise, std, before.tanh(), log_prob)


def mean_action(head: Tensor) -> Tensor:
    """Tanh of the mean, [B, A]: what the policy does without exploring."""
    return head.chunk(2, 1)[0].tanh()
