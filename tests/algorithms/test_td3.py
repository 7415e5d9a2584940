import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from learners import ACTIONS, KINDS, ROWS, assert_identical, make_batch, plain_networks, train
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from clawq.algorithms.td3 import Td3Options
from clawq.algorithms.td3_learner import Td3
from clawq.core import Batch
from clawq.errors import NonFiniteUpdate


def make_td3(options: Td3Options | None = None, seed: int = 0) -> Td3:
    made: Td3 = KINDS["td3"].make(options, seed)
    return made


class PlainTd3:
    """TD3 as one would write it with torch.nn and autograd, with the policy gradient taken before the critic's step."""

    def __init__(self, td3: Td3, options: Td3Options, seed: int) -> None:
        self.options, self.updates = options, 0
        state = td3.state_dict()["networks"]
        self.actor = plain_networks(state["actor"], 1, (7, *options.hidden, ACTIONS))[0]
        self.critics = nn.ModuleList(plain_networks(state["critic"], 2, (11 + ACTIONS, *options.hidden, 1)))
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), options.lr_actor, foreach=False)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), options.lr_critic, foreach=False)
        self.noise = torch.Generator().manual_seed(seed + 1)
        self.seen: list[dict[str, Tensor]] = []

    def observe(self, obs: dict[str, Tensor]) -> None:
        self.seen.append(obs)

    def _view(self, obs: Mapping[str, Tensor], keys: tuple[str, ...]) -> Tensor:
        rows = torch.cat([obs[key] for key in keys], 1)
        seen = torch.cat([torch.cat([o[key] for key in keys], 1) for o in self.seen]).double()
        mean, std = seen.mean(0).float(), (seen.var(0, correction=0) + 1e-8).sqrt().float()
        return ((rows - mean) / std).clamp(-self.options.obs_clip, self.options.obs_clip)

    def step(self, batch: Batch, progress: float) -> dict[str, float]:
        options, metrics = self.options, {}
        policy, critic = ("hand", "goal"), ("contact", "hand", "goal")
        with torch.no_grad():
            noise = torch.empty(len(batch.reward), ACTIONS).normal_(0, options.target_noise, generator=self.noise)
            noise = noise.clamp(-options.target_noise_clip, options.target_noise_clip)
            action = (self.target_actor(self._view(batch.next_obs, policy)).tanh() + noise).clamp(-1, 1)
            inputs = torch.cat([self._view(batch.next_obs, critic), action], 1)
            value = torch.min(*[network(inputs)[:, 0] for network in self.target_critics])
            goal = batch.reward + batch.discount * value
            if options.target_range is not None:
                goal = goal.clamp(*options.target_range)
        rows = self._view(batch.obs, critic)
        inputs = torch.cat([rows, batch.action], 1)
        loss = torch.zeros(())
        for network in self.critics:
            squares = functional.mse_loss(network(inputs)[:, 0], goal, reduction="none")
            loss = loss + (batch.importance_weight * squares).mean()
        critic_gradient = torch.autograd.grad(loss, list(self.critics.parameters()))
        metrics["critic_loss"] = loss.item()
        self.updates += 1
        moves_policy = self.updates % options.policy_delay == 0
        if moves_policy:
            action = self.actor(self._view(batch.obs, policy)).tanh()
            actor_loss = -self.critics[0](torch.cat([rows, action], 1)).mean()
            actor_loss = actor_loss + options.action_penalty * action.square().mean()
            actor_gradient = torch.autograd.grad(actor_loss, list(self.actor.parameters()))
            metrics["actor_loss"] = actor_loss.item()
        rate = 1 - progress * (1 - options.lr_final_fraction)
        self._apply(self.critics, critic_gradient, self.critic_adam, options.lr_critic * rate)
        if moves_policy:
            self._apply(self.actor, actor_gradient, self.actor_adam, options.lr_actor * rate)
            pairs = ((self.actor, self.target_actor), (self.critics, self.target_critics))
            for online, target in pairs:
                for ours, theirs in zip(online.parameters(), target.parameters(), strict=True):
                    theirs.data.mul_(1 - options.tau).add_(ours.data, alpha=options.tau)
        return metrics

    def _apply(self, module: nn.Module, gradient: Any, adam: torch.optim.Adam, rate: float) -> None:
        for parameter, value in zip(module.parameters(), gradient, strict=True):
            parameter.grad = value
        if self.options.grad_clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), self.options.grad_clip)
        adam.param_groups[0]["lr"] = rate
        adam.step()


@pytest.mark.parametrize(
    "more", [{"grad_clip": None}, {"grad_clip": 0.5}, {"target_range": (-0.2, 0.1)}, {"action_penalty": 3.0}]
)
def test_updates_equal_a_plain_transcription_with_autograd(more: dict[str, Any]) -> None:
    options = Td3Options(hidden=(24, 16), lr_final_fraction=0.25, tau=0.1, policy_delay=2, **more)
    td3 = make_td3(options, seed=7)
    plain = PlainTd3(td3, options, seed=7)
    for index in range(12):
        batch = make_batch(index)
        td3.observe(batch.obs, torch.ones(ROWS, dtype=torch.bool))
        plain.observe(dict(batch.obs))
        mine, expected = td3.step(batch, index / 12), plain.step(batch, index / 12)
        for name, value in expected.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-4), (index, name)
        assert ("actor_loss" in mine) == (index % 2 == 1)
    weights = td3.weights()
    for layer in range(3):
        weight, bias = list(plain.actor.parameters())[2 * layer : 2 * layer + 2]
        torch.testing.assert_close(weights[f"actor.{layer}.weight"], weight.data.t(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(weights[f"actor.{layer}.bias"], bias.data, rtol=1e-3, atol=1e-4)


def test_C47_a_policy_gradient_that_is_not_finite_leaves_the_critics_unchanged_too() -> None:
    td3 = make_td3()
    train(td3, 3)
    bad = make_batch(1)
    state = td3.state_dict()
    state["networks"]["actor"][-1] = math.nan  # the online policy alone is broken: the critic's loss is finite
    td3.load_state_dict(state)
    with pytest.raises(NonFiniteUpdate) as caught:
        td3.step(bad, 0.1)
    assert math.isfinite(caught.value.metrics["critic_loss"])
    after = td3.state_dict()
    assert torch.equal(after["networks"]["critic"], state["networks"]["critic"])
    assert torch.equal(after["networks"]["target_critic"], state["networks"]["target_critic"])
    assert_identical(after["optimisers"], state["optimisers"])


def test_targets_move_by_tau_and_only_with_the_policy() -> None:
    options = Td3Options(hidden=(8,), tau=0.25, policy_delay=3)
    td3 = make_td3(options)
    start = td3.state_dict()["networks"]
    train(td3, 2)
    middle = td3.state_dict()["networks"]
    for name in ("actor", "target_actor", "target_critic"):
        assert torch.equal(middle[name], start[name]), name
    assert not torch.equal(middle["critic"], start["critic"])
    train(td3, 1)
    end = td3.state_dict()["networks"]
    for name in ("actor", "critic"):
        torch.testing.assert_close(end[f"target_{name}"], 0.75 * start[name] + 0.25 * end[name])


def test_learning_rates_fall_with_progress() -> None:
    options = Td3Options(hidden=(8,), lr_final_fraction=0.0)
    td3 = make_td3(options)
    train(td3, 2)
    before = td3.state_dict()["networks"]
    assert td3.step(make_batch(3), progress=0.75)["lr_fraction"] == 0.25
    td3.step(make_batch(4), progress=1.0)
    td3.step(make_batch(4), progress=2.0)
    moved = td3.state_dict()["networks"]
    assert torch.equal(moved["actor"], before["actor"]), "the only policy update was at rate 0"
    assert not torch.equal(moved["critic"], before["critic"]), "but the critics had one at a quarter"


@pytest.mark.parametrize(
    ("option", "value"),
    [("hidden", []), ("hidden", [0]), ("lr_actor", 0), ("tau", 0), ("tau", 1.5), ("policy_delay", 0),
     ("average_decay", 1.0), ("target_range", (1, 1)), ("action_penalty", -1),
     ("grad_clip", 0), ("obs_clip", -1), ("target_noise", math.nan), ("gamma", 0.9)],
)  # fmt: skip
def test_impossible_options_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValidationError, match=option):
        Td3Options.model_validate({option: value})
