"""Segment files: the archive's bytes on disk. Append-only records, each with checksums of its own.

A segment is a head, then records until its end (little endian):

    0   magic     4 bytes, "CLQS"
    4   format    u16, FORMAT
    6   zero      u16
    8   checksum  u64, XXH3-64 of the header
    16  length    u32, of the header; then the header itself: msgpack
    ..  records

    record: magic "CLQR", codec u8, zero u8, length of the slot's name u16, stored u32, size u32, epoch u64, seq u64,
            made_ms i64, steps u32, checksum of the body u64, checksum of all this and the name u32; name; body

`size` is the payload's length, `stored` the body's: the two differ where the body is compressed (codec 1, zstd). The
payload is the fragment as it travelled, so it is decoded and checked as if it came from the streams.

Two checksums, so that damage stays small: with a bad body the head still says which fragment was lost and where the
next record begins; with a bad head the next good one is looked for by its magic. What this module does not do: files
that belong together, bounds and cursors (`archive`), indexes on disk (`segment_index`).
"""

import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from clawq.core import Entry
from clawq.errors import ArchiveDamaged, ArchiveUnfit, CodecError
from clawq.transport.codec import peek_meta

if sys.version_info >= (3, 14):  # pragma: no cover
    from compression import zstd
else:
    # The standard library's module of 3.14, for older Pythons: the same names, and it goes away by itself.
    from backports import zstd

#: Grows when a reader of the old layout could not read the new one.
FORMAT = 1
#: Longest payload kept whole. Fragments are far shorter; what is longer is none, and its beginning proves that too.
MAX_PAYLOAD_BYTES = 16_000_000
#: zstd's quickest level that finds structure in float columns at all.
LEVEL = 1
#: Compressed bodies must save at least this share, else the payload is stored as it is: reading raw costs nothing.
LEAST_SAVING = 0.05
RAW, ZSTD = 0, 1

_SEGMENT_MAGIC, _RECORD_MAGIC = b"CLQS", b"CLQR"
_SEGMENT_HEAD = struct.Struct("<4sHHQI")
_FIELDS = struct.Struct("<4sBBHIIQQqIQ")
_CHECK = struct.Struct("<I")
_HEAD_BYTES = _FIELDS.size + _CHECK.size
_MAX_NAME_BYTES = 128
_MAX_HEADER_BYTES = 64_000_000
_SEARCH_BYTES = 1 << 20


class SegmentHeader(msgspec.Struct, forbid_unknown_fields=True):
    """What a segment says of itself.

    Attributes:
        tag: of the run.
        number: 1, 2, 3 ... in the order of writing; never used again.
        created_ms: wall clock of the writer, for people.
        entries_before: records written to all earlier segments, whether those are still kept or not.
        bytes_before: their payload bytes.
        cursors: slot -> id of the last entry in an earlier segment.
    """

    tag: str
    number: int
    created_ms: int
    entries_before: int = 0
    bytes_before: int = 0
    cursors: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Record:
    """Where a fragment lies in a segment, and what its head says.

    Attributes:
        slot, epoch, seq: which entry of the streams it was.
        made_ms: `created_ms` of the fragment, 0 where its header cannot be read.
        steps: env steps T·N of the fragment, 0 where its header cannot be read.
        offset: of the record in its file.
        size: bytes of the payload.
        stored: bytes of the body.
        codec: RAW or ZSTD.
        checksum: XXH3-64 of the body.
    """

    slot: str
    epoch: int
    seq: int
    made_ms: int
    steps: int
    offset: int
    size: int
    stored: int
    codec: int
    checksum: int

    @property
    def body(self) -> int:
        """Offset of the body."""
        return self.offset + _HEAD_BYTES + len(self.slot.encode())

    @property
    def end(self) -> int:
        """Offset of whatever follows."""
        return self.body + self.stored

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.slot} {self.epoch}-{self.seq}"


def pack_header(header: SegmentHeader) -> bytes:
    """The head of a segment file."""
    text = msgspec.msgpack.encode(header)
    return _SEGMENT_HEAD.pack(_SEGMENT_MAGIC, FORMAT, 0, xxhash.xxh3_64_intdigest(text), len(text)) + text


def read_header(path: Path) -> tuple[SegmentHeader, int]:
    """The header of a segment file, and where its records begin.

    Raises:
        ArchiveUnfit: written by another version of clawq.
        ArchiveDamaged: it does not begin as a segment.
    """
    with path.open("rb") as file:
        head = file.read(_SEGMENT_HEAD.size)
        if len(head) < _SEGMENT_HEAD.size or head[:4] != _SEGMENT_MAGIC:
            raise ArchiveDamaged(f"{path}: it does not begin as a segment")
        _, version, _, checksum, length = _SEGMENT_HEAD.unpack(head)
        if version != FORMAT:
            raise ArchiveUnfit(f"{path}: format {version}; this clawq reads format {FORMAT}")
        text = file.read(min(length, _MAX_HEADER_BYTES))
    if len(text) != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise ArchiveDamaged(f"{path}: its header is damaged")
    try:
        return msgspec.msgpack.decode(text, type=SegmentHeader), _SEGMENT_HEAD.size + length
    except msgspec.MsgspecError as error:
        raise ArchiveDamaged(f"{path}: its header cannot be read: {error}") from None


def pack_record(entry: Entry, compress: bool, offset: int) -> tuple[bytes, Record]:
    """An entry as the bytes of a record, and the record that they make at that offset."""
    payload = entry.payload[:MAX_PAYLOAD_BYTES]
    try:
        meta = peek_meta(payload)
        made_ms, steps = meta.created_ms, min(meta.steps * meta.envs, 2**32 - 1)
    except CodecError:
        made_ms = steps = 0
    body, codec = (_compressed(payload) if compress else None), ZSTD
    if body is None:
        body, codec = payload, RAW
    name, checksum = entry.slot.encode(), xxhash.xxh3_64_intdigest(body)
    head = _FIELDS.pack(
        _RECORD_MAGIC, codec, 0, len(name), len(body), len(payload), entry.epoch, entry.seq, made_ms, steps, checksum
    )
    record = Record(
        entry.slot, entry.epoch, entry.seq, made_ms, steps, offset, len(payload), len(body), codec, checksum
    )
    return b"".join((head, _CHECK.pack(_check(head, name)), name, body)), record


def _compressed(payload: bytes) -> bytes | None:
    """The payload smaller, None if that is not worth it."""
    if not payload:
        return None
    body: bytes = zstd.compress(payload, LEVEL)
    return body if len(body) <= (1 - LEAST_SAVING) * len(payload) else None


def _check(head: bytes, name: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(head + name)) & 0xFFFFFFFF


def read_record(fd: int, offset: int) -> Record | None:
    """The record whose head stands at that offset, None if no good one does."""
    head = os.pread(fd, _HEAD_BYTES + _MAX_NAME_BYTES, offset)
    if len(head) < _HEAD_BYTES or head[:4] != _RECORD_MAGIC:
        return None
    fields: tuple[Any, ...] = _FIELDS.unpack_from(head)
    _, codec, _, length, stored, size, epoch, seq, made_ms, steps, checksum = fields
    name = head[_HEAD_BYTES : _HEAD_BYTES + length]
    if (
        length > _MAX_NAME_BYTES
        or len(name) != length
        or _CHECK.unpack_from(head, _FIELDS.size)[0] != _check(head[: _FIELDS.size], name)
    ):
        return None
    try:
        slot = name.decode()
    except UnicodeDecodeError:
        return None
    return Record(slot, epoch, seq, made_ms, steps, offset, size, stored, codec, checksum)


def read_payload(fd: int, record: Record) -> bytes:
    """The payload of a record.

    Raises:
        ArchiveDamaged: its bytes are not what was written.
    """
    body = os.pread(fd, record.stored, record.body)
    if len(body) != record.stored or xxhash.xxh3_64_intdigest(body) != record.checksum:
        raise ArchiveDamaged(f"fragment {record.name}: its record is damaged (at byte {record.offset})")
    if record.codec == RAW:
        return body
    try:
        # The size is bounded by what we write; a body that claims less than it holds is no body of ours.
        payload: bytes = zstd.ZstdDecompressor().decompress(body, min(record.size, MAX_PAYLOAD_BYTES) + 1)
    except zstd.ZstdError as error:
        raise ArchiveDamaged(f"fragment {record.name}: cannot be decompressed: {error}") from None
    if len(payload) != record.size:
        raise ArchiveDamaged(f"fragment {record.name}: it has {len(payload)} bytes and not {record.size}")
    return payload


@dataclass(slots=True)
class Scan:
    """What a segment file holds.

    Attributes:
        records: the good ones, in the order of the file.
        losses: what is damaged, in words.
        end: where the last good record ends; what follows is torn, or still being written.
        size: of the file.
    """

    records: list[Record] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    end: int = 0
    size: int = 0


def scan(path: Path, start: int, verify: bool) -> Scan:
    """Read a segment from its first record to its end.

    Args:
        path: the file.
        start: where the records begin.
        verify: read the bodies too; else only heads are looked at.
    """
    found = Scan(end=start)
    fd = os.open(path, os.O_RDONLY)
    try:
        found.size = os.fstat(fd).st_size
        last = start
        for record in _records(fd, start, found.size):
            if record.offset > last:
                found.losses.append(f"{path.name}: {record.offset - last} bytes at {last} are damaged")
            last = record.end
            if verify and (loss := _fault(fd, record)):
                found.losses.append(f"{path.name}: {loss}")
                continue
            found.records.append(record)
            found.end = record.end
    finally:
        os.close(fd)
    # Losses after the last good record are the torn tail, which `end` tells.
    return found


def _fault(fd: int, record: Record) -> str | None:
    try:
        read_payload(fd, record)
    except ArchiveDamaged as error:
        return str(error)
    return None


def _records(fd: int, start: int, size: int) -> Iterator[Record]:
    """Records whose heads are good and that are whole, in order; goes on behind damaged bytes."""
    at: int | None = start
    while at is not None and at < size:
        record = read_record(fd, at)
        if record is not None and record.end <= size:
            yield record
            at = record.end
        else:
            at = _next_magic(fd, at + 1)


def _next_magic(fd: int, offset: int) -> int | None:
    """Where the next record may begin, None if nowhere."""
    while chunk := os.pread(fd, _SEARCH_BYTES, offset):
        at = chunk.find(_RECORD_MAGIC)
        if at >= 0:
            return offset + at
        if len(chunk) < len(_RECORD_MAGIC):
            return None
        offset += max(1, len(chunk) - len(_RECORD_MAGIC) + 1)
    return None
