"""The learner's side of TD3: one update, in preallocated memory and without autograd.

An update computes all gradients first, from the weights as they are: targets, critic loss and gradient and, every
`policy_delay` updates, the policy gradient. One look at the losses and gradient norms then decides: not finite means
NonFiniteUpdate with every weight, moment and counter as it was; else optimisers and targets step. (In the paper the
policy follows the critics' step of the same update, here that of the update before; in exchange an update is all or
nothing, with one device synchronisation.)

What it guarantees: the same seed, calls and thread count give the same weights bit for bit on a CPU, also across
`state_dict`. A skipped update has drawn its smoothing noise all the same. Not thread-safe: one thread calls everything.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clawq.algorithms.columns import Columns
from clawq.algorithms.networks import MlpStack, backward, forward, input_slope
from clawq.algorithms.normalizer import RunningNorm
from clawq.algorithms.td3 import Td3Options
from clawq.core import Batch
from clawq.errors import CheckpointInvalid, NonFiniteUpdate
from clawq.specs import EnvSpec
from clawq.types import Metrics

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
#: Share of action numbers beyond this is reported as saturated: a policy stuck at its bounds learns nothing.
SATURATED = 0.98


class _Workspace:
    """All memory of an update over B rows."""

    def __init__(self, rows: int, columns: Columns, actor: MlpStack, critic: MlpStack) -> None:
        device, actions = actor.device, actor.sizes[-1]
        self.rows = rows
        self.obs = torch.empty(rows, columns.size, device=device)
        self.next_obs = torch.empty(rows, columns.size, device=device)
        self.critic_input = torch.empty(rows, columns.critic_size + actions, device=device)
        self.noise = torch.empty(rows, actions, device=device)
        self.actor_tape, self.critic_tape = actor.tape(rows), critic.tape(rows)
        self.first_critic_tape = self.critic_tape.only(0)


class Td3:
    """Twin-delayed deterministic policy gradient; implements core.Algorithm.

    Attributes:
        updates: updates made.
        normaliser: statistics over the columns that policy or critic see; None if observations are taken as they are.
    """

    def __init__(self, spec: EnvSpec, options: Td3Options, device: str, seed: int) -> None:
        self.options, self.device = options, torch.device(device)
        self._columns = Columns(spec)
        actions = spec.action.size
        self._actor = MlpStack(1, (self._columns.policy_size, *options.hidden, actions), self.device)
        self._critic = MlpStack(2, (self._columns.critic_size + actions, *options.hidden, 1), self.device)
        start = torch.Generator().manual_seed(seed)
        self._actor.initialise(start)
        self._critic.initialise(start)
        self._target_actor, self._target_critic = self._actor.twin(), self._critic.twin()
        self._average = self._actor.twin()
        self._actor_adam = torch.optim.Adam([self._actor.flat], lr=options.lr_actor, fused=True)
        self._critic_adam = torch.optim.Adam([self._critic.flat], lr=options.lr_critic, fused=True)
        self._noise = torch.Generator(self.device).manual_seed(seed + 1)
        norm = RunningNorm(self._columns.size, options.obs_clip, self.device)
        self.normaliser = norm if options.normalize_obs else None
        self.updates, self._actor_updates = 0, 0
        self._workspace: _Workspace | None = None
        #: Q_k − y of the last batch, float32 [2, B].
        self._errors = torch.zeros(2, 0, device=self.device)

    @property
    def td_error(self) -> Tensor:
        """|Q − y| of the last batch, of the critic that is further off (Fujimoto et al. 2020, LAP): float32 [B]."""
        return self._errors.abs().amax(0)

    @torch.no_grad()
    def observe(self, obs: Mapping[str, Any], valid: Any) -> None:
        """Take rows [R, ...] committed to the ring into the statistics; `valid` is bool [R]."""
        if self.normaliser is not None:
            self.normaliser.update(self._columns.views(obs), valid)

    @torch.no_grad()
    def step(self, batch: Batch, progress: float) -> Metrics:
        """One update from B transitions (core.Batch); `progress` 0..1 drives the learning-rate decay.

        Raises:
            NonFiniteUpdate: a loss or gradient norm is not finite; weights, moments and counters are as before.
        """
        work = self._prepare(batch)
        with _matmul(self.device, self.options.fast_matmul):
            found = self._critic_gradient(batch, work)
            moves_policy = (self.updates + 1) % self.options.policy_delay == 0
            if moves_policy:
                found |= self._actor_gradient(work)
        # The only synchronisation with the device: everything that was measured, in one transfer.
        metrics: Metrics = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
        if not all(math.isfinite(value) for value in metrics.values()):
            raise NonFiniteUpdate(self.updates + 1, metrics)
        rate = 1.0 - min(max(progress, 0.0), 1.0) * (1.0 - self.options.lr_final_fraction)
        self._apply(self._critic, self._critic_adam, self.options.lr_critic * rate, metrics["critic_grad_norm"])
        if moves_policy:
            self._apply(self._actor, self._actor_adam, self.options.lr_actor * rate, metrics["actor_grad_norm"])
            self._follow()
        self.updates += 1
        metrics["lr_fraction"] = rate
        return metrics

    def retune(self, options: Td3Options) -> None:
        """Take the step sizes of other options from the next update on; the rest stays as it is."""
        self.options = self.options.model_copy(update={"lr_actor": options.lr_actor, "lr_critic": options.lr_critic})

    def weights(self) -> dict[str, Tensor]:
        """Copies for the actors, on the CPU: the actor (or its average) and the normaliser's policy columns."""
        source = self._average if self.options.average_decay else self._actor
        layers = source.views(source.flat.to("cpu", copy=True))
        named: dict[str, Tensor] = {}
        for index, (weight, bias) in enumerate(zip(layers.weights, layers.biases, strict=True)):
            named[f"actor.{index}.weight"], named[f"actor.{index}.bias"] = weight[0], bias[0, 0]
        if self.normaliser is not None:
            statistics, width = self.normaliser.state_dict(), self._columns.policy_size
            named["normaliser.mean"] = statistics["mean"][:width]
            named["normaliser.var"] = statistics["var"][:width]
            named["normaliser.count"] = torch.tensor(statistics["count"], dtype=torch.int64)
        return named

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything needed to go on bit for bit; tensors and plain values only."""
        return {
            "networks": {name: stack.flat.to("cpu", copy=True) for name, stack in self._stacks().items()},
            "optimisers": {name: _optimiser_state(adam) for name, adam in self._adams().items()},
            "normaliser": self.normaliser.state_dict() if self.normaliser is not None else None,
            "updates": self.updates,
            "actor_updates": self._actor_updates,
            "noise": {"device": self.device.type, "state": self._noise.get_state()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            CheckpointInvalid: it is of other networks, or of a run with another normaliser; nothing was changed.
        """
        self._check_state(state)
        for name, stack in self._stacks().items():
            stack.flat.copy_(state["networks"][name])
        for name, adam in self._adams().items():
            adam.load_state_dict(state["optimisers"][name])
        if self.normaliser is not None:
            self.normaliser.load_state_dict(state["normaliser"])
        self.updates, self._actor_updates = int(state["updates"]), int(state["actor_updates"])
        if state["noise"]["device"] == self.device.type:
            self._noise.set_state(state["noise"]["state"])
        else:
            # Generators of different devices do not understand each other; the noise stays new for each resume.
            self._noise.manual_seed(self.updates)

    # --- gradients ---------------------------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> _Workspace:
        """Concatenate and normalise the batch's observations into the workspace."""
        rows = int(batch.reward.shape[0])
        if self._workspace is None or self._workspace.rows != rows:
            self._workspace = _Workspace(rows, self._columns, self._actor, self._critic)
        work = self._workspace
        for obs, out in ((batch.obs, work.obs), (batch.next_obs, work.next_obs)):
            self._columns.rows(obs, out)
            if self.normaliser is not None:
                self.normaliser.normalize(out, out)
        return work

    def _critic_gradient(self, batch: Batch, work: _Workspace) -> dict[str, Tensor]:
        """Write the gradient of mean(importance · (Q_k − y)²), summed over both critics."""
        goal = self._target(batch, work)
        self._columns.write_critic(work.obs, work.critic_input)
        work.critic_input[:, self._columns.critic_size :] = batch.action
        value = forward(self._critic.layers, work.critic_input, work.critic_tape).squeeze(2)
        error = self._errors = value - goal
        weighted = error * batch.importance_weight
        torch.mul(weighted, 2.0 / work.rows, out=work.critic_tape.slopes[-1].squeeze(2))
        backward(self._critic.layers, work.critic_tape, self._critic.gradients)
        return {
            "critic_loss": torch.mul(weighted, error).sum() / work.rows,
            "critic_grad_norm": torch.linalg.vector_norm(self._critic.gradient),
            "q_mean": value.mean(),
        }

    def _target(self, batch: Batch, work: _Workspace) -> Tensor:
        """The targets: reward + discount · min_k Q'_k(s', clip(π'(s') + noise)), within `target_range`; float32 [B]."""
        options, seen = self.options, self._columns.critic_size
        noise = work.noise.normal_(0.0, options.target_noise, generator=self._noise) if options.target_noise else None
        action = forward(self._target_actor.layers, work.next_obs[:, : self._columns.policy_size], work.actor_tape)[0]
        action.tanh_()
        if noise is not None:
            action.add_(noise.clamp_(-options.target_noise_clip, options.target_noise_clip))
        self._columns.write_critic(work.next_obs, work.critic_input)
        torch.clamp(action, -1.0, 1.0, out=work.critic_input[:, seen:])
        value = forward(self._target_critic.layers, work.critic_input, work.critic_tape).squeeze(2)
        target = torch.addcmul(batch.reward, batch.discount, torch.minimum(value[0], value[1]))
        return target if options.target_range is None else target.clamp_(*options.target_range)

    def _actor_gradient(self, work: _Workspace) -> dict[str, Tensor]:
        """Write the gradient of −mean Q_1(s, π(s)) + action_penalty · mean π(s)²; `critic_input` still holds s."""
        seen, critic = self._columns.critic_size, self._critic.layers.only(0)
        action = forward(self._actor.layers, work.obs[:, : self._columns.policy_size], work.actor_tape)[0].tanh_()
        work.critic_input[:, seen:] = action
        value = forward(critic, work.critic_input, work.first_critic_tape)
        work.first_critic_tape.slopes[-1].fill_(-1.0 / work.rows)
        # Only the gradient by the action is needed: no weight gradients of the critic.
        backward(critic, work.first_critic_tape, None)
        slope = input_slope(critic, work.first_critic_tape, seen)[0]
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

    # --- steps -------------------------------------------------------------------------------------------------

    def _apply(self, stack: MlpStack, adam: torch.optim.Adam, rate: float, norm: float) -> None:
        """Clip the gradient by its norm and take one Adam step."""
        if self.options.grad_clip is not None and norm > self.options.grad_clip:
            stack.gradient.mul_(self.options.grad_clip / norm)
        adam.param_groups[0]["lr"] = rate
        adam.step()

    def _follow(self) -> None:
        """Move the targets and the published average after the policy."""
        self._target_actor.flat.lerp_(self._actor.flat, self.options.tau)
        self._target_critic.flat.lerp_(self._critic.flat, self.options.tau)
        self._actor_updates += 1
        if self.options.average_decay:
            # A short memory at first, so that the untrained start is forgotten.
            decay = min(self.options.average_decay, (1 + self._actor_updates) / (10 + self._actor_updates))
            self._average.flat.lerp_(self._actor.flat, 1.0 - decay)

    # --- state -------------------------------------------------------------------------------------------------

    def _stacks(self) -> dict[str, MlpStack]:
        return {
            "actor": self._actor,
            "critic": self._critic,
            "target_actor": self._target_actor,
            "target_critic": self._target_critic,
            "average": self._average,
        }

    def _adams(self) -> dict[str, torch.optim.Adam]:
        return {"actor": self._actor_adam, "critic": self._critic_adam}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = {"networks", "optimisers", "normaliser", "updates", "actor_updates", "noise"} - state.keys()
        if missing:
            raise CheckpointInvalid(f"not a state of TD3: {sorted(missing)} missing")
        for name, stack in self._stacks().items():
            saved = state["networks"].get(name)
            if saved is None or saved.shape != stack.flat.shape:
                found = "nothing" if saved is None else f"{saved.numel()} numbers"
                raise CheckpointInvalid(
                    f"TD3 {name}: the checkpoint has {found}, this run {stack.flat.numel()} numbers in layers "
                    f"{list(stack.sizes)}; environment or `hidden` differ"
                )
        if (state["normaliser"] is None) != (self.normaliser is None):
            raise CheckpointInvalid("the checkpoint was made with another setting of `normalize_obs`")
        if self.normaliser is not None:
            self.normaliser.check_state(state["normaliser"])


def _optimiser_state(adam: torch.optim.Adam) -> dict[str, Any]:
    """The optimiser's state with tensors copied to the CPU."""
    state = adam.state_dict()
    moments = {
        index: {name: value.to("cpu", copy=True) for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return {"state": moments, "param_groups": [dict(group) for group in state["param_groups"]]}


@contextmanager
def _matmul(device: torch.device, fast: bool) -> Iterator[None]:
    """Within it, float32 matrix products may round their inputs, if `fast`. The switch is the process's own."""
    if not fast:
        yield
        return
    cuda = device.type == "cuda"
    switch: Any = torch.backends.cuda.matmul if cuda else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "tf32" if cuda else "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
