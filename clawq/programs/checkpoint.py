"""Checkpoints: whole or not at all.

A checkpoint is one file `step-<12 digits>.ckpt`: a line of text (format, step, score, size and BLAKE2b digest of the
rest), then a file of torch.save that is read with `weights_only=True` and in no other way. It is written to a `.tmp`
file, fsynced, renamed, and the folder fsynced; so a crash or a full disk leaves the older ones as they were. Kept are
the K newest and the one with the best score.

A folder has one writer (the learner, under its run's claim); `save` sweeps the `.tmp` files that a killed writer left.
Readers may load at any time. `load_latest` steps over damaged files and says which. Torn and garbled files are found by
the digest; whether a state fits the run is for whoever loads it to check.
"""

import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from clawq.errors import CheckpointInvalid, CheckpointNotWritten

_log = logging.getLogger(__name__)

_MAGIC = "clawq-checkpoint"
_FORMAT = 1
#: The text line is padded to this many bytes, so that it can be read without knowing its length.
_HEADER_BYTES = 256


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line of a checkpoint says.

    Attributes:
        step: updates of the learner when it was made.
        score: what `best` is chosen by, larger is better; nan if it was not evaluated.
        size: bytes after the header.
        digest: BLAKE2b-256 of those bytes, hex.
        ring: name of the replay ring's snapshot that belongs to it; empty if there is none.
    """

    step: int
    score: float
    size: int
    digest: str
    ring: str = ""

    def encode(self) -> bytes:
        """The line, padded to its fixed width."""
        line = f"{_MAGIC} {_FORMAT} step={self.step} score={self.score!r} size={self.size} blake2b={self.digest}"
        if self.ring:
            line += f" ring={self.ring}"
        return line.encode("ascii").ljust(_HEADER_BYTES - 1) + b"\n"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        state: what was saved; tensors are on the CPU.
        step: updates of the learner when it was made.
        score: its score, nan if it has none.
        path: where it was read.
        skipped: newer files that could not be used, with the reason; empty when all is well.
        ring: see Header.
    """

    state: dict[str, Any]
    step: int
    score: float
    path: Path
    skipped: tuple[tuple[Path, str], ...] = ()
    ring: str = ""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: made on the first save.
        keep: newest checkpoints kept, at least 1; the best one is kept beside them.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep = folder, keep

    def paths(self) -> list[Path]:
        """All checkpoints, oldest first; the newest has the largest step."""
        return sorted(self.folder.glob("step-*.ckpt"))

    def save(self, state: Mapping[str, Any], step: int, score: float | None = None, ring: str = "") -> Path:
        """Write one checkpoint, then drop those that are not kept any more.

        Args:
            state: nested dicts, lists and tuples of tensors, numbers, strings, bytes and None; nothing else.
            step: updates of the learner; the same step again replaces the file.
            score: larger is better; None or nan = not evaluated.
            ring: see Header.

        Raises:
            CheckpointNotWritten: the file system refused; the older checkpoints are intact.
            TypeError: the state holds something that could not be read back; the text says where.
        """
        check_plain(state)
        buffer = BytesIO()
        torch.save(dict(state), buffer)
        body = buffer.getbuffer()
        header = Header(step, math.nan if score is None else float(score), len(body), _digest(body), ring)
        return self._put(header, body)

    def rescore(self, step: int, score: float) -> Path:
        """Give a checkpoint that is there a score; what it holds stays.

        Raises:
            CheckpointInvalid: it cannot be read.
            CheckpointNotWritten: the file system refused; it is as it was.
        """
        header = read_header(self._path(step))
        with self._path(step).open("rb") as file:
            file.seek(_HEADER_BYTES)
            body = file.read()
        return self._put(replace(header, score=float(score)), memoryview(body))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:012d}.ckpt"

    def _put(self, header: Header, body: memoryview) -> Path:
        path = self._path(header.step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            _write(path, header.encode(), body)
        except OSError as error:
            raise CheckpointNotWritten(
                f"{path} was not written: {error.strerror or error}. Older checkpoints are intact."
            ) from error
        self._drop_old(newest=path)
        return path

    def best(self) -> Path | None:
        """The checkpoint with the largest score (the newest of equals); None if none has a score."""
        scored = [(read_header_or_none(path), path) for path in self.paths()]
        ranked = [(head.score, path) for head, path in scored if head is not None and not math.isnan(head.score)]
        return max(ranked)[1] if ranked else None

    def rings(self) -> set[str]:
        """Names of the ring snapshots that the K newest checkpoints need; the best one is kept for its weights."""
        headers = (read_header_or_none(path) for path in self.paths()[-self.keep :])
        return {one.ring for one in headers if one is not None and one.ring}

    def load_latest(self, check: Callable[[Checkpoint], None] = lambda found: None) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there is none at all.

        Args:
            check: raises CheckpointInvalid if what belongs to a checkpoint is not whole; such a one is taken only where
                there is no better one.

        Raises:
            CheckpointInvalid: there are checkpoints, but not one can be used; the text lists them all.
        """
        skipped: list[tuple[Path, str]] = []
        second: Checkpoint | None = None
        for path in reversed(self.paths()):
            try:
                found = load(path)
                second = second or replace(found, skipped=tuple(skipped))
                check(found)
            except CheckpointInvalid as error:
                skipped.append((path, str(error)))
                continue
            return replace(found, skipped=tuple(skipped))
        if second is not None or not skipped:
            return second
        raise CheckpointInvalid(
            "\n".join(["no checkpoint can be used:", *(f"  - {why}" for _, why in skipped), self._advice()])
        )

    def _advice(self) -> str:
        """What to do when all is lost."""
        run = self.folder.parent
        return (
            f"Put sound copies into {self.folder}, if there are any; or learn again from what the run recorded, as far "
            f"as its log is kept: `clawq replay {run}`; or begin anew: `clawq up {run / 'config.yaml'}`"
        )

    def _sweep(self) -> None:
        for left in self.folder.glob("step-*.tmp"):
            left.unlink(missing_ok=True)

    def _drop_old(self, newest: Path) -> None:
        """Keep the newest K, the best, and the one just written (after a rollback it need not be among the newest)."""
        paths = self.paths()
        kept = {*paths[-self.keep :], self.best(), newest}
        for path in paths:
            if path not in kept:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    _log.warning("old checkpoint %s could not be removed: %s", path, error)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointInvalid: missing, damaged, or not a checkpoint of this format.
    """
    try:
        with path.open("rb") as file:
            header = _parse(path, file.read(_HEADER_BYTES))
            body = file.read()
    except OSError as error:
        raise CheckpointInvalid(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(body) != header.size:
        raise CheckpointInvalid(f"{path}: damaged: {len(body)} bytes of {header.size}")
    if _digest(body) != header.digest:
        raise CheckpointInvalid(f"{path}: damaged: the digest is wrong")
    try:
        state = torch.load(BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the file makes it raise
        raise CheckpointInvalid(f"{path}: not readable by torch {torch.__version__}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointInvalid(f"{path}: holds {type(state).__name__}, not a state")
    return Checkpoint(state, header.step, header.score, path, ring=header.ring)


def read_header(path: Path) -> Header:
    """The first line of a checkpoint, without reading the rest; raises CheckpointInvalid."""
    try:
        with path.open("rb") as file:
            return _parse(path, file.read(_HEADER_BYTES))
    except OSError as error:
        raise CheckpointInvalid(f"{path}: cannot be read: {error.strerror or error}") from error


def read_header_or_none(path: Path) -> Header | None:
    """As `read_header`, but None for a file that has none."""
    try:
        return read_header(path)
    except CheckpointInvalid:
        return None


def check_plain(state: Any, where: str = "state") -> None:
    """Raise TypeError, naming the place, unless `weights_only=True` will read `state` back as it is."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if type(key) not in (str, int):
                raise TypeError(f"{where}: key {key!r} is neither str nor int")
            check_plain(value, f"{where}[{key!r}]")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):
            check_plain(value, f"{where}[{index}]")
    elif type(state) not in (torch.Tensor, bool, int, float, str, bytes, type(None)):
        raise TypeError(f"{where}: {type(state).__name__} cannot be in a checkpoint; use tensors and plain values")


def _parse(path: Path, line: bytes) -> Header:
    try:
        magic, version, *pairs = line.decode("ascii").split()
        fields = dict(pair.split("=", 1) for pair in pairs)
        ring = fields.get("ring", "")
        header = Header(int(fields["step"]), float(fields["score"]), int(fields["size"]), fields["blake2b"], ring)
    except (ValueError, KeyError) as error:
        raise CheckpointInvalid(f"{path}: not a clawq checkpoint, or its first line is damaged") from error
    if magic != _MAGIC or len(line) != _HEADER_BYTES:
        raise CheckpointInvalid(f"{path}: not a clawq checkpoint")
    if version != str(_FORMAT):
        raise CheckpointInvalid(f"{path}: format {version}; this clawq reads format {_FORMAT}")
    return header


def _digest(body: bytes | memoryview) -> str:
    return hashlib.blake2b(body, digest_size=32).hexdigest()


def _write(path: Path, header: bytes, body: memoryview) -> None:
    """Write, fsync, rename, fsync the folder; on failure nothing is left behind."""
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            file.write(header)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
