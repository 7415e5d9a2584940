"""Exploration: what a policy explores with, and what is done before there is one.

Each env of an actor has its own noise size, evenly spread from the least to the most (Li et al. 2023, "Parallel
Q-Learning", §3.2: mixed exploration): some envs exploit, some explore, and nobody has to tune one number. While the
learner has not trained yet, actions are uniform; later a share of them may be (Andrychowicz et al. 2017,
arXiv:1707.01495, appendix A: where reward is rare, small noise around a policy that knows nothing finds nothing), each
held for several steps if wanted (Dabney et al. 2021, "Temporally-extended ε-greedy exploration", arXiv:2006.01782: what
changes at each step goes nowhere). A policy that samples its actions takes normal numbers from here instead of noise:
the actor's seed fixes those too.

Everything here is in policy space, [-1, 1]; what comes out is what is executed and stored.
"""

import numpy as np

from clawq.types import FloatArray


class NoiseLadder:
    """Gaussian noise whose size differs from env to env; implements core.Explorer.

    Args:
        noise_min: standard deviation of the least noisy env, in policy space.
        noise_max: of the noisiest.
        shape: (N, A).
        generator: source of the random numbers.
        random_share: share of an env's actions that are uniform instead.
        random_steps: for how many steps such an action is held, in the mean (geometrically distributed).
    """

    def __init__(
        self,
        noise_min: float,
        noise_max: float,
        shape: tuple[int, int],
        generator: np.random.Generator,
        random_share: float = 0.0,
        random_steps: float = 1.0,
    ) -> None:
        num_envs = shape[0]
        # A lone env takes the middle of the ladder.
        sizes = np.linspace(noise_min, noise_max, num_envs) if num_envs > 1 else [(noise_min + noise_max) / 2]
        self._sizes = np.asarray(sizes, np.float32)[:, None]
        self._shape = shape
        self._generator = generator
        self._random_share = random_share
        self._ends = 1.0 / random_steps
        # A stretch begins, where none goes on, so often that `random_share` of all steps lie within one.
        self._begins = random_share * self._ends / (1.0 - random_share * (1.0 - self._ends))
        self._held = np.zeros(shape, np.float32)
        self._holds = np.zeros((num_envs, 1), bool)

    def uniform(self) -> FloatArray:
        """Actions [N, A] anywhere in [-1, 1]."""
        return self._generator.random(self._shape, dtype=np.float32) * np.float32(2) - np.float32(1)

    def normal(self) -> FloatArray:
        """Standard normal numbers [N, A]."""
        return self._generator.standard_normal(self._shape, dtype=np.float32)

    def perturb(self, action: FloatArray) -> FloatArray:
        """Actions [N, A] with noise, clipped to [-1, 1], the share scattered."""
        return self.scatter(np.clip(action + self.normal() * self._sizes, -1.0, 1.0))

    def scatter(self, action: FloatArray) -> FloatArray:
        """Actions [N, A], the share of them replaced by uniform ones."""
        if self._random_share == 0.0:
            return action
        chance = self._generator.random((2, self._shape[0], 1))
        goes_on = self._holds & (chance[0] >= self._ends)
        begins = ~goes_on & (chance[1] < self._begins)
        self._held = np.where(begins, self.uniform(), self._held)
        self._holds = goes_on | begins
        return np.where(self._holds, self._held, action)


__all__ = ["NoiseLadder"]
