"""Writing snapshots of the replay ring (snapshot.py), incrementally, beside the learner.

A snapshot writes what is new: chunks completed since the last one, the incomplete last chunk, and the marks of those
chunks in which any changed. What it costs the learner does not depend on the size of the ring.

Two threads. The learner's takes a `Cut`: the few rows that are not settled, and the marks that changed. The saver's
copies settled rows out of the ring while the learner goes on inserting, and looks afterwards whether they have been
overwritten meanwhile. Those that were are left out: `skipped` counts them (many: the disk is slower than the
experience), and a ring that is restored from there has a gap. Nobody ever waits for the disk but the saver.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clawq.errors import CheckpointNotWritten, SnapshotInvalid
from clawq.replay.columns import BLOCK
from clawq.replay.ring import ReplayRing
from clawq.replay.rowfile import Piece, write_whole
from clawq.replay.snapshot import (
    Gap,
    Manifest,
    Owner,
    chunk_rows,
    columns_of,
    files_of,
    load_manifest,
    manifest_name,
    row_columns,
)
from clawq.types import Array

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """What the saver's thread cannot take from the ring by itself.

    Attributes:
        number: counts the cuts of one writer.
        oldest: position of the oldest live row.
        settled: see ReplayRing.settled.
        head: position of the next row.
        tail: column -> the rows from `settled` up to `head`.
        marks: number of a chunk -> (its first row that is still live, links and valid from there on).
    """

    number: int
    oldest: int
    settled: int
    head: int
    tail: Mapping[str, Array]
    marks: Mapping[int, tuple[int, Mapping[str, Array]]]


class SnapshotWriter:
    """Writes the snapshots of one ring.

    Args:
        ring: whose.
        folder: for its files; it has one writer.
        owner: whose.

    Attributes:
        skipped: rows that the newest snapshot lacks, since they were overwritten before they could be written.
    """

    def __init__(self, ring: ReplayRing, folder: Path, owner: Owner) -> None:
        self._ring, self.folder, self._owner = ring, folder, owner
        self._columns = columns_of(ring)
        self._chunk_rows = chunk_rows(self._columns)
        self._files = files_of(folder, owner, self._columns)
        self.skipped = 0
        # The learner's thread.
        self._asked = ring.settled // self._chunk_rows
        self._cuts = 0
        # The saver's thread. Files by number of the chunk, as they are on disk now.
        self._rows: dict[int, Piece] = {}
        self._marks: dict[int, Piece] = {}
        #: Position behind the last complete chunk that was looked at; None before the first.
        self._next: int | None = None
        #: Names of files that are whole.
        self._known: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        # Chunks whose marks were in a cut that could not be written, for the next cut; and how many cuts had been taken
        # by then: they lack those marks.
        self._unwritten: deque[int] = deque()
        self._useless = 0

    # --- the learner's thread -----------------------------------------------------------------------------------

    def due(self) -> int | None:
        """What to tell `advance` because a chunk is complete; None if none is, or if it was told already."""
        settled = self._ring.settled
        if settled // self._chunk_rows <= self._asked:
            return None
        self._asked = settled // self._chunk_rows
        return settled

    def cut(self) -> Cut:
        """Take what `write` needs to make a snapshot of the ring as it is now."""
        ring = self._ring
        self._cuts += 1
        oldest, settled, head = ring.oldest, ring.settled, ring.head
        tail = {name: one.read(settled % ring.capacity, head - settled) for name, one in row_columns(ring).items()}
        marks = {}
        for chunk in self._changed_chunks():
            first, end = max(oldest, chunk * self._chunk_rows), min(head, (chunk + 1) * self._chunk_rows)
            if first < end:
                at, count = first % ring.capacity, end - first
                marks[chunk] = first, {"links": ring.links.read(at, count), "valid": ring.valid.read(at, count)}
        return Cut(self._cuts, oldest, settled, head, tail, marks)

    def _changed_chunks(self) -> list[int]:
        """Numbers of the chunks in which links or validity changed since the last cut."""
        ring = self._ring
        chunks = set()
        while self._unwritten:
            chunks.add(self._unwritten.popleft())
        blocks = np.union1d(ring.links.take_changes(), ring.valid.take_changes()).astype(np.int64)
        edges = np.concatenate((blocks * BLOCK, np.minimum((blocks + 1) * BLOCK, ring.capacity) - 1))
        # No block is larger than a chunk: its ends tell all chunks that it touches, except where it holds the seam
        # between the newest and the oldest row.
        positions = ring.oldest + (edges - ring.oldest) % ring.capacity
        seam = [ring.oldest, max(ring.oldest, ring.head - 1)]
        return sorted(chunks.union((np.concatenate((positions, seam)) // self._chunk_rows).tolist()))

    # --- the saver's thread -------------------------------------------------------------------------------------

    def advance(self, settled: int) -> None:
        """Write the chunks that are complete, so that a snapshot has less to do.

        Raises:
            CheckpointNotWritten: the file system refused; it will be tried again.
        """
        with self._told():
            self._advance(settled)

    def write(self, cut: Cut) -> str:
        """Write a snapshot; returns the name of its manifest.

        Raises:
            CheckpointNotWritten: the file system refused; the older snapshots are intact.
        """
        with self._told():
            try:
                if cut.number <= self._useless:
                    raise OSError("the one before it could not be written, and it builds on that")
                return self._write_cut(cut)
            except BaseException:
                self._unwritten.extend(list(cut.marks))
                self._useless = self._cuts
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointNotWritten(
                f"the snapshot of the replay ring was not written to {self.folder}: {error.strerror or error}. "
                "Older checkpoints are intact."
            ) from error

    def _advance(self, settled: int) -> int:
        """Write complete chunks; returns the position behind them."""
        at = self._ring.oldest if self._next is None else self._next
        while (end := (at // self._chunk_rows + 1) * self._chunk_rows) <= settled:
            chunk = end // self._chunk_rows - 1
            if chunk not in self._rows:
                first, rows = self._copied(at, end)
                if first < end:
                    self._rows[chunk] = self._write("rows", first, rows)
            at = self._next = end
        return at

    def _write_cut(self, cut: Cut) -> str:
        end = self._advance(cut.settled)
        for table in (self._rows, self._marks):
            for chunk in [chunk for chunk, piece in table.items() if piece.end <= cut.oldest]:
                del table[chunk]
        for chunk, (first, marks) in cut.marks.items():
            self._marks[chunk] = self._write("marks", first, marks)
        rows = sorted([*self._rows.values(), *self._open(cut, end)], key=_first)
        manifest = Manifest(
            self._owner,
            self._columns,
            self._chunk_rows,
            cut.oldest,
            cut.head,
            tuple(rows),
            tuple(sorted(self._marks.values(), key=_first)),
        )
        self.skipped = cut.head - cut.oldest - sum(piece.end - max(cut.oldest, piece.first) for piece in rows)
        text = manifest.encode()
        name = manifest_name(cut.head, text)
        write_whole(self.folder / name, [text])
        self._manifests[name] = manifest
        return name

    def _open(self, cut: Cut, end: int) -> list[Piece]:
        """Write the rows from `end`, behind the last complete chunk."""
        if cut.head == cut.settled:
            return []
        first, settled = self._copied(min(end, cut.settled), cut.settled)
        last = {name: np.concatenate((settled[name], cut.tail[name])) for name in settled}
        return [self._write("rows", first, last)]

    def _copied(self, first: int, end: int) -> tuple[int, dict[str, Array]]:
        """Settled rows, copied while the learner goes on: (where they begin, rows), without what it overwrote."""
        ring = self._ring
        first = min(max(first, ring.oldest), end)
        copied = {name: one.read(first % ring.capacity, end - first) for name, one in row_columns(ring).items()}
        # The ring moves `oldest` on before it overwrites anything: what it has passed by now may be newer.
        lost = min(max(0, ring.oldest - first), end - first)
        return first + lost, {name: rows[lost:] for name, rows in copied.items()}

    def _write(self, kind: str, first: int, arrays: Mapping[str, Array]) -> Piece:
        piece = self._files[kind].write(first, arrays, self._known)
        self._known.add(piece.name(kind))
        return piece

    def keep(self, names: Collection[str]) -> None:
        """Delete what none of these snapshots needs, and what a killed writer left.

        Nothing is deleted while one of them is there and cannot be read.
        """
        names = {name for name in names if (self.folder / name).exists()}
        try:
            kept = {name: self._manifests.get(name) or load_manifest(self.folder, name) for name in names}
        except SnapshotInvalid as error:
            log.warning("no old snapshot is deleted: %s", error)
            return
        self._manifests = kept
        needed = {piece.name("rows") for piece in self._rows.values()}
        needed |= {piece.name("marks") for piece in self._marks.values()}
        needed = needed.union(names, *(one.files() for one in kept.values()))
        self._known &= needed
        try:
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                if path.name not in needed and path.name.startswith(("rows-", "marks-", "ring-")):
                    path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("old snapshots could not be removed: %s", error)

    # --- before either --------------------------------------------------------------------------------------------

    def adopt(self, manifest: Manifest, gaps: Iterable[Gap]) -> None:
        """Go on from a snapshot whose rows were just copied into the ring: what is on disk is not written again.

        To be called before anything else changes the ring, what is void because of the gaps included.
        """
        ring, lost = self._ring, list(gaps)
        if manifest.chunk_rows != self._chunk_rows or manifest.columns != self._columns:
            return
        for kind, table in (("rows", self._rows), ("marks", self._marks)):
            for piece in getattr(manifest, kind):
                if any(gap.first < piece.end and piece.first < gap.end for gap in lost):
                    continue
                self._known.add(piece.name(kind))
                chunk = piece.first // self._chunk_rows
                complete = piece.end == (chunk + 1) * self._chunk_rows and piece.end <= ring.settled
                if kind == "marks" or complete:
                    table[chunk] = piece
        ring.links.take_changes()
        ring.valid.take_changes()


def _first(piece: Piece) -> int:
    return piece.first
