import copy
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from clawq.algorithms.td3 import Td3Options, plugin
from clawq.algorithms.td3_learner import Td3
from clawq.core import Algorithm, AlgorithmPlugin, Batch, Policy
from clawq.errors import CheckpointInvalid, NonFiniteUpdate
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.testing.point import PointEnv, PointOptions

torch.set_num_threads(1)  # nothing here is large enough for two

ACTIONS, ROWS = 3, 32
SMALL = Td3Options(hidden=(24, 16), grad_clip=1.0, average_decay=0.9, lr_final_fraction=0.5)


def make_spec(asymmetric: bool = True) -> EnvSpec:
    obs = {"hand": ArraySpec((5,)), "goal": ArraySpec((2,)), "contact": ArraySpec((4,))}
    critic = ("contact", "hand", "goal") if asymmetric else ("hand", "goal")
    return EnvSpec("test:hand", obs, ActionSpec((-1.0,) * ACTIONS, (1.0,) * ACTIONS), ("hand", "goal"), critic)


def make_td3(options: Td3Options = SMALL, seed: int = 0, spec: EnvSpec | None = None) -> Td3:
    return plugin.make_algorithm(spec or make_spec(), options, "cpu", seed)


def make_batch(seed: int, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def draw_obs() -> dict[str, Tensor]:
        return {key: draw(rows, *spec.shape) * 2 + 1 for key, spec in make_spec().obs.items()}

    return Batch(
        obs=draw_obs(),
        action=draw(rows, ACTIONS).clamp(-1, 1),
        reward=draw(rows),
        discount=(draw(rows) > -1).float() * 0.9,
        next_obs=draw_obs(),
        importance_weight=draw(rows).abs(),
        row=torch.arange(rows),
        weights_version=torch.ones(rows, dtype=torch.int64),
        extras={},
    )


def observe(td3: Td3, seed: int) -> None:
    batch = make_batch(seed)
    td3.observe(batch.obs, torch.ones(ROWS, dtype=torch.bool))


def train(td3: Td3, updates: int, seed: int = 100) -> None:
    for index in range(updates):
        observe(td3, seed + index)
        td3.step(make_batch(seed + index), progress=0.1)


def flat_state(state: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a nested state by its path."""
    if isinstance(state, Mapping):
        pairs = [(f"{path}/{key}", value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        pairs = [(f"{path}/{index}", value) for index, value in enumerate(state)]
    else:
        return {path: state}
    return {key: leaf for where, value in pairs for key, leaf in flat_state(value, where).items()}


def assert_identical(state: Any, other: Any, leave_out: str = "?") -> None:
    mine, theirs = flat_state(state), flat_state(other)
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        if leave_out in path:
            continue
        same = torch.equal(leaf, theirs[path]) if isinstance(leaf, Tensor) else leaf == theirs[path]
        assert same, path


def test_the_plugin_is_what_the_protocols_say() -> None:
    typed: AlgorithmPlugin = plugin  # and mypy reads this line
    algorithm: Algorithm = typed.make_algorithm(make_spec(), typed.Options(hidden=(8,)), "cpu", 0)
    policy: Policy = typed.make_policy(make_spec(), typed.Options(hidden=(8,)))
    policy.load(algorithm.weights())


class PlainTd3:
    """TD3 as one would write it with torch.nn and autograd, with the policy gradient taken before the critic's step."""

    def __init__(self, td3: Td3, options: Td3Options, seed: int) -> None:
        self.options, self.updates = options, 0
        state = td3.state_dict()["networks"]
        self.actor = self._networks(state["actor"], 1, (7, *options.hidden, ACTIONS))[0]
        self.critics = nn.ModuleList(self._networks(state["critic"], 2, (11 + ACTIONS, *options.hidden, 1)))
        self.target_actor, self.target_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), options.lr_actor, foreach=False)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), options.lr_critic, foreach=False)
        self.noise = torch.Generator().manual_seed(seed + 1)
        self.seen: list[dict[str, Tensor]] = []

    @staticmethod
    def _networks(flat: Tensor, count: int, sizes: tuple[int, ...]) -> list[nn.Sequential]:
        networks: list[list[nn.Module]] = [[] for _ in range(count)]
        at = 0
        for size_in, size_out in pairwise(sizes):
            weight = flat[at : (at := at + count * size_in * size_out)].view(count, size_in, size_out)
            bias = flat[at : (at := at + count * size_out)].view(count, size_out)
            for index, network in enumerate(networks):
                layer = nn.Linear(size_in, size_out)
                layer.weight.data, layer.bias.data = weight[index].t().clone(), bias[index].clone()
                network.extend([layer, nn.ReLU()])
        return [nn.Sequential(*modules[:-1]) for modules in networks]

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


def test_C57_a_loaded_state_goes_on_bit_identically() -> None:
    td3 = make_td3()
    train(td3, 7)
    state = td3.state_dict()
    resumed = make_td3(seed=99)
    resumed.load_state_dict(copy.deepcopy(state))
    assert_identical(resumed.state_dict(), state)
    train(td3, 6, seed=500)
    assert td3.updates == 13
    assert not torch.equal(state["networks"]["target_critic"], td3.state_dict()["networks"]["target_critic"]), "a copy"
    train(resumed, 6, seed=500)
    assert_identical(resumed.state_dict(), td3.state_dict())
    for name, tensor in td3.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_C57_the_state_survives_a_file_read_with_weights_only(tmp_path: Any) -> None:
    td3 = make_td3()
    train(td3, 3)
    torch.save(td3.state_dict(), tmp_path / "state")
    resumed = make_td3(seed=5)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    train(td3, 3, seed=9)
    train(resumed, 3, seed=9)
    assert_identical(resumed.state_dict(), td3.state_dict())


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, same, other = make_td3(seed=3), make_td3(seed=3), make_td3(seed=4)
    for td3 in (first, same, other):
        train(td3, 4)
    assert_identical(first.state_dict(), same.state_dict())
    assert not torch.equal(first.weights()["actor.0.weight"], other.weights()["actor.0.weight"])


@pytest.mark.parametrize("field", ["reward", "discount", "action", "importance_weight", "obs", "next_obs"])
@pytest.mark.parametrize("updates", [2, 3])
def test_C47_a_batch_that_is_not_finite_changes_nothing(field: str, updates: int) -> None:
    td3 = make_td3()
    train(td3, updates)  # after 2 the next update moves the critics only, after 3 the policy too
    before, weights = td3.state_dict(), td3.weights()
    bad = make_batch(1)
    tensor = getattr(bad, field)
    (tensor["hand"] if field.endswith("obs") else tensor)[5] = math.nan
    with pytest.raises(NonFiniteUpdate, match="not finite") as caught:
        td3.step(bad, 0.1)
    assert caught.value.step == updates + 1
    assert any(not math.isfinite(value) for value in caught.value.metrics.values())
    assert_identical(td3.state_dict(), before, leave_out="/noise/")
    for name, tensor in td3.weights().items():
        assert torch.equal(tensor, weights[name]), name
    td3.step(make_batch(2), 0.1)  # and a good batch goes on
    assert td3.updates == updates + 1


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


def test_a_terminated_row_does_not_look_at_its_next_observation() -> None:
    first, second = make_td3(), make_td3()
    batch, changed = make_batch(0), make_batch(0)
    batch.discount.zero_()
    changed.discount.zero_()
    changed.next_obs["hand"].add_(3.0)
    assert first.step(batch, 0.0) == second.step(changed, 0.0)


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


def test_published_weights_are_copies_of_the_actor_and_the_normaliser() -> None:
    td3 = make_td3(Td3Options(hidden=(8,)))
    train(td3, 2)
    weights = td3.weights()
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    train(td3, 4)
    for name, tensor in weights.items():
        assert torch.equal(tensor, kept[name]), name
    assert not torch.equal(td3.weights()["actor.0.weight"], kept["actor.0.weight"])
    assert weights["normaliser.mean"].dtype == torch.float64
    assert weights["normaliser.count"].item() == 2 * ROWS
    assert weights["normaliser.mean"].shape == (7,), "the policy's columns only"
    hand = torch.cat([make_batch(100 + index).obs["hand"] for index in range(2)]).double()
    torch.testing.assert_close(weights["normaliser.mean"][:5], hand.mean(0))
    torch.testing.assert_close(weights["normaliser.var"][:5], hand.var(0, correction=0))


def test_the_published_average_trails_the_actor_and_forgets_the_untrained_start() -> None:
    options = Td3Options(hidden=(8,), average_decay=0.99, policy_delay=1)
    td3 = make_td3(options)
    average = torch.zeros(0)
    for index in range(6):
        before = td3.state_dict()["networks"]["average"]
        train(td3, 1, seed=index)
        networks = td3.state_dict()["networks"]
        decay = min(0.99, (2 + index) / (11 + index))
        average = decay * before + (1 - decay) * networks["actor"]
        torch.testing.assert_close(networks["average"], average)
    assert torch.equal(td3.weights()["actor.0.weight"].flatten(), networks["average"][: 7 * 8])


def test_without_normalisation_observations_are_taken_as_they_are() -> None:
    options = Td3Options(hidden=(8,), normalize_obs=False)
    td3 = make_td3(options)
    train(td3, 2)
    assert sorted(td3.weights()) == ["actor.0.bias", "actor.0.weight", "actor.1.bias", "actor.1.weight"]
    untouched = make_td3(options)
    for index in range(2):
        untouched.step(make_batch(100 + index), progress=0.1)
    assert_identical(untouched.state_dict(), td3.state_dict())


def test_batches_of_changing_size_are_taken() -> None:
    td3 = make_td3()
    for rows in (8, 32, 8, 1):
        assert math.isfinite(td3.step(make_batch(rows, rows), 0.0)["critic_loss"])


def test_a_state_of_other_networks_is_refused_whole() -> None:
    td3 = make_td3()
    before = td3.state_dict()
    with pytest.raises(CheckpointInvalid, match=r"TD3 actor: the checkpoint has .* environment or `hidden` differ"):
        td3.load_state_dict(make_td3(SMALL.model_copy(update={"hidden": (8,)})).state_dict())
    with pytest.raises(CheckpointInvalid, match="TD3 critic"):
        td3.load_state_dict(make_td3(spec=make_spec(asymmetric=False)).state_dict())
    with pytest.raises(CheckpointInvalid, match="normalize_obs"):
        td3.load_state_dict(make_td3(SMALL.model_copy(update={"normalize_obs": False})).state_dict())
    narrow = td3.state_dict()
    for name in ("mean", "var"):
        narrow["normaliser"][name] = narrow["normaliser"][name][:-1]
    with pytest.raises(CheckpointInvalid, match="normaliser: the checkpoint has 10 columns, this run has 11"):
        td3.load_state_dict({**narrow, "updates": 77})
    with pytest.raises(CheckpointInvalid, match="not a state of TD3"):
        td3.load_state_dict({"networks": {}})
    assert_identical(td3.state_dict(), before)


def test_fast_products_change_little_and_leave_the_switch_as_it_was() -> None:
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    exact, fast = (make_td3(SMALL.model_copy(update={"fast_matmul": flag})) for flag in (False, True))
    for index in range(4):
        mine, other = exact.step(make_batch(index, 256), 0.0), fast.step(make_batch(index, 256), 0.0)
        assert other["critic_loss"] == pytest.approx(mine["critic_loss"], rel=0.05)
    assert switch.fp32_precision == before
    bad = make_batch(0)
    bad.reward[0] = math.nan
    with pytest.raises(NonFiniteUpdate):
        fast.step(bad, 0.0)
    assert switch.fp32_precision == before


@pytest.mark.parametrize(
    ("option", "value"),
    [("hidden", []), ("hidden", [0]), ("lr_actor", 0), ("tau", 0), ("tau", 1.5), ("policy_delay", 0),
     ("average_decay", 1.0), ("target_range", (1, 1)), ("action_penalty", -1),
     ("grad_clip", 0), ("obs_clip", -1), ("target_noise", math.nan), ("gamma", 0.9)],
)  # fmt: skip
def test_impossible_options_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValidationError, match=option):
        Td3Options.model_validate({option: value})


class PointReplay:
    """The simplest replay: everything, in lists."""

    def __init__(self) -> None:
        self.columns: list[dict[str, np.ndarray[Any, Any]]] = []

    def batch(self, rng: np.random.Generator, rows: int, gamma: float) -> Batch:
        chosen = [self.columns[index] for index in rng.integers(len(self.columns), size=rows)]
        envs = rng.integers(len(chosen[0]["reward"]), size=rows)

        def pick(name: str) -> Tensor:
            return torch.from_numpy(np.stack([row[name][env] for row, env in zip(chosen, envs, strict=True)]))

        keys = ("observation", "desired_goal")
        return Batch(
            obs={key: pick(key) for key in keys},
            action=pick("action"),
            reward=pick("reward"),
            discount=torch.full((rows,), gamma),
            next_obs={key: pick(f"next_{key}") for key in keys},
            importance_weight=torch.ones(rows),
            row=torch.arange(rows),
            weights_version=torch.ones(rows, dtype=torch.int64),
            extras={},
        )


def mean_return(env: PointEnv, policy: Any) -> float:
    obs, total = env.reset(range(1000, 1000 + env.num_envs)), 0.0
    for _ in range(20):
        action = policy.act(obs, deterministic=True)[0]
        result = env.step(env.spec.action.to_env(action))
        obs, total = result.obs, total + float(result.reward.mean())
    return total


def test_td3_learns_to_reach_points() -> None:
    options = Td3Options(hidden=(32, 32), lr_actor=3e-3, lr_critic=3e-3, tau=0.02, average_decay=0.9)
    env, replay = PointEnv(PointOptions(), 16), PointReplay()
    spec = env.spec
    td3, policy = plugin.make_algorithm(spec, options, "cpu", 0), plugin.make_policy(spec, options)
    rng = np.random.default_rng(0)
    policy.load(td3.weights())
    untrained = mean_return(PointEnv(PointOptions(), 64), policy)
    obs = env.reset(range(16))
    for step in range(500):
        noisy = policy.act(obs, deterministic=False)[0] + rng.normal(size=(16, 2)) * 0.3
        action = (noisy if step >= 60 else rng.uniform(-1, 1, (16, 2))).clip(-1, 1).astype(np.float32)
        result = env.step(spec.action.to_env(action))
        following = {key: value.copy() for key, value in result.obs.items()}
        ended = result.terminated | result.truncated
        for key, value in result.final_obs.items():
            following[key][ended] = value
        row = {**obs, **{f"next_{key}": value for key, value in following.items()}}
        replay.columns.append({**row, "action": action, "reward": result.reward})
        td3.observe({key: torch.from_numpy(obs[key]) for key in obs}, torch.from_numpy(result.valid))
        obs = result.obs
        if step >= 60:
            td3.step(replay.batch(rng, 64, gamma=0.8), progress=step / 500)
            policy.load(td3.weights())
    trained = mean_return(PointEnv(PointOptions(), 64), policy)
    assert untrained < -10.0
    assert trained > -3.5, (untrained, trained)
