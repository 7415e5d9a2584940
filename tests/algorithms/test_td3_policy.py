import subprocess
import sys

import numpy as np
import pytest
import torch

from clawq.algorithms.td3 import Td3Options, plugin
from clawq.algorithms.td3_policy import Td3Policy
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
OPTIONS = Td3Options(hidden=(16, 8))


def published(seed: int = 0, options: Td3Options = OPTIONS) -> dict[str, Array]:
    td3 = plugin.make_algorithm(SPEC, options, "cpu", seed)
    rows = torch.randn(200, 11, generator=torch.Generator().manual_seed(seed)) * 4 + 2
    obs = {"hand": rows[:, :5], "goal": rows[:, 5:7], "extra": rows[:, 7:]}
    td3.observe(obs, torch.ones(200, dtype=torch.bool))
    return {name: tensor.numpy() for name, tensor in td3.weights().items()}


def make_obs(envs: int = 6) -> Obs:
    rng = np.random.default_rng(0)
    return {key: rng.normal(2, 4, (envs, *spec.shape)).astype(np.float32) for key, spec in SPEC.obs.items()}


def loaded(weights: dict[str, Array]) -> Td3Policy:
    policy = plugin.make_policy(SPEC, OPTIONS)
    policy.load(weights)
    return policy


def test_actions_equal_the_formula_written_in_numpy() -> None:
    weights, obs = published(), make_obs()
    value = np.concatenate([obs["hand"], obs["goal"]], 1)
    value = ((value - weights["normaliser.mean"]) / np.sqrt(weights["normaliser.var"] + 1e-8)).clip(-5, 5)
    value = np.maximum(value @ weights["actor.0.weight"] + weights["actor.0.bias"], 0)
    value = np.maximum(value @ weights["actor.1.weight"] + weights["actor.1.bias"], 0)
    value = np.tanh(value @ weights["actor.2.weight"] + weights["actor.2.bias"])
    action, extras = loaded(weights).act(obs, deterministic=True)
    np.testing.assert_allclose(action, value, atol=1e-5)
    assert (str(action.dtype), action.shape, len(extras)) == ("float32", (6, 3), 0)
    assert np.abs(action).max() <= 1.0


def test_actions_belong_to_the_caller_and_observations_are_left_alone() -> None:
    policy, obs = loaded(published()), make_obs()
    kept = {key: value.copy() for key, value in obs.items()}
    first = policy.act(obs, deterministic=False)[0]
    copy = first.copy()
    policy.act(make_obs(6), deterministic=False)
    first *= 1.0  # writable
    np.testing.assert_array_equal(first, copy)
    for key, value in obs.items():
        np.testing.assert_array_equal(value, kept[key])


def test_published_tensors_load_as_well_as_arrays_and_are_copied() -> None:
    weights, obs = published(), make_obs()
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    policy = plugin.make_policy(SPEC, OPTIONS)
    policy.load(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    np.testing.assert_array_equal(policy.act(obs, True)[0], loaded(weights).act(obs, True)[0])


def test_read_only_arrays_load_without_a_warning() -> None:
    weights = published()
    for value in weights.values():
        value.setflags(write=False)
    loaded(weights).act(make_obs(), True)


def test_acting_without_weights_is_refused() -> None:
    with pytest.raises(RuntimeError, match="before load"):
        plugin.make_policy(SPEC, OPTIONS).act(make_obs(), True)


@pytest.mark.parametrize("name", sorted(published()))
def test_wrong_weights_are_refused_and_the_old_ones_stay(name: str) -> None:
    good, obs = published(), make_obs()
    policy = loaded(good)
    before = policy.act(obs, True)[0]
    other = published(seed=1)
    wrong_shape = {**other, name: np.zeros((*np.shape(other[name]), 2))}
    missing = {key: value for key, value in other.items() if key != name}
    not_numbers = {**other, name: np.full(np.shape(other[name]), "x")}
    for weights, words in ((wrong_shape, "expected shape"), (missing, "missing"), (not_numbers, "not an array")):
        with pytest.raises(WeightsCorrupt, match=words):
            policy.load(weights)
        np.testing.assert_array_equal(policy.act(obs, True)[0], before)


def test_weights_of_other_options_are_refused() -> None:
    policy = loaded(published())
    for changed in ({"hidden": (16,)}, {"hidden": (16, 9)}, {"normalize_obs": False}):
        with pytest.raises(WeightsCorrupt):
            policy.load(published(options=OPTIONS.model_copy(update=changed)))
    with pytest.raises(WeightsCorrupt, match="unknown"):
        policy.load({**published(), "critic.0.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(WeightsCorrupt, match="floating"):
        policy.load({**published(), "actor.0.bias": np.zeros(16, np.int32)})


def test_options_are_known_without_importing_torch() -> None:
    code = "import sys; from clawq.algorithms.td3 import plugin; plugin.Options(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0
