"""What policies on actors have in common: checked weights, normalisation, a few small matrix products. CPU only.

The published weights are named here, once, for both sides: `actor.<layer>.weight` [in, out], `actor.<layer>.bias`
[out] and, if observations are normalised, `normaliser.mean` and `normaliser.var` (float64, policy input only) and
`normaliser.count`. New weights are checked whole, put into fresh tensors and adopted by one assignment: nobody who acts
sees half of a version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clawq.algorithms.normalizer import mean_and_scale
from clawq.algorithms.options import ActorCriticOptions
from clawq.errors import WeightsCorrupt
from clawq.specs import EnvSpec
from clawq.types import Obs


def weight_shapes(spec: EnvSpec, options: ActorCriticOptions, outputs: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that is published; `outputs` is the width of the last layer."""
    sizes = (spec.policy_size, *options.hidden, outputs)
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (size_in, size_out) in enumerate(pairwise(sizes)):
        shapes[f"actor.{index}.weight"] = (size_in, size_out)
        shapes[f"actor.{index}.bias"] = (size_out,)
    if options.normalize_obs:
        shapes["normaliser.mean"] = shapes["normaliser.var"] = (spec.policy_size,)
        shapes["normaliser.count"] = ()
    return shapes


@dataclass(frozen=True, slots=True, eq=False)
class _Adopted:
    """One version of the weights, ready for use."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    shift: Tensor | None
    scale: Tensor | None


class MlpPolicy:
    """A network over `spec.policy_keys`; with `act` and `explore` it implements core.Policy.

    Attributes:
        title: name of the algorithm, for people.
    """

    title: str

    def __init__(self, spec: EnvSpec, options: ActorCriticOptions, outputs: int) -> None:
        self._keys, self._clip = spec.policy_keys, options.obs_clip
        self._shapes = weight_shapes(spec, options, outputs)
        self._layer_count = len(options.hidden) + 1
        self._adopted: _Adopted | None = None

    def load(self, weights: Mapping[str, Any]) -> None:
        """Adopt published weights (name -> numpy array or tensor; copied).

        Raises:
            WeightsCorrupt: names, shapes or dtypes differ; the weights in use stay.
        """
        tensors = {name: _as_tensor(name, value) for name, value in weights.items()}
        self._check(tensors)
        layers = tuple(
            (tensors[f"actor.{index}.weight"].float(), tensors[f"actor.{index}.bias"].float())
            for index in range(self._layer_count)
        )
        shift, scale = None, None
        if "normaliser.mean" in tensors:
            shift, scale = mean_and_scale(tensors["normaliser.mean"], tensors["normaliser.var"])
        self._adopted = _Adopted(layers, shift, scale)

    def _head(self, obs: Obs) -> Tensor:
        """What the last layer says of observations [N, ...]: float32 [N, outputs], the caller's. In inference mode."""
        adopted = self._adopted
        if adopted is None:
            raise RuntimeError("acting before load(): this policy has no weights yet")
        rows = np.concatenate([obs[key].reshape(len(obs[key]), -1) for key in self._keys], 1, dtype=np.float32)
        value = torch.from_numpy(rows)
        if adopted.shift is not None and adopted.scale is not None:
            value.sub_(adopted.shift).mul_(adopted.scale).clamp_(-self._clip, self._clip)
        for index, (weight, bias) in enumerate(adopted.layers, start=1):
            value = torch.addmm(bias, value, weight)
            if index < self._layer_count:
                value.relu_()
        return value

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._shapes.keys():
            missing = sorted(self._shapes.keys() - tensors.keys())
            extra = sorted(tensors.keys() - self._shapes.keys())
            raise WeightsCorrupt(
                f"these are not weights of this {self.title} policy: missing {missing}, unknown {extra}"
            )
        for name, shape in self._shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise WeightsCorrupt(f"{name}: expected shape {list(shape)}, got {list(tensors[name].shape)}")


def _as_tensor(name: str, value: Any) -> Tensor:
    """A CPU copy of one published array; refuses what is not a number."""
    try:
        tensor = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except TypeError as error:
        raise WeightsCorrupt(f"{name}: not an array of numbers ({error})") from error
    if not tensor.is_floating_point() and name != "normaliser.count":
        raise WeightsCorrupt(f"{name}: expected floating point numbers, got {tensor.dtype}")
    return tensor
