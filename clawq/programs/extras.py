"""Extras: what an algorithm needs of its policy beside each action, as log-probabilities; light, for actors too."""

from typing import Any

from clawq import plugins
from clawq.config import RunConfig
from clawq.specs import ArraySpec, EnvSpec


def extras_of(config: RunConfig, spec: EnvSpec) -> dict[str, ArraySpec]:
    """Name -> spec without T, N, as the algorithm's plugin says (see core.AlgorithmPlugin); empty = nothing."""
    plugin: Any = plugins.load("algorithms", config.algorithm.name)
    told = getattr(plugin, "extras", None)
    return {} if told is None else dict(told(spec, plugin.Options.model_validate(config.algorithm.options)))


__all__ = ["extras_of"]
