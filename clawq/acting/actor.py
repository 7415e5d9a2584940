"""The actor: a copy of the policy under one weights version, and its exploration.

While the adopted weights are untrained (`updates == 0`) actions are uniform and no policy is built: building one needs
torch, whose import takes seconds in which the envs can already run. The first trained weights build it. Of an algorithm
that learns from what its policy says beside each action, the first weights do: what is done at random is of no use.
"""

from collections.abc import Callable
from typing import Any

from clawq.acting.exploration import NoiseLadder
from clawq.core import Explorer, Policy, Weights
from clawq.types import FloatArray, Obs


class Actor:
    """Chooses actions.

    Args:
        exploration: what the policy explores with, and what is done before there is one.
        make_policy: builds the policy; called once, when the first trained weights are adopted.
        explores: act uniformly under untrained weights.
    """

    def __init__(self, exploration: NoiseLadder, make_policy: Callable[[], Policy], explores: bool = True) -> None:
        self._exploration, self._explores = exploration, explores
        self._make_policy = make_policy
        self._policy: Policy | None = None
        self._explore: Callable[[Obs, Explorer], tuple[FloatArray, Obs]] | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """The adopted weights version; 0 before the first."""
        return self._version

    def needs_policy(self, weights: Weights) -> bool:
        """Whether acting under these weights takes the policy."""
        return weights.updates > 0 or not self._explores

    def adopt(self, weights: Weights) -> None:
        """Act under these weights from now on.

        Raises:
            WeightsCorrupt: they do not fit the policy; the actor still acts under the old ones.
        """
        if self.needs_policy(weights):
            if self._policy is None:
                self._policy = self._make_policy()
            self._policy.load(weights.arrays)
            self._explore = _without_gradients(self._policy.explore)
        else:
            self._explore = None
        self._version = weights.version

    def act(self, obs: Obs) -> tuple[FloatArray, Obs]:
        """Executed actions [N, A] in policy space, and the extras to store."""
        if self._explore is None:
            return self._exploration.uniform(), {}
        return self._explore(obs, self._exploration)


def _without_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` under torch.inference_mode."""
    import torch

    return torch.inference_mode()(call)


__all__ = ["Actor"]
