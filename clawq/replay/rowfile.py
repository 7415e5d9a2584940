"""Files of consecutive ring rows: whole or not at all, checked by a digest, memory-mapped when they are read.

    rows-000000065536-6f1d2c5e9b0a7d31.bin
    └ kind └ position of the first row  └ first half of the digest

A line of text, padded to 4096 bytes (format, kind, run tag, spec, digest of the columns, first row, number of rows,
XXH3-128 of what follows), then the columns, one after another, each beginning at a multiple of 64 bytes. How large the
ring is does not matter to a file.

A file is named by what is in it. So it is never changed, the same content is written once, and what a run wrote after
it was set back to an older checkpoint never takes the place of what a newer checkpoint refers to. Files are written to
a `.tmp` file, fsynced and renamed; a crash or a full disk leaves all others as they were.
"""

import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from clawq.errors import SnapshotInvalid
from clawq.types import Array

FORMAT = 1
_MAGIC = "clawq-ring-rows"
_HEADER_BYTES, _ALIGN = 4096, 64
#: Columns of a file: name, dtype, shape of one row.
Columns = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A file as others refer to it: where its rows lie in the ring's history, and what is in it.

    Attributes:
        first: position of its first row.
        count: how many rows.
        digest: XXH3-128 of its columns, hex.
    """

    first: int
    count: int
    digest: str

    @property
    def end(self) -> int:
        """Position behind its last row."""
        return self.first + self.count

    def name(self, kind: str) -> str:
        """Of its file."""
        return f"{kind}-{self.first:012d}-{self.digest[:16]}.bin"


@dataclass(frozen=True, slots=True)
class RowFiles:
    """The files of one kind in a folder.

    Attributes:
        folder: made on the first write.
        kind: a word, the beginning of the files' names.
        tag: of the run.
        spec: fingerprint of its environment's spec.
        columns: what a row consists of.
    """

    folder: Path
    kind: str
    tag: str
    spec: str
    columns: Columns

    def path(self, piece: Piece) -> Path:
        """Where a piece is."""
        return self.folder / piece.name(self.kind)

    def write(self, first: int, arrays: Mapping[str, Array], there: Container[str] = ()) -> Piece:
        """Write rows.

        Args:
            first: position of the first row.
            arrays: column name -> [R, ...].
            there: names of files that are known to be whole; they are not written again.

        Raises:
            OSError: the file system refused; nothing is left of the new file.
        """
        body = [np.ascontiguousarray(arrays[name], dtype) for name, dtype, _ in self.columns]
        hashed = xxhash.xxh3_128()
        for part in _padded(body):
            hashed.update(part)
        piece = Piece(first, len(body[0]), hashed.hexdigest())
        if piece.name(self.kind) not in there:
            write_whole(self.path(piece), [self._header(piece), *_padded(body)])
        return piece

    def read(self, piece: Piece) -> dict[str, Array]:
        """Map a file: column name -> [R, ...], read-only; pages are read when they are used.

        Raises:
            SnapshotInvalid: missing, damaged, or not what `piece` says.
        """
        path = self.path(piece)
        try:
            mapped = np.memmap(path, np.uint8, "r")
            line = bytes(mapped[:_HEADER_BYTES])
        except (OSError, ValueError) as error:
            raise SnapshotInvalid(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if line != self._header(piece):
            raise SnapshotInvalid(f"{path}: {self._wrong_header(line)}")
        offsets, size = _offsets(self.columns, piece.count)
        body = mapped[_HEADER_BYTES:]
        if len(body) != size:
            raise SnapshotInvalid(f"{path}: damaged: {len(body)} bytes of {size}")
        if xxhash.xxh3_128_hexdigest(body.data) != piece.digest:
            raise SnapshotInvalid(f"{path}: damaged: the digest is wrong")
        return {
            name: body[at : at + piece.count * _row_bytes(dtype, shape)].view(dtype).reshape(piece.count, *shape)
            for (name, dtype, shape), at in zip(self.columns, offsets, strict=True)
        }

    def _header(self, piece: Piece) -> bytes:
        line = (
            f"{_MAGIC} {FORMAT} kind={self.kind} run={self.tag} spec={self.spec} "
            f"columns={columns_digest(self.columns)} first={piece.first} rows={piece.count} xxh3={piece.digest}"
        )
        return line.encode("ascii").ljust(_HEADER_BYTES - 1) + b"\n"

    def _wrong_header(self, line: bytes) -> str:
        """Why a first line is not the one that was expected."""
        words = line.decode("ascii", "replace").split()
        if words[:1] != [_MAGIC] or len(words) < 2:
            return "not a file of ring rows, or its first line is damaged"
        if words[1] != str(FORMAT):
            return f"format {words[1]}; this clawq reads format {FORMAT}"
        if f"run={self.tag}" not in words:
            return "of another run"
        if f"spec={self.spec}" not in words:
            return "of another environment spec"
        if f"columns={columns_digest(self.columns)}" not in words:
            return "of rows with other columns"
        return "damaged: its first line is not the one that was written"


def columns_digest(columns: Columns) -> str:
    """A short name for a layout."""
    return hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).hexdigest()


def row_bytes(columns: Columns) -> int:
    """Bytes of one row."""
    return sum(_row_bytes(dtype, shape) for _, dtype, shape in columns)


def write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write, fsync, rename, fsync the folder, which is made if it is missing; on failure nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    try:
        with partial.open("wb", buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), memoryview(part))
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with _opened(path.parent) as folder:
        os.fsync(folder)


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _offsets(columns: Columns, count: int) -> tuple[list[int], int]:
    """Where each column begins behind the header, and where the last one ends."""
    offsets, at = [], 0
    for _, dtype, shape in columns:
        offsets.append(at)
        at += -(-count * _row_bytes(dtype, shape) // _ALIGN) * _ALIGN
    return offsets, at


def _padded(body: Sequence[Array]) -> Iterator[memoryview]:
    """The bytes of all columns, with zeros between them."""
    for column in body:
        yield column.reshape(-1).view(np.uint8).data
        if spare := -column.nbytes % _ALIGN:
            yield memoryview(bytes(spare))
