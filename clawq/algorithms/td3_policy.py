"""The actor's copy of a TD3 policy: tanh of the network; it explores by what the run's noise adds."""

import torch

from clawq.algorithms.mlp_policy import MlpPolicy
from clawq.algorithms.td3 import Td3Options
from clawq.core import Explorer
from clawq.specs import EnvSpec
from clawq.types import FloatArray, Obs


class Td3Policy(MlpPolicy):
    """Deterministic policy; implements core.Policy."""

    title = "TD3"

    def __init__(self, spec: EnvSpec, options: Td3Options) -> None:
        super().__init__(spec, options, outputs=spec.action.size)

    @torch.inference_mode()
    def act(self, obs: Obs) -> FloatArray:
        """Actions float32 [N, A] in policy space for observations [N, ...]."""
        action: FloatArray = self._head(obs).tanh_().numpy()
        return action

    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        """Actions [N, A] with noise, and no extras."""
        return explorer.perturb(self.act(obs)), {}
