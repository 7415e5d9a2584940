"""The learner's side of TD3: the critics' targets and the policy's gradient, written by hand.

How an update goes, and what it guarantees, is in `actor_critic`. The critics learn in every update, the policy and the
targets in every `policy_delay`-th.
"""

import torch
from torch import Tensor

from clawq.algorithms.actor_critic import SATURATED, ActorCritic, Workspace
from clawq.algorithms.networks import backward, forward, input_slope
from clawq.algorithms.td3 import Td3Options
from clawq.core import Batch
from clawq.specs import EnvSpec

_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Td3(ActorCritic):
    """Twin-delayed deterministic policy gradient; implements core.Algorithm."""

    title = "TD3"
    options: Td3Options

    def __init__(self, spec: EnvSpec, options: Td3Options, device: str, seed: int) -> None:
        super().__init__(spec, options, device, seed, outputs=spec.action.size)
        self._target_actor = self._actor.twin()
        self._targets.append((self._target_actor, self._actor))

    def _gradients(self, batch: Batch, work: Workspace) -> dict[str, Tensor]:
        found = self._critic_gradient(batch, work)
        moves_policy = (self.updates + 1) % self.options.policy_delay == 0
        return found | self._actor_gradient(work) if moves_policy else found

    def _target(self, batch: Batch, work: Workspace) -> Tensor:
        """The targets: reward + discount · min_k Q'_k(s', clip(π'(s') + noise)), within `target_range`; float32 [B]."""
        options = self.options
        noise = work.noise.normal_(0.0, options.target_noise, generator=self._noise) if options.target_noise else None
        action = self._act(self._target_actor, work.next_obs, work).tanh_()
        if noise is not None:
            action.add_(noise.clamp_(-options.target_noise_clip, options.target_noise_clip))
        target = torch.addcmul(batch.reward, batch.discount, self._next_value(work, action.clamp_(-1.0, 1.0)))
        return target if options.target_range is None else target.clamp_(*options.target_range)

    def _actor_gradient(self, work: Workspace) -> dict[str, Tensor]:
        """Write the gradient of −mean Q_1(s, π(s)) + action_penalty · mean π(s)²; `critic_input` still holds s."""
        seen, critic, tape = self._columns.critic_size, self._critic.layers.only(0), work.critic_tape.only(0)
        action = self._act(self._actor, work.obs, work).tanh_()
        work.critic_input[:, seen:] = action
        value = forward(critic, work.critic_input, tape)
        tape.slopes[-1].fill_(-1.0 / work.rows)
        # Only the gradient by the action is needed: no weight gradients of the critic.
        backward(critic, tape, None)
        slope = input_slope(critic, tape, seen)[0]
        loss = -value.mean()
        if penalty := self.options.action_penalty:
            slope = slope.add(action, alpha=2.0 * penalty / action.numel())
            loss = loss + penalty * action.square().mean()
        _tanh_backward(slope, action, grad_input=work.actor_tape.slopes[-1][0])
        backward(self._actor.layers, work.actor_tape, self._actor.gradients)
        return {
            "actor_loss": loss,
            "actor_grad_norm": torch.linalg.vector_norm(self._actor.gradient),
            "action_saturation": (action.abs() > SATURATED).float().mean(),
        }

    def _flats(self) -> dict[str, Tensor]:
        return {**super()._flats(), "target_actor": self._target_actor.flat}
