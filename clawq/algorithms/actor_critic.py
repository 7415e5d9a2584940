"""What learners with an actor and twin critics have in common: one update, in preallocated memory, without autograd.

An update computes all gradients first, from the weights as they are: targets, critic loss and gradient, and whatever
else the algorithm moves. One look at the losses and gradient norms then decides: not finite means NonFiniteUpdate with
every weight, moment and counter as it was; else optimisers and targets step. (In the papers the policy follows the
critics' step of the same update, here that of the update before; in exchange an update is all or nothing, with one
device synchronisation.) An algorithm says where the critics shall go (`_target`) and what has a gradient
(`_gradients`).

What it guarantees: the same seed, calls and thread count give the same weights bit for bit on a CPU, also across
`state_dict`. A skipped update has drawn its noise all the same. Not thread-safe: one thread calls everything.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clawq.algorithms.columns import Columns
from clawq.algorithms.networks import MlpStack, Tape, backward, forward
from clawq.algorithms.normalizer import RunningNorm
from clawq.algorithms.options import ActorCriticOptions
from clawq.core import Batch
from clawq.errors import CheckpointInvalid, NonFiniteUpdate
from clawq.specs import EnvSpec
from clawq.types import Metrics

#: Share of action numbers beyond this is reported as saturated: a policy stuck at its bounds learns nothing.
SATURATED = 0.98


class Workspace:
    """All memory of an update over B rows.

    Attributes:
        rows: B.
        obs: float32 [B, S], concatenated and normalised.
        next_obs: of the observations to bootstrap from.
        critic_input: float32 [B, critic columns + A].
        noise: float32 [B, A].
        actor_tape: of passes of the actor.
        critic_tape: of passes of both critics.
    """

    def __init__(self, rows: int, columns: Columns, actor: MlpStack, critic: MlpStack) -> None:
        device, inputs = actor.device, critic.sizes[0]
        self.rows = rows
        self.obs = torch.empty(rows, columns.size, device=device)
        self.next_obs = torch.empty(rows, columns.size, device=device)
        self.critic_input = torch.empty(rows, inputs, device=device)
        self.noise = torch.empty(rows, inputs - columns.critic_size, device=device)
        self.actor_tape: Tape = actor.tape(rows)
        self.critic_tape: Tape = critic.tape(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Numbers that learn: a flat tensor with its gradient, and the optimiser that moves it."""

    flat: Tensor
    adam: torch.optim.Adam

    @classmethod
    def of(cls, flat: Tensor, rate: float) -> "Learned":
        """With a new optimiser; `flat.grad` must be there already."""
        return cls(flat, torch.optim.Adam([flat], lr=rate, fused=True))

    def step(self, rate: float, norm: float, largest: float | None) -> None:
        """Clip the gradient by its norm and take one Adam step."""
        if largest is not None and norm > largest:
            assert self.flat.grad is not None
            self.flat.grad.mul_(largest / norm)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()

    def state(self) -> dict[str, Any]:
        """The optimiser's state with tensors copied to the CPU."""
        state = self.adam.state_dict()
        moments = {
            index: {name: value.to("cpu", copy=True) for name, value in entry.items()}
            for index, entry in state["state"].items()
        }
        return {"state": moments, "param_groups": [dict(group) for group in state["param_groups"]]}


class ActorCritic:
    """Base of TD3 and SAC; with `_target` and `_gradients` it implements core.Algorithm.

    What learns is in `_learned`: an entry `x` moves by option `lr_x` in each update that measures `x_grad_norm`.

    Attributes:
        title: name of the algorithm, for people.
        updates: updates made.
        normaliser: statistics over the columns that policy or critic see; None if observations are taken as they are.
    """

    title: str

    def __init__(self, spec: EnvSpec, options: ActorCriticOptions, device: str, seed: int, outputs: int) -> None:
        """`outputs` is the width of the actor's last layer."""
        self.options, self.device = options, torch.device(device)
        self._columns = Columns(spec)
        inputs = self._columns.critic_size + spec.action.size
        self._actor = MlpStack(1, (self._columns.policy_size, *options.hidden, outputs), self.device)
        self._critic = MlpStack(2, (inputs, *options.hidden, 1), self.device)
        start = torch.Generator().manual_seed(seed)
        self._actor.initialise(start)
        self._critic.initialise(start)
        self._target_critic, self._average = self._critic.twin(), self._actor.twin()
        #: (follower, followed)
        self._targets = [(self._target_critic, self._critic)]
        self._learned = {
            "actor": Learned.of(self._actor.flat, options.lr_actor),
            "critic": Learned.of(self._critic.flat, options.lr_critic),
        }
        self._noise = torch.Generator(self.device).manual_seed(seed + 1)
        norm = RunningNorm(self._columns.size, options.obs_clip, self.device)
        self.normaliser = norm if options.normalize_obs else None
        self.updates, self._actor_updates = 0, 0
        self._workspace: Workspace | None = None
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
            found = self._gradients(batch, work)
        # The only synchronisation with the device: everything that was measured, in one transfer.
        metrics: Metrics = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
        if not all(math.isfinite(value) for value in metrics.values()):
            raise NonFiniteUpdate(self.updates + 1, metrics)
        left = 1.0 - min(max(progress, 0.0), 1.0) * (1.0 - self.options.lr_final_fraction)
        for name, learned in self._learned.items():
            if (norm := metrics.get(f"{name}_grad_norm")) is not None:
                learned.step(self._rate(self.options, name) * left, norm, self.options.grad_clip)
        if "actor_grad_norm" in metrics:
            self._follow()
        self.updates += 1
        metrics["lr_fraction"] = left
        return metrics

    def retune(self, options: ActorCriticOptions) -> None:
        """Take the step sizes of other options from the next update on; the rest stays as it is."""
        rates = {f"lr_{name}": self._rate(options, name) for name in self._learned}
        self.options = self.options.model_copy(update=rates)

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
            "networks": {name: flat.to("cpu", copy=True) for name, flat in self._flats().items()},
            "optimisers": {name: learned.state() for name, learned in self._learned.items()},
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
        for name, flat in self._flats().items():
            flat.copy_(state["networks"][name])
        for name, learned in self._learned.items():
            learned.adam.load_state_dict(state["optimisers"][name])
        if self.normaliser is not None:
            self.normaliser.load_state_dict(state["normaliser"])
        self.updates, self._actor_updates = int(state["updates"]), int(state["actor_updates"])
        if state["noise"]["device"] == self.device.type:
            self._noise.set_state(state["noise"]["state"])
        else:
            # Generators of different devices do not understand each other; the noise stays new for each resume.
            self._noise.manual_seed(self.updates)

    # --- what an algorithm says ---------------------------------------------------------------------------------

    def _gradients(self, batch: Batch, work: Workspace) -> dict[str, Tensor]:
        """Write all gradients of an update, and change nothing else; what was measured, 0-dim each."""
        raise NotImplementedError

    def _target(self, batch: Batch, work: Workspace) -> Tensor:
        """What both critics shall say of the batch: float32 [B]."""
        raise NotImplementedError

    def _flats(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds of the networks, by name."""
        return {
            "actor": self._actor.flat,
            "critic": self._critic.flat,
            "target_critic": self._target_critic.flat,
            "average": self._average.flat,
        }

    # --- gradients ---------------------------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> Workspace:
        """Concatenate and normalise the batch's observations into the workspace."""
        rows = int(batch.reward.shape[0])
        if self._workspace is None or self._workspace.rows != rows:
            self._workspace = Workspace(rows, self._columns, self._actor, self._critic)
        work = self._workspace
        for obs, out in ((batch.obs, work.obs), (batch.next_obs, work.next_obs)):
            self._columns.rows(obs, out)
            if self.normaliser is not None:
                self.normaliser.normalize(out, out)
        return work

    def _act(self, actor: MlpStack, rows: Tensor, work: Workspace) -> Tensor:
        """What an actor's last layer says of rows [B, S]: [B, outputs], memory of its tape."""
        return forward(actor.layers, rows[:, : self._columns.policy_size], work.actor_tape)[0]

    def _critic_gradient(self, batch: Batch, work: Workspace) -> dict[str, Tensor]:
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

    def _next_value(self, work: Workspace, action: Tensor) -> Tensor:
        """min_k Q'_k(s', a) of the target critics, for actions [B, A]: float32 [B]."""
        self._columns.write_critic(work.next_obs, work.critic_input)
        work.critic_input[:, self._columns.critic_size :] = action
        value = forward(self._target_critic.layers, work.critic_input, work.critic_tape).squeeze(2)
        return torch.minimum(value[0], value[1])

    # --- steps -------------------------------------------------------------------------------------------------

    @staticmethod
    def _rate(options: ActorCriticOptions, name: str) -> float:
        rate: float = getattr(options, f"lr_{name}")
        return rate

    def _follow(self) -> None:
        """Move the targets and the published average after what they follow."""
        for follower, followed in self._targets:
            follower.flat.lerp_(followed.flat, self.options.tau)
        self._actor_updates += 1
        if self.options.average_decay:
            # A short memory at first, so that the untrained start is forgotten.
            decay = min(self.options.average_decay, (1 + self._actor_updates) / (10 + self._actor_updates))
            self._average.flat.lerp_(self._actor.flat, 1.0 - decay)

    # --- state -------------------------------------------------------------------------------------------------

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = {"networks", "optimisers", "normaliser", "updates", "actor_updates", "noise"} - state.keys()
        if missing:
            raise CheckpointInvalid(f"not a state of {self.title}: {sorted(missing)} missing")
        for name, flat in self._flats().items():
            saved = state["networks"].get(name)
            if saved is None or saved.shape != flat.shape:
                found = "nothing" if saved is None else f"{saved.numel()} numbers"
                raise CheckpointInvalid(
                    f"{self.title} {name}: the checkpoint has {found}, this run {flat.numel()} numbers; environment or "
                    "`hidden` differ"
                )
        if (state["normaliser"] is None) != (self.normaliser is None):
            raise CheckpointInvalid("the checkpoint was made with another setting of `normalize_obs`")
        if self.normaliser is not None:
            self.normaliser.check_state(state["normaliser"])


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
