"""Algorithm plugins that learn nothing and remember all that they were given: one on-policy, one recurrent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clawq.config import Section
from clawq.core import Batch, SequenceBatch
from clawq.specs import EnvSpec
from clawq.types import Metrics


class Watching:
    """Implements core.Algorithm.

    Attributes:
        seen: copies of the ids that batches showed (the first number of `state`), and their masks if they had any.
    """

    td_error = None

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.observed = 0

    def observe(self, obs: Mapping[str, Any], valid: Any) -> None:
        self.observed += int(valid.sum())

    def step(self, batch: Batch, progress: float) -> Metrics:
        mask = batch.mask.clone() if isinstance(batch, SequenceBatch) else None
        self.seen.append((batch.obs["state"][..., 0].clone().long(), mask))
        return {"batches": float(len(self.seen))}

    def weights(self) -> dict[str, Any]:
        return {"nothing": torch.zeros(1)}

    def state_dict(self) -> dict[str, Any]:
        return {"observed": self.observed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.observed = int(state["observed"])


class WatchingPlugin:
    """Entry point of `clawq.algorithms`."""

    Options = Section

    def __init__(self, *samplers: str) -> None:
        self.samplers = samplers

    def make_algorithm(self, spec: EnvSpec, options: Any, device: str, seed: int) -> Watching:
        return Watching()

    def make_policy(self, spec: EnvSpec, options: Any) -> Any:
        raise NotImplementedError("nobody acts in these tests")


on_policy, recurrent = WatchingPlugin("fifo"), WatchingPlugin("sequence")
off_policy = WatchingPlugin("uniform")


def install(folder: Path) -> None:
    """Make `watching-fifo`, `-sequence` and `-uniform` installed plugins; `folder` must be on the path."""
    metadata = folder / "watching-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: watching\nVersion: 1.0\n")
    names = {"fifo": "on_policy", "sequence": "recurrent", "uniform": "off_policy"}
    lines = ["[clawq.algorithms]", *(f"watching-{name} = watching:{place}" for name, place in names.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
