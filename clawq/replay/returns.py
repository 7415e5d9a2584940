"""What an n-step return is made of; travels from the configuration to whatever computes returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Returns:
    """Σ_{i<k} γ^i · r_{t+i} · reward_scale, over k ≤ n steps (nstep.py says when k < n).

    Attributes:
        n: most steps, ≥ 1.
        gamma: discount of one env step.
        reward_scale: factor on every reward.
    """

    n: int
    gamma: float
    reward_scale: float = 1.0
