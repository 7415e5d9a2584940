"""Batches for learners without a replay ring, and what the tests of all algorithms with actor and critics share."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from clawq.algorithms.sac import SacOptions
from clawq.algorithms.sac import plugin as sac
from clawq.algorithms.td3 import Td3Options
from clawq.algorithms.td3 import plugin as td3
from clawq.core import Batch
from clawq.specs import ActionSpec, ArraySpec, EnvSpec

ACTIONS, ROWS = 3, 32


def make_spec(asymmetric: bool = True) -> EnvSpec:
    obs = {"hand": ArraySpec((5,)), "goal": ArraySpec((2,)), "contact": ArraySpec((4,))}
    critic = ("contact", "hand", "goal") if asymmetric else ("hand", "goal")
    return EnvSpec("test:hand", obs, ActionSpec((-1.0,) * ACTIONS, (1.0,) * ACTIONS), ("hand", "goal"), critic)


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


def observe(learner: Any, seed: int) -> None:
    batch = make_batch(seed)
    learner.observe(batch.obs, torch.ones(ROWS, dtype=torch.bool))


def train(learner: Any, updates: int, seed: int = 100) -> None:
    for index in range(updates):
        observe(learner, seed + index)
        learner.step(make_batch(seed + index), progress=0.1)


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


def plain_networks(flat: Tensor, count: int, sizes: tuple[int, ...]) -> list[nn.Sequential]:
    """K networks of torch.nn with the parameters of an MlpStack."""
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


@dataclass(frozen=True, slots=True)
class Kind:
    """An algorithm as the tests know it.

    Attributes:
        plugin: its plugin.
        title: its name for people.
        small: options of small networks, with everything switched on.
        each_update: options under which the policy learns in each update.
        more_learned: what has an optimiser beside actor and critics.
    """

    plugin: Any
    title: str
    small: Any
    each_update: Mapping[str, Any]
    more_learned: tuple[str, ...]

    def options(self, **more: Any) -> Any:
        """Options under which the policy learns in each update."""
        return self.plugin.Options(**{"hidden": (8,), **self.each_update, **more})

    def make(self, options: Any = None, seed: int = 0, spec: EnvSpec | None = None) -> Any:
        return self.plugin.make_algorithm(spec or make_spec(), options or self.small, "cpu", seed)


SMALL: dict[str, Any] = {"hidden": (24, 16), "grad_clip": 1.0, "average_decay": 0.9, "lr_final_fraction": 0.5}
KINDS = {
    "td3": Kind(td3, "TD3", Td3Options(**SMALL), {"policy_delay": 1}, ()),
    "sac": Kind(sac, "SAC", SacOptions(**SMALL), {}, ("alpha",)),
}
