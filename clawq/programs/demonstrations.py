"""Demonstrations: episodes from a file, in a ring of their own, from which each batch takes its share (replay.mixed).

The file is read when the learner starts: HDF5 in Minari's layout, by clawq's own export or anybody else's. All of it is
checked before the first update, as fragments of actors are: keys, shapes, finite numbers, actions inside their range.
Actions are scaled to policy space; an episode that ends without `terminations` or `truncations` just breaks off, and
bootstraps from its last observation.

Demonstrations are no env steps of the run: budget, rate limiter, normaliser (which sees what actors show it only) and
ledger do not know them. They are not in checkpoints either: a resumed learner reads the file again, and refuses one
that has changed.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clawq.config import Replay
from clawq.errors import CheckpointInvalid, SpecMismatch, UserError
from clawq.programs.episode_hdf5 import read_hdf5
from clawq.programs.episodes import Episode
from clawq.programs.memory import Machine
from clawq.replay.batches import Batches
from clawq.replay.mixed import DEMONSTRATED
from clawq.replay.nstep import Gatherer
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.rowsize import forecast_bytes
from clawq.replay.samplers import UniformSampler
from clawq.replay.validation import action_fault, check_schema, non_finite_fault
from clawq.specs import EnvSpec
from clawq.types import Fragment, FragmentMeta, Metrics

#: Where demonstrations lie in their ring, as a slot's name.
SLOT = "demonstrations"
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
    wanted = replay.demonstrations
    assert wanted is not None
    path = Path(wanted.path).expanduser()
    digest = digest_of(path)
    sizes = [fragment_rows(one) for one in checked(read_hdf5(path, spec), path, spec)]
    if not sizes:
        raise UserError(f"replay.demonstrations: {path} holds no episodes")
    # A ring takes no fragment that is larger than half of it.
    capacity = max(sum(sizes), 2 * max(sizes), 2)
    check_memory(forecast_bytes(spec, capacity), device, path)
    ring = ReplayRing(spec, capacity, device)
    for fragment in checked(read_hdf5(path, spec), path, spec):
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
            f"replay.demonstrations: {path} would take {wanted_bytes / 1e9:.2f} GB on {device}, where "
            f"{free_bytes / 1e9:.2f} GB are free; at most {MEMORY_SHARE:.0%} of that is for demonstrations. Give a "
            "file with fewer episodes"
        )


def checked(episodes: Iterable[Episode], path: Path, spec: EnvSpec) -> Iterator[Fragment]:
    """Episodes as fragments, each checked; UserError names the first that does not fit."""
    for number, episode in enumerate(episodes):
        where = f"replay.demonstrations: {path}: episode {number}"
        if episode.meta.env not in ("", spec.fingerprint):
            raise UserError(
                f"{where} was made in another environment than {spec.name}, or with other options or another version "
                f"of it (fingerprint {episode.meta.env}, this run's is {spec.fingerprint}); its rewards would not be "
                "this run's"
            )
        fragment = as_fragment(episode, number, spec)
        try:
            check_schema(spec, {}, fragment)
        except SpecMismatch as error:
            raise UserError(f"{where} does not fit {spec.name}: {error}") from None
        fault = non_finite_fault(fragment) or action_fault(fragment)
        if fault is not None:
            raise UserError(f"{where} cannot be learned from: {fault.detail}")
        yield fragment


def as_fragment(episode: Episode, number: int, spec: EnvSpec) -> Fragment:
    """One episode as a fragment of one env, with an epoch of its own: nothing is joined to its neighbours."""
    ends = bool(episode.terminated[-1] or episode.truncated[-1])
    last = {key: column[-1:] if ends else column[:0] for key, column in episode.obs.items()}
    meta = FragmentMeta(
        run="", worker=episode.meta.worker, slot=SLOT, epoch=number + 1, seq=1, env=spec.fingerprint, seed=0,
        weights_version=DEMONSTRATED, steps=episode.steps, envs=1, produced=episode.steps,
    )  # fmt: skip
    return Fragment(
        meta,
        {key: column[:, None] for key, column in episode.obs.items()},
        episode.action[:, None],
        episode.reward[:, None],
        episode.terminated[:, None],
        episode.truncated[:, None],
        np.ones((episode.steps, 1), np.bool_),
        last,
    )


def fragment_rows(fragment: Fragment) -> int:
    """Rows that a fragment takes in a ring."""
    return fragment.meta.steps * fragment.meta.envs + int(np.count_nonzero(fragment.boundary)) + fragment.meta.envs


def digest_of(path: Path) -> str:
    """BLAKE2b of the file (of a folder: of its HDF5 file); UserError if it is not there."""
    file = next((p for p in (path, path / "main_data.hdf5", path / "data" / "main_data.hdf5") if p.is_file()), None)
    if file is None:
        raise UserError(
            f"replay.demonstrations: {path} is neither an HDF5 file nor a Minari dataset (a folder with main_data.hdf5)"
        )
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"replay.demonstrations: {file} cannot be read: {error.strerror or error}") from None


__all__ = ["Demonstrations", "as_fragment", "load_demonstrations"]
