"""Demonstrations: episodes from a file, in a ring of their own, from which each batch takes its share (replay.mixed).

The file is read when the learner starts: HDF5 in Minari's layout, by clawq's own export or anybody else's. All of it is
checked before the run is registered (`clawq.programs.demonstration_file`), as fragments of actors are: keys, shapes,
finite numbers, actions inside their range.
Actions are scaled to policy space; an episode that ends without `terminations` or `truncations` just breaks off, and
bootstraps from its last observation.

Demonstrations are no env steps of the run: budget, rate limiter, normaliser (which sees what actors show it only) and
ledger do not know them. They are not in checkpoints either: a resumed learner reads the file again, and refuses one
that has changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clawq.amounts import bytes_text
from clawq.config import Replay
from clawq.errors import CheckpointInvalid, UserError
from clawq.programs.demonstration_file import digest_of, fragments_of, path_of
from clawq.programs.memory import Machine
from clawq.replay.batches import Batches
from clawq.replay.nstep import Gatherer
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.rowsize import forecast_bytes
from clawq.replay.samplers import UniformSampler
from clawq.specs import EnvSpec
from clawq.types import Fragment, Metrics

#: Share of the free memory that the ring of demonstrations may take.
MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """What was read, and what is drawn from it.

    Attributes:
        ring: holds all of it.
        sampler: uniform.
        batches: of as many rows as a batch takes.
        episodes: number of episodes.
        digest: of the file.
        rows: of each batch.
    """

    ring: ReplayRing
    sampler: UniformSampler
    batches: Batches
    episodes: int
    digest: str
    rows: int

    def state_dict(self) -> dict[str, Any]:
        """Digest of the file, and the sampler's generator."""
        return {"digest": self.digest, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises CheckpointInvalid if that was with other demonstrations.
        """
        if state["digest"] != self.digest:
            raise CheckpointInvalid(
                "replay.demonstrations: the file is not the one with which this run was trained; put that one back, or "
                "begin a new run"
            )
        self.sampler.load_state_dict(state["sampler"])

    def metrics(self) -> Metrics:
        """How many there are, and how many rows of a batch come from them."""
        return {
            "demonstrations/env_steps": float(self.ring.size),
            "demonstrations/episodes": float(self.episodes),
            "demonstrations/rows": float(self.rows),
        }


def load_demonstrations(replay: Replay, spec: EnvSpec, returns: Returns, device: str, seed: int) -> Demonstrations:
    """Read, check and place the demonstrations that the configuration names.

    Args:
        replay: its `demonstrations` are not None.
        spec: of the run's environment.
        returns: as those of the run's own rows.
        device: where the ring is to be.
        seed: of the draws.

    Raises:
        UserError: the file cannot be read, holds nothing, or does not fit the environment; the text says which episode
            and what about it.
    """
    path = path_of(replay)
    assert path is not None
    digest = digest_of(path)
    sizes = [fragment_rows(one) for one in fragments_of(path, spec)]
    # A ring takes no fragment that is larger than half of it.
    capacity = max(sum(sizes), 2 * max(sizes), 2)
    check_memory(forecast_bytes(spec, capacity), device, path)
    ring = ReplayRing(spec, capacity, device)
    for fragment in fragments_of(path, spec):
        ring.insert(fragment)
    sampler = UniformSampler(ring, torch.Generator().manual_seed(seed))
    rows = replay.demonstrated
    batches = Batches(ring, sampler, rows, lambda: Gatherer(ring, rows, returns))
    return Demonstrations(ring, sampler, batches, len(sizes), digest, rows)


def check_memory(wanted_bytes: int, device: str, path: Path) -> None:
    """UserError if a ring of so many bytes does not fit beside the run's own."""
    on_gpu = torch.device(device).type == "cuda"
    free_bytes = torch.cuda.mem_get_info(torch.device(device))[0] if on_gpu else Machine.here().free_bytes
    if wanted_bytes > MEMORY_SHARE * free_bytes:
        raise UserError(
            f"replay.demonstrations: {path} would take {bytes_text(wanted_bytes)} on {device}, where "
            f"{bytes_text(free_bytes)} are free; at most {MEMORY_SHARE:.0%} of that is for demonstrations. Give a "
            "file with fewer episodes"
        )


def fragment_rows(fragment: Fragment) -> int:
    """Rows that a fragment takes in a ring."""
    return fragment.meta.steps * fragment.meta.envs + int(np.count_nonzero(fragment.boundary)) + fragment.meta.envs


__all__ = ["Demonstrations", "load_demonstrations"]
