"""The learner's side of SAC: soft targets, the policy's gradient and that of the temperature, written by hand.

How an update goes, and what it guarantees, is in `actor_critic`; everything learns in every update. With n-step returns
the entropy of the steps in between is left out, as is usual: targets bootstrap from the soft value after them.
"""

import math

import torch
from torch import Tensor

from clawq.algorithms.actor_critic import SATURATED, ActorCritic, Learned, Workspace
from clawq.algorithms.networks import backward, forward, input_slope
from clawq.algorithms.sac import SacOptions
from clawq.algorithms.squashed_gaussian import Draw, draw
from clawq.core import Batch
from clawq.specs import EnvSpec


class Sac(ActorCritic):
    """Soft actor-critic with automatic temperature; implements core.Algorithm."""

    title = "SAC"
    options: SacOptions

    def __init__(self, spec: EnvSpec, options: SacOptions, device: str, seed: int) -> None:
        super().__init__(spec, options, device, seed, outputs=2 * spec.action.size)
        wanted = options.target_entropy
        self._target_entropy = -float(spec.action.size) if wanted is None else wanted
        self._log_alpha = torch.full((1,), math.log(options.alpha), device=self.device)
        self._log_alpha.grad = torch.zeros_like(self._log_alpha)
        self._learned["alpha"] = Learned.of(self._log_alpha, options.lr_alpha)

    def _gradients(self, batch: Batch, work: Workspace) -> dict[str, Tensor]:
        alpha = self._log_alpha.exp()
        found = self._critic_gradient(batch, work)
        drawn = self._draw(work.obs, work)
        return found | self._actor_gradient(drawn, alpha, work) | self._alpha_gradient(drawn, alpha)

    def _target(self, batch: Batch, work: Workspace) -> Tensor:
        """The targets: reward + discount · (min_k Q'_k(s', a') − α · log π(a'|s')), a' ~ π(s'); float32 [B]."""
        drawn = self._draw(work.next_obs, work)
        soft = self._next_value(work, drawn.action) - self._log_alpha.exp() * drawn.log_prob
        return torch.addcmul(batch.reward, batch.discount, soft)

    def _actor_gradient(self, drawn: Draw, alpha: Tensor, work: Workspace) -> dict[str, Tensor]:
        """Write the gradient of mean(α · log π(a|s) − min_k Q_k(s, a)); `critic_input` still holds s."""
        seen, critic, tape = self._columns.critic_size, self._critic.layers, work.critic_tape
        work.critic_input[:, seen:] = drawn.action
        value, critic_index = forward(critic, work.critic_input, tape).min(0, keepdim=True)
        tape.slopes[-1].zero_().scatter_(0, critic_index, -1.0 / work.rows)
        # Only the gradient by the action is needed: no weight gradients of the critics.
        backward(critic, tape, None)
        slope = input_slope(critic, tape, seen).sum(0)
        drawn.write_slope(slope, alpha / work.rows, work.actor_tape.slopes[-1][0])
        backward(self._actor.layers, work.actor_tape, self._actor.gradients)
        return {
            "actor_loss": (alpha * drawn.log_prob - value.flatten()).mean(),
            "actor_grad_norm": torch.linalg.vector_norm(self._actor.gradient),
            "action_saturation": (drawn.action.abs() > SATURATED).float().mean(),
        }

    def _alpha_gradient(self, drawn: Draw, alpha: Tensor) -> dict[str, Tensor]:
        """Write the gradient of −log α · (mean log π(a|s) + target entropy) by log α.

        The paper has α for its logarithm here; so the authors' code had it, whose steps do not shrink with α.
        """
        entropy = -drawn.log_prob.mean()
        assert self._log_alpha.grad is not None
        torch.sub(entropy, self._target_entropy, out=self._log_alpha.grad[0])
        return {
            "entropy": entropy,
            "alpha": alpha[0],
            "alpha_grad_norm": (entropy - self._target_entropy).abs(),
        }

    def _draw(self, rows: Tensor, work: Workspace) -> Draw:
        """Actions of the policy for rows [B, S]."""
        return draw(self._act(self._actor, rows, work), work.noise.normal_(generator=self._noise))

    def _flats(self) -> dict[str, Tensor]:
        return {**super()._flats(), "log_alpha": self._log_alpha}
