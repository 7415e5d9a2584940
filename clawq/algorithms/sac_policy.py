"""The actor's copy of a SAC policy: a squashed Gaussian. It explores by sampling, with the actor's own numbers."""

import torch

from clawq.algorithms.mlp_policy import MlpPolicy
from clawq.algorithms.sac import SacOptions
from clawq.algorithms.squashed_gaussian import draw, mean_action
from clawq.core import Explorer
from clawq.specs import EnvSpec
from clawq.types import FloatArray, Obs


class SacPolicy(MlpPolicy):
    """Stochastic policy; implements core.Policy."""

    title = "SAC"

    def __init__(self, spec: EnvSpec, options: SacOptions) -> None:
        super().__init__(spec, options, outputs=2 * spec.action.size)

    @torch.inference_mode()
    def act(self, obs: Obs) -> FloatArray:
        """The mean's actions float32 [N, A] in policy space for observations [N, ...]."""
        action: FloatArray = mean_action(self._head(obs)).numpy()
        return action

    @torch.inference_mode()
    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        """Sampled actions [N, A], and no extras."""
        drawn = draw(self._head(obs), torch.from_numpy(explorer.normal()))
        return explorer.scatter(drawn.action.numpy()), {}
