"""A file of demonstrations, read and checked; without torch, so that a bad one is refused before a run exists.

    check_readable    before anything is made: is it there, is it HDF5, does it hold episodes?
    check_fitting     once the environment has said what it is, before the run is registered: does all of it fit?
    checked           the episodes as fragments, each checked as those of actors are

What is done with them is in `clawq.programs.demonstrations`.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from clawq.config import Replay
from clawq.core import DEMONSTRATED
from clawq.errors import SpecMismatch, UserError
from clawq.programs.episode_hdf5 import find_hdf5, opened, read_hdf5
from clawq.programs.episodes import Episode
from clawq.replay.validation import action_fault, check_schema, non_finite_fault
from clawq.specs import EnvSpec
from clawq.types import Fragment, FragmentMeta

#: Where demonstrations lie in their ring, as a slot's name.
SLOT = "demonstrations"


def check_readable(replay: Replay) -> None:
    """UserError if the configuration names a file that is not there, is no HDF5, or holds no episodes."""
    path = path_of(replay)
    if path is not None:
        with named(), opened(path):
            pass


def check_fitting(replay: Replay, spec: EnvSpec) -> None:
    """UserError if an episode of the file that the configuration names does not fit the environment."""
    path = path_of(replay)
    if path is not None:
        for _ in fragments_of(path, spec):
            pass


def path_of(replay: Replay) -> Path | None:
    """The file or folder that the configuration names; None = none."""
    return None if replay.demonstrations is None else Path(replay.demonstrations.path).expanduser()


def fragments_of(path: Path, spec: EnvSpec) -> Iterator[Fragment]:
    """The episodes of a file as fragments.

    Raises:
        UserError: it cannot be read, or does not fit the environment; the text says which episode and what about it.
    """
    with named():
        yield from checked(read_hdf5(path, spec), path, spec)


def checked(episodes: Iterable[Episode], path: Path, spec: EnvSpec) -> Iterator[Fragment]:
    """Episodes as fragments, each checked; UserError names the first that does not fit."""
    for number, episode in enumerate(episodes):
        where = f"{path}: episode {number}"
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


def digest_of(path: Path) -> str:
    """BLAKE2b of the file (of a folder: of its HDF5 file); UserError if it is not there."""
    with named():
        file = find_hdf5(path)
        try:
            with file.open("rb") as content:
                return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}") from None


@contextmanager
def named() -> Iterator[None]:
    """Say of what is refused by which key it was given."""
    try:
        yield
    except UserError as error:
        raise UserError(f"replay.demonstrations: {error}") from None


__all__ = ["SLOT", "as_fragment", "check_fitting", "check_readable", "digest_of", "fragments_of", "path_of"]
