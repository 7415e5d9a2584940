"""Snapshots of the replay ring on disk, for rings that are larger than what the streams retain.

Rows have positions that only grow, and a row that is *settled* is never written again before it is overwritten. So the
ring's history is cut into chunks of R rows, and each chunk becomes a file once, when it is complete:

    ring-000001048000-91c0….json      a manifest: which files make up the ring up to head 1048000
    rows-000000065536-6f1d….bin       a chunk: observations, actions, rewards, flags
    marks-000000065536-03aa….bin      links and validity of the same rows, which may change later (seams, void rows)

All files are immutable and named by what is in them (rowfile.py); a manifest is written after the files that it names,
and whoever refers to a manifest (a checkpoint) is written after it. So a crash at any moment leaves every snapshot
whole. Writing is in snapshot_writer.py.

Restoring maps the files, checks their digests and copies the rows to where they belong, whatever the capacity is now.
What is damaged or missing is told as gaps. Does not know which fragments the rows belong to (the ring's layout, in the
checkpoint), nor the sampler.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from clawq.errors import SnapshotInvalid
from clawq.json_text import is_whole, parse_json
from clawq.replay.columns import BLOCK, Column
from clawq.replay.ring import ReplayRing
from clawq.replay.rowfile import Columns, Piece, RowFiles, row_bytes

FORMAT = 1
#: Bytes of a chunk that are aimed at, and the least and most rows of one.
CHUNK_BYTES, CHUNK_ROWS = 8_000_000, (BLOCK, 65536)
#: Why rows may be missing though no file is.
NOT_WRITTEN = "overwritten before they were on disk"
MARKS: Columns = (("links", "int32", (3,)), ("valid", "bool", ()))


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose snapshot it is.

    Attributes:
        run: the run's id, for people.
        tag: the run's tag.
        spec: fingerprint of its environment's spec.
    """

    run: str
    tag: str
    spec: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which files make up a ring.

    Attributes:
        owner: whose ring.
        columns: of its rows.
        chunk_rows: R.
        oldest: position of the oldest live row.
        head: position of the next row.
        rows: files of rows, ascending; what lies between two of them is missing.
        marks: files of links and validity, ascending.
    """

    owner: Owner
    columns: Columns
    chunk_rows: int
    oldest: int
    head: int
    rows: tuple[Piece, ...]
    marks: tuple[Piece, ...]

    def encode(self) -> bytes:
        """As JSON; `decode` is its inverse."""
        plain = {"format": FORMAT, **asdict(self)}
        plain |= {kind: [[one.first, one.count, one.digest] for one in getattr(self, kind)] for kind in _KINDS}
        return json.dumps(plain, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, text: bytes) -> "Manifest":
        """Raises ValueError, KeyError or TypeError for what is no manifest of this format."""
        plain = parse_json(text)
        if plain["format"] != FORMAT:
            raise ValueError(f"format {plain['format']}; this clawq reads format {FORMAT}")
        numbers = [plain[name] for name in ("chunk_rows", "oldest", "head")]
        pieces = [one for kind in _KINDS for one in plain[kind]]
        numbers += [number for first, count, _ in pieces for number in (first, count)]
        if not all(map(is_whole, numbers)) or not all(isinstance(digest, str) for *_, digest in pieces):
            raise ValueError("a number or a digest is of another type")
        return cls(
            Owner(**plain["owner"]),
            tuple((name, dtype, tuple(shape)) for name, dtype, shape in plain["columns"]),
            plain["chunk_rows"],
            plain["oldest"],
            plain["head"],
            *(tuple(Piece(*one) for one in plain[kind]) for kind in _KINDS),
        )

    def files(self) -> set[str]:
        """Names of all files that it needs."""
        return {one.name(kind) for kind in _KINDS for one in getattr(self, kind)}


_KINDS = ("rows", "marks")


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that a snapshot does not give back.

    Attributes:
        first: position of the first one.
        end: position behind the last one.
        why: in words.
    """

    first: int
    end: int
    why: str


def row_columns(ring: ReplayRing) -> dict[str, Column]:
    """The ring's columns that are written once, by their names in a file."""
    packed = "+".join(ring.packed.names)
    return {packed: ring.packed, **ring.separate, "truncated": ring.truncated}


def columns_of(ring: ReplayRing) -> Columns:
    """What the rows of a ring consist of."""
    return tuple(
        (name, str(column.tensor.dtype).removeprefix("torch."), tuple(column.tensor.shape[1:]))
        for name, column in row_columns(ring).items()
    )


def chunk_rows(columns: Columns) -> int:
    """R for such rows; the capacity of the ring does not matter."""
    return int(np.clip(CHUNK_BYTES // row_bytes(columns), *CHUNK_ROWS))


def files_of(folder: Path, owner: Owner, columns: Columns) -> dict[str, RowFiles]:
    """The files of a folder, by kind."""
    kinds = {"rows": columns, "marks": MARKS}
    return {kind: RowFiles(folder, kind, owner.tag, owner.spec, of_kind) for kind, of_kind in kinds.items()}


def manifest_name(head: int, text: bytes) -> str:
    """File name of an encoded manifest."""
    return f"ring-{head:012d}-{xxhash.xxh3_128_hexdigest(text)[:16]}.json"


def load_manifest(folder: Path, name: str) -> Manifest:
    """Read a manifest.

    Raises:
        SnapshotInvalid: missing, damaged, or of another format.
    """
    path = folder / name
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SnapshotInvalid(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        manifest = Manifest.decode(text)
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotInvalid(f"{path}: not a snapshot of a replay ring, or damaged: {error}") from error
    if manifest_name(manifest.head, text) != name:
        raise SnapshotInvalid(f"{path}: damaged: the digest is wrong")
    return manifest


def check_fits(manifest: Manifest, ring: ReplayRing, owner: Owner, where: Path) -> None:
    """Raise SnapshotInvalid unless the snapshot is this run's, and of such rows."""
    theirs = manifest.owner
    if theirs.tag != owner.tag:
        raise SnapshotInvalid(f"{where} is of run {theirs.run}, not of {owner.run}; nothing was changed")
    if theirs.spec != owner.spec:
        raise SnapshotInvalid(f"{where} was made with another environment spec than {ring.spec.name} has now")
    here, there = dict(_described(columns_of(ring))), dict(_described(manifest.columns))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise SnapshotInvalid(
                f"{where}: column {name} is {there.get(name, 'not there')} in the snapshot, and "
                f"{here.get(name, 'not there')} in the ring of this run"
            )


def _described(columns: Columns) -> list[tuple[str, str]]:
    return [(name, f"{dtype}{list(shape)}") for name, dtype, shape in columns]


def restore_rows(ring: ReplayRing, folder: Path, manifest: Manifest) -> list[Gap]:
    """Copy the rows of a snapshot into a ring that was given its layout, from `oldest` up to `head`.

    Args:
        ring: the positions in it say which rows are wanted.
        folder: where the files are.
        manifest: checked by `check_fits`.

    Returns:
        What could not be given back, ascending; empty when all is well.
    """
    files = files_of(folder, manifest.owner, manifest.columns)
    targets: dict[str, dict[str, Column]] = {
        "rows": row_columns(ring),
        "marks": {"links": ring.links, "valid": ring.valid},
    }
    gaps = []
    for kind, columns in targets.items():
        missing = np.ones(ring.head - ring.oldest, np.bool_)
        for piece in getattr(manifest, kind):
            first, end = max(piece.first, ring.oldest), min(piece.end, ring.head)
            if first >= end:
                continue
            missing[first - ring.oldest : end - ring.oldest] = False
            try:
                arrays = files[kind].read(piece)
            except SnapshotInvalid as error:
                gaps.append(Gap(first, end, str(error)))
                continue
            for name, column in columns.items():
                column.write(first % ring.capacity, arrays[name][first - piece.first : end - piece.first])
        edges = np.flatnonzero(np.diff(missing, prepend=False, append=False)) + ring.oldest
        gaps += [Gap(int(first), int(end), NOT_WRITTEN) for first, end in edges.reshape(-1, 2)]
    return merged(gaps)


def merged(gaps: Sequence[Gap]) -> list[Gap]:
    """The same gaps, ascending and disjoint."""
    found: list[Gap] = []
    for gap in sorted(gaps, key=lambda one: (one.first, one.end)):
        if found and gap.first < found[-1].end:
            last = found[-1]
            why = last.why if gap.why in last.why else f"{last.why}; {gap.why}"
            found[-1] = Gap(last.first, max(last.end, gap.end), why)
        else:
            found.append(gap)
    return found
