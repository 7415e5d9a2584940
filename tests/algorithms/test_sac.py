import copy
import math
from typing import Any

import pytest
import torch
from learners import ACTIONS, KINDS, ROWS, assert_identical, make_batch, plain_networks, train
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from clawq.algorithms.sac import SacOptions
from clawq.algorithms.sac_learner import Sac
from clawq.core import Batch
from clawq.errors import NonFiniteUpdate


def make_sac(options: SacOptions | None = None, seed: int = 0) -> Sac:
    made: Sac = KINDS["sac"].make(options, seed)
    return made


class PlainSac:
    """SAC as one would write it with torch.nn and autograd, all gradients taken before any step."""

    def __init__(self, sac: Sac, options: SacOptions, seed: int) -> None:
        self.options = options
        state = sac.state_dict()["networks"]
        self.actor = plain_networks(state["actor"], 1, (7, *options.hidden, 2 * ACTIONS))[0]
        self.critics = nn.ModuleList(plain_networks(state["critic"], 2, (11 + ACTIONS, *options.hidden, 1)))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(options.alpha)]))
        self.adams = {
            "actor": torch.optim.Adam(self.actor.parameters(), foreach=False),
            "critic": torch.optim.Adam(self.critics.parameters(), foreach=False),
            "alpha": torch.optim.Adam([self.log_alpha], foreach=False),
        }
        self.noise = torch.Generator().manual_seed(seed + 1)

    def _sample(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(rows).chunk(2, 1)
        std = log_std.clamp(-20, 2).exp()
        before = mean + std * torch.empty(len(rows), ACTIONS).normal_(generator=self.noise)
        action = before.tanh()
        density: Tensor = Normal(mean, std).log_prob(before)  # type: ignore[no-untyped-call]
        return action, (density - torch.log(1 - action**2 + 1e-12)).sum(1)

    def step(self, batch: Batch, progress: float) -> dict[str, float]:
        options = self.options
        policy, critic = ("hand", "goal"), ("contact", "hand", "goal")
        seen, then = (
            {keys: torch.cat([obs[key] for key in keys], 1) for keys in (policy, critic)}
            for obs in (batch.obs, batch.next_obs)
        )
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = self._sample(then[policy])
            value = torch.min(*[network(torch.cat([then[critic], action], 1))[:, 0] for network in self.targets])
            goal = batch.reward + batch.discount * (value - alpha * log_prob)
        critic_loss = torch.zeros(())
        for network in self.critics:
            squares = functional.mse_loss(
                network(torch.cat([seen[critic], batch.action], 1))[:, 0], goal, reduction="none"
            )
            critic_loss = critic_loss + (batch.importance_weight * squares).mean()
        action, log_prob = self._sample(seen[policy])
        value = torch.min(*[network(torch.cat([seen[critic], action], 1))[:, 0] for network in self.critics])
        actor_loss = (alpha * log_prob - value).mean()
        alpha_loss = -(self.log_alpha * (log_prob.detach().mean() - ACTIONS)).sum()
        losses = {
            "critic": (critic_loss, list(self.critics.parameters())),
            "actor": (actor_loss, list(self.actor.parameters())),
            "alpha": (alpha_loss, [self.log_alpha]),
        }
        gradients = {
            name: torch.autograd.grad(loss, wanted, retain_graph=True) for name, (loss, wanted) in losses.items()
        }
        for name, (_, parameters) in losses.items():
            for parameter, gradient in zip(parameters, gradients[name], strict=True):
                parameter.grad = gradient
            if options.grad_clip is not None:
                nn.utils.clip_grad_norm_(parameters, options.grad_clip)
            rate = 1 - progress * (1 - options.lr_final_fraction)
            self.adams[name].param_groups[0]["lr"] = getattr(options, f"lr_{name}") * rate
            self.adams[name].step()
        for ours, theirs in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
            theirs.data.mul_(1 - options.tau).add_(ours.data, alpha=options.tau)
        return {
            "critic_loss": critic_loss.item(),
            "actor_loss": actor_loss.item(),
            "entropy": -log_prob.mean().item(),
            "alpha": alpha.item(),
        }


@pytest.mark.parametrize("more", [{"grad_clip": None}, {"grad_clip": 0.5}, {"alpha": 2.0, "lr_alpha": 0.05}])
def test_updates_equal_a_plain_transcription_with_autograd(more: dict[str, Any]) -> None:
    options = SacOptions(hidden=(24, 16), lr_final_fraction=0.25, tau=0.1, normalize_obs=False, **more)
    sac = make_sac(options, seed=7)
    plain = PlainSac(sac, options, seed=7)
    for index in range(12):
        batch = make_batch(index)
        mine, expected = sac.step(batch, index / 12), plain.step(batch, index / 12)
        for name, value in expected.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (index, name)
    weights = sac.weights()
    for layer in range(3):
        weight, bias = list(plain.actor.parameters())[2 * layer : 2 * layer + 2]
        torch.testing.assert_close(weights[f"actor.{layer}.weight"], weight.data.t(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(weights[f"actor.{layer}.bias"], bias.data, rtol=1e-3, atol=1e-4)
    networks = sac.state_dict()["networks"]
    torch.testing.assert_close(networks["log_alpha"], plain.log_alpha.data, rtol=1e-3, atol=1e-4)
    target = next(iter(plain.targets[0].parameters())).data
    flat = networks["target_critic"][: target.numel()].view(target.shape[::-1])
    torch.testing.assert_close(flat, target.t(), rtol=1e-3, atol=1e-4)


def test_td_errors_are_those_of_the_critic_that_is_further_off() -> None:
    sac = make_sac()
    sac.step(make_batch(0), 0.0)
    assert sac.td_error.shape == (ROWS,)
    assert (sac.td_error > 0).all()


@pytest.mark.parametrize(("target", "rises"), [(-20.0, False), (5.0, True)])
def test_the_temperature_moves_towards_the_wanted_entropy(target: float, rises: bool) -> None:
    sac = make_sac(SacOptions(hidden=(8,), target_entropy=target, lr_alpha=0.01))
    before = sac.state_dict()["networks"]["log_alpha"].item()
    assert before == pytest.approx(math.log(0.1))
    train(sac, 5)
    moved = sac.state_dict()["networks"]["log_alpha"].item() - before
    assert moved == pytest.approx(0.05 if rises else -0.05, rel=0.1)  # five steps of Adam


def test_without_a_step_size_the_temperature_stays() -> None:
    sac = make_sac(SacOptions(hidden=(8,), lr_alpha=0.0))
    train(sac, 3)
    assert sac.state_dict()["networks"]["log_alpha"].item() == pytest.approx(math.log(0.1))
    sac.retune(SacOptions(lr_alpha=0.1))
    train(sac, 1)
    assert sac.state_dict()["networks"]["log_alpha"].item() < math.log(0.1) - 0.01


def test_C47_a_temperature_that_is_not_finite_leaves_everything_unchanged() -> None:
    sac = make_sac()
    train(sac, 2)
    state = sac.state_dict()
    state["networks"]["log_alpha"][0] = 200.0  # its exp is infinite
    sac.load_state_dict(state)
    before = sac.state_dict()
    with pytest.raises(NonFiniteUpdate):
        sac.step(make_batch(1), 0.1)
    assert_identical(sac.state_dict(), before, leave_out="/noise/")


def test_targets_move_by_tau_in_every_update() -> None:
    sac = make_sac(SacOptions(hidden=(8,), tau=0.25))
    start = sac.state_dict()["networks"]
    train(sac, 1)
    end = sac.state_dict()["networks"]
    torch.testing.assert_close(end["target_critic"], 0.75 * start["critic"] + 0.25 * end["critic"])


@pytest.mark.parametrize(
    ("option", "value"),
    [("hidden", []), ("alpha", 0), ("lr_alpha", -1), ("target_entropy", math.nan), ("tau", 0), ("policy_delay", 2),
     ("target_range", (-1, 0))],
)  # fmt: skip
def test_impossible_options_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValidationError, match=option):
        SacOptions.model_validate({option: value})
