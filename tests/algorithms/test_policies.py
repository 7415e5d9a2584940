"""What the policies of actors promise, of every algorithm; and how each explores."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from learners import KINDS, Kind

from clawq.acting.exploration import NoiseLadder
from clawq.errors import WeightsCorrupt
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.types import Array, Obs

SPEC = EnvSpec(
    "test:hand",
    {"extra": ArraySpec((4,)), "goal": ArraySpec((2,)), "hand": ArraySpec((5,))},
    ActionSpec((-1.0,) * 3, (1.0,) * 3),
    policy_keys=("hand", "goal"),
    critic_keys=("hand", "goal", "extra"),
)
HIDDEN = (16, 8)


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def published(kind: Kind, seed: int = 0, **options: Any) -> dict[str, Array]:
    learner = kind.make(kind.options(**{"hidden": HIDDEN, **options}), seed, SPEC)
    rows = torch.randn(200, 11, generator=torch.Generator().manual_seed(seed)) * 4 + 2
    obs = {"hand": rows[:, :5], "goal": rows[:, 5:7], "extra": rows[:, 7:]}
    learner.observe(obs, torch.ones(200, dtype=torch.bool))
    return {name: tensor.numpy() for name, tensor in learner.weights().items()}


def make_obs(envs: int = 6) -> Obs:
    rng = np.random.default_rng(0)
    return {key: rng.normal(2, 4, (envs, *spec.shape)).astype(np.float32) for key, spec in SPEC.obs.items()}


def made(kind: Kind) -> Any:
    return kind.plugin.make_policy(SPEC, kind.options(hidden=HIDDEN))


def loaded(kind: Kind, weights: dict[str, Array]) -> Any:
    policy = made(kind)
    policy.load(weights)
    return policy


def explorer(seed: int = 0, random_share: float = 0.0, noise: float = 0.0, envs: int = 6) -> NoiseLadder:
    return NoiseLadder(noise, noise, (envs, 3), np.random.default_rng(seed), random_share)


def head(weights: dict[str, Array], obs: Obs) -> Array:
    """The network's last layer, written in numpy."""
    value = np.concatenate([obs["hand"], obs["goal"]], 1)
    value = ((value - weights["normaliser.mean"]) / np.sqrt(weights["normaliser.var"] + 1e-8)).clip(-5, 5)
    value = np.maximum(value @ weights["actor.0.weight"] + weights["actor.0.bias"], 0)
    value = np.maximum(value @ weights["actor.1.weight"] + weights["actor.1.bias"], 0)
    last: Array = value @ weights["actor.2.weight"] + weights["actor.2.bias"]
    return last


def test_without_exploring_actions_are_tanh_of_the_mean(kind: Kind) -> None:
    weights, obs = published(kind), make_obs()
    policy = loaded(kind, weights)
    action = policy.act(obs)
    np.testing.assert_allclose(action, np.tanh(head(weights, obs)[:, :3]), atol=1e-5)
    assert (str(action.dtype), action.shape) == ("float32", (6, 3))
    assert np.abs(action).max() <= 1.0
    np.testing.assert_array_equal(policy.act(obs), action)


def test_td3_explores_by_the_noise_of_the_run() -> None:
    kind, obs = KINDS["td3"], make_obs()
    policy = loaded(kind, published(kind))
    action, extras = policy.explore(obs, explorer(noise=0.3, random_share=0.5))
    np.testing.assert_array_equal(action, explorer(noise=0.3, random_share=0.5).perturb(policy.act(obs)))
    assert (str(action.dtype), len(extras)) == ("float32", 0)


def test_sac_explores_by_sampling_its_own_distribution_with_the_actors_random_numbers() -> None:
    kind, obs = KINDS["sac"], make_obs()
    weights = published(kind)
    policy, last = loaded(kind, weights), head(weights, obs)
    expected = np.tanh(last[:, :3] + np.exp(last[:, 3:]) * explorer(5).normal())
    for noise in (0.0, 1.0):  # the run's noise is not for a policy that samples
        action, extras = policy.explore(obs, explorer(5, noise=noise))
        np.testing.assert_allclose(action, expected, atol=1e-5)
        assert (str(action.dtype), action.shape, len(extras)) == ("float32", (6, 3), 0)
    assert not np.allclose(policy.explore(obs, explorer(6))[0], expected, atol=0.01)
    # But its share of uniform actions is
    twin = explorer(5, random_share=1.0)
    twin.normal()
    action = policy.explore(obs, explorer(5, random_share=1.0))[0]
    np.testing.assert_array_equal(action, twin.scatter(np.zeros((6, 3), np.float32)))


def test_actions_belong_to_the_caller_and_observations_are_left_alone(kind: Kind) -> None:
    policy, obs = loaded(kind, published(kind)), make_obs()
    kept = {key: value.copy() for key, value in obs.items()}
    first = policy.explore(obs, explorer())[0]
    copy = first.copy()
    policy.explore(make_obs(6), explorer())
    first *= 1.0  # writable
    np.testing.assert_array_equal(first, copy)
    for key, value in obs.items():
        np.testing.assert_array_equal(value, kept[key])


def test_published_tensors_load_as_well_as_arrays_and_are_copied(kind: Kind) -> None:
    weights, obs = published(kind), make_obs()
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    policy = made(kind)
    policy.load(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    np.testing.assert_array_equal(policy.act(obs), loaded(kind, weights).act(obs))


def test_read_only_arrays_load_without_a_warning(kind: Kind) -> None:
    weights = published(kind)
    for value in weights.values():
        value.setflags(write=False)
    loaded(kind, weights).act(make_obs())


def test_acting_without_weights_is_refused(kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="before load"):
        made(kind).act(make_obs())


@pytest.mark.parametrize("name", sorted(published(KINDS["td3"])))
def test_wrong_weights_are_refused_and_the_old_ones_stay(kind: Kind, name: str) -> None:
    good, obs = published(kind), make_obs()
    policy = loaded(kind, good)
    before = policy.act(obs)
    other = published(kind, seed=1)
    wrong_shape = {**other, name: np.zeros((*np.shape(other[name]), 2))}
    missing = {key: value for key, value in other.items() if key != name}
    not_numbers = {**other, name: np.full(np.shape(other[name]), "x")}
    for weights, words in ((wrong_shape, "expected shape"), (missing, "missing"), (not_numbers, "not an array")):
        with pytest.raises(WeightsCorrupt, match=words):
            policy.load(weights)
        np.testing.assert_array_equal(policy.act(obs), before)


def test_weights_of_other_options_are_refused(kind: Kind) -> None:
    policy = loaded(kind, published(kind))
    options: list[dict[str, Any]] = [{"hidden": (16,)}, {"hidden": (16, 9)}, {"normalize_obs": False}]
    for changed in options:
        with pytest.raises(WeightsCorrupt):
            policy.load(published(kind, **changed))
    with pytest.raises(WeightsCorrupt, match="unknown"):
        policy.load({**published(kind), "critic.0.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(WeightsCorrupt, match="floating"):
        policy.load({**published(kind), "actor.0.bias": np.zeros(16, np.int32)})


@pytest.mark.parametrize("name", sorted(KINDS))
def test_options_are_known_without_importing_torch(name: str) -> None:
    code = f"import sys; from clawq.algorithms.{name} import plugin; plugin.Options(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0
