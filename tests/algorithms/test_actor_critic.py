"""What every learner with an actor and twin critics promises, told once for all of them."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from learners import KINDS, ROWS, Kind, assert_identical, make_batch, make_spec, train
from torch import Tensor

from clawq.acting.exploration import NoiseLadder
from clawq.algorithms import sac, td3
from clawq.core import Algorithm, AlgorithmPlugin, Batch, Policy
from clawq.errors import CheckpointInvalid, NonFiniteUpdate
from clawq.testing.point import PointEnv, PointOptions


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_the_plugin_is_what_the_protocols_say(kind: Kind) -> None:
    typed: AlgorithmPlugin = kind.plugin
    algorithm: Algorithm = typed.make_algorithm(make_spec(), typed.Options(hidden=(8,)), "cpu", 0)
    policy: Policy = typed.make_policy(make_spec(), typed.Options(hidden=(8,)))
    policy.load(algorithm.weights())
    for real in (td3.plugin, sac.plugin):
        judged: AlgorithmPlugin = real  # mypy reads this line
        assert callable(judged.make_algorithm)


def test_C57_a_loaded_state_goes_on_bit_identically(kind: Kind) -> None:
    learner = kind.make()
    train(learner, 7)
    state = learner.state_dict()
    assert set(state["optimisers"]) == {"actor", "critic", *kind.more_learned}
    resumed = kind.make(seed=99)
    resumed.load_state_dict(copy.deepcopy(state))
    assert_identical(resumed.state_dict(), state)
    train(learner, 6, seed=500)
    assert learner.updates == 13
    for name, flat in learner.state_dict()["networks"].items():
        assert not torch.equal(state["networks"][name], flat), f"{name}: a copy, and it moves"
    train(resumed, 6, seed=500)
    assert_identical(resumed.state_dict(), learner.state_dict())
    for name, tensor in learner.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_C57_the_state_survives_a_file_read_with_weights_only(kind: Kind, tmp_path: Any) -> None:
    learner = kind.make()
    train(learner, 3)
    torch.save(learner.state_dict(), tmp_path / "state")
    resumed = kind.make(seed=5)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    train(learner, 3, seed=9)
    train(resumed, 3, seed=9)
    assert_identical(resumed.state_dict(), learner.state_dict())


def test_the_same_seed_gives_the_same_run_and_another_seed_another(kind: Kind) -> None:
    first, same, other = kind.make(seed=3), kind.make(seed=3), kind.make(seed=4)
    for learner in (first, same, other):
        train(learner, 4)
    assert_identical(first.state_dict(), same.state_dict())
    assert not torch.equal(first.weights()["actor.0.weight"], other.weights()["actor.0.weight"])


@pytest.mark.parametrize("field", ["reward", "discount", "action", "importance_weight", "obs", "next_obs"])
@pytest.mark.parametrize("updates", [2, 3])
def test_C47_a_batch_that_is_not_finite_changes_nothing(kind: Kind, field: str, updates: int) -> None:
    learner = kind.make()
    train(learner, updates)  # TD3: after 2 the next update moves the critics only, after 3 the policy too
    before, weights = learner.state_dict(), learner.weights()
    bad = make_batch(1)
    tensor = getattr(bad, field)
    (tensor["hand"] if field.endswith("obs") else tensor)[5] = math.nan
    with pytest.raises(NonFiniteUpdate, match="not finite") as caught:
        learner.step(bad, 0.1)
    assert caught.value.step == updates + 1
    assert any(not math.isfinite(value) for value in caught.value.metrics.values())
    assert_identical(learner.state_dict(), before, leave_out="/noise/")
    for name, tensor in learner.weights().items():
        assert torch.equal(tensor, weights[name]), name
    learner.step(make_batch(2), 0.1)  # and a good batch goes on
    assert learner.updates == updates + 1


def test_a_terminated_row_does_not_look_at_its_next_observation(kind: Kind) -> None:
    first, second = kind.make(), kind.make()
    batch, changed = make_batch(0), make_batch(0)
    batch.discount.zero_()
    changed.discount.zero_()
    changed.next_obs["hand"].add_(3.0)
    assert first.step(batch, 0.0) == second.step(changed, 0.0)


def test_published_weights_are_copies_of_the_actor_and_the_normaliser(kind: Kind) -> None:
    learner = kind.make(kind.options(average_decay=0.0))
    train(learner, 2)
    weights = learner.weights()
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    train(learner, 4)
    for name, tensor in weights.items():
        assert torch.equal(tensor, kept[name]), name
    assert not torch.equal(learner.weights()["actor.0.weight"], kept["actor.0.weight"])
    assert weights["normaliser.mean"].dtype == torch.float64
    assert weights["normaliser.count"].item() == 2 * ROWS
    assert weights["normaliser.mean"].shape == (7,), "the policy's columns only"
    hand = torch.cat([make_batch(100 + index).obs["hand"] for index in range(2)]).double()
    torch.testing.assert_close(weights["normaliser.mean"][:5], hand.mean(0))
    torch.testing.assert_close(weights["normaliser.var"][:5], hand.var(0, correction=0))


def test_the_published_average_trails_the_actor_and_forgets_the_untrained_start(kind: Kind) -> None:
    options = kind.options(average_decay=0.99)
    learner = kind.make(options)
    average = torch.zeros(0)
    for index in range(6):
        before = learner.state_dict()["networks"]["average"]
        train(learner, 1, seed=index)
        networks = learner.state_dict()["networks"]
        decay = min(0.99, (2 + index) / (11 + index))
        average = decay * before + (1 - decay) * networks["actor"]
        torch.testing.assert_close(networks["average"], average)
    assert torch.equal(learner.weights()["actor.0.weight"].flatten(), networks["average"][: 7 * 8])


def test_without_normalisation_observations_are_taken_as_they_are(kind: Kind) -> None:
    options = kind.options(normalize_obs=False)
    learner = kind.make(options)
    train(learner, 2)
    assert sorted(learner.weights()) == ["actor.0.bias", "actor.0.weight", "actor.1.bias", "actor.1.weight"]
    untouched = kind.make(options)
    for index in range(2):
        untouched.step(make_batch(100 + index), progress=0.1)
    assert_identical(untouched.state_dict(), learner.state_dict())


def test_batches_of_changing_size_are_taken(kind: Kind) -> None:
    learner = kind.make()
    for rows in (8, 32, 8, 1):
        assert math.isfinite(learner.step(make_batch(rows, rows), 0.0)["critic_loss"])


def test_a_state_of_other_networks_is_refused_whole(kind: Kind) -> None:
    learner = kind.make()
    before = learner.state_dict()
    with pytest.raises(
        CheckpointInvalid, match=f"{kind.title} actor: the checkpoint has .* environment or `hidden` differ"
    ):
        learner.load_state_dict(kind.make(kind.small.model_copy(update={"hidden": (8,)})).state_dict())
    with pytest.raises(CheckpointInvalid, match=f"{kind.title} critic"):
        learner.load_state_dict(kind.make(spec=make_spec(asymmetric=False)).state_dict())
    with pytest.raises(CheckpointInvalid, match="normalize_obs"):
        learner.load_state_dict(kind.make(kind.small.model_copy(update={"normalize_obs": False})).state_dict())
    narrow = learner.state_dict()
    for name in ("mean", "var"):
        narrow["normaliser"][name] = narrow["normaliser"][name][:-1]
    with pytest.raises(CheckpointInvalid, match="normaliser: the checkpoint has 10 columns, this run has 11"):
        learner.load_state_dict({**narrow, "updates": 77})
    with pytest.raises(CheckpointInvalid, match=f"not a state of {kind.title}"):
        learner.load_state_dict({"networks": {}})
    assert_identical(learner.state_dict(), before)


def test_new_step_sizes_count_from_the_next_update_on(kind: Kind) -> None:
    learner = kind.make()
    train(learner, 3)
    before = learner.state_dict()["networks"]["actor"]
    learner.retune(kind.small.model_copy(update={"lr_actor": 0.5, "hidden": (99,)}))
    train(learner, 1)
    assert (learner.state_dict()["networks"]["actor"] - before).abs().max() > 0.05
    assert learner.options.hidden == kind.small.hidden


def test_fast_products_change_little_and_leave_the_switch_as_it_was(kind: Kind) -> None:
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    exact, fast = (kind.make(kind.small.model_copy(update={"fast_matmul": flag})) for flag in (False, True))
    for index in range(4):
        mine, other = exact.step(make_batch(index, 256), 0.0), fast.step(make_batch(index, 256), 0.0)
        assert other["critic_loss"] == pytest.approx(mine["critic_loss"], rel=0.05)
    assert switch.fp32_precision == before
    bad = make_batch(0)
    bad.reward[0] = math.nan
    with pytest.raises(NonFiniteUpdate):
        fast.step(bad, 0.0)
    assert switch.fp32_precision == before


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


def mean_return(env: PointEnv, policy: Policy) -> float:
    obs, total = env.reset(range(1000, 1000 + env.num_envs)), 0.0
    for _ in range(20):
        result = env.step(env.spec.action.to_env(policy.act(obs)))
        obs, total = result.obs, total + float(result.reward.mean())
    return total


@pytest.mark.parametrize("name", [pytest.param("sac", marks=pytest.mark.learning), "td3"])
def test_it_learns_to_reach_points(name: str) -> None:
    plugin = KINDS[name].plugin
    options = plugin.Options(hidden=(32, 32), lr_actor=3e-3, lr_critic=3e-3, tau=0.02, average_decay=0.9)
    env, replay = PointEnv(PointOptions(), 16), PointReplay()
    spec = env.spec
    learner, policy = plugin.make_algorithm(spec, options, "cpu", 0), plugin.make_policy(spec, options)
    rng = np.random.default_rng(0)
    explorer = NoiseLadder(0.3, 0.3, (16, 2), rng)
    policy.load(learner.weights())
    untrained = mean_return(PointEnv(PointOptions(), 64), policy)
    obs = env.reset(range(16))
    for step in range(500):
        action = policy.explore(obs, explorer)[0] if step >= 60 else explorer.uniform()
        result = env.step(spec.action.to_env(action))
        following = {key: value.copy() for key, value in result.obs.items()}
        ended = result.terminated | result.truncated
        for key, value in result.final_obs.items():
            following[key][ended] = value
        row = {**obs, **{f"next_{key}": value for key, value in following.items()}}
        replay.columns.append({**row, "action": action, "reward": result.reward})
        learner.observe({key: torch.from_numpy(obs[key]) for key in obs}, torch.from_numpy(result.valid))
        obs = result.obs
        if step >= 60:
            learner.step(replay.batch(rng, 64, gamma=0.8), progress=step / 500)
            policy.load(learner.weights())
    trained = mean_return(PointEnv(PointOptions(), 64), policy)
    assert untrained < -10.0
    assert trained > -3.5, (untrained, trained)
