"""Files that a run reads back: archive segments and their indexes, snapshots of the ring, schedules."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from clawq.core import Entry
from clawq.errors import ArchiveError, ScheduleInvalid, SnapshotInvalid
from clawq.programs.schedule import end_line, read_schedule
from clawq.replay.rowfile import RowFiles
from clawq.replay.snapshot import Manifest, Owner, load_manifest, manifest_name
from clawq.transport import segment_index, segments

_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_FOLDER = Path(tempfile.mkdtemp(prefix="clawq-fuzz-", dir=_MEMORY))
atexit.register(shutil.rmtree, _FOLDER, True)
_ROWS = RowFiles(_FOLDER, "rows", "0" * 32, "0" * 16, (("obs", "float32", (3,)), ("valid", "bool", ())))
_PIECE = _ROWS.write(0, {"obs": np.ones((4, 3), np.float32), "valid": np.ones(4, np.bool_)})
_GOOD_ROWS = _ROWS.path(_PIECE).read_bytes()
_MANIFEST = Manifest(Owner("hand-1", "0" * 32, "0" * 16), _ROWS.columns, 4, 0, 4, (_PIECE,), ())
_SEGMENT = _FOLDER / "segment-000000000001.clq"


def one_input(data: bytes) -> None:
    """The first byte chooses which file it is."""
    reader = _READERS[(data[0] if data else 0) % len(_READERS)]
    reader(data[1:])


def _segment(data: bytes) -> None:
    _SEGMENT.write_bytes(data)
    segment_index.index_path(_SEGMENT).unlink(missing_ok=True)
    _read_segment()


def _records(data: bytes) -> None:
    """Records behind a good header, their checksums made right."""
    _segment(_HEADER + _resealed(data))


def _header(data: bytes) -> None:
    """A segment whose header has a right checksum."""
    head = segments._SEGMENT_HEAD.pack(b"CLQS", segments.FORMAT, 0, xxhash.xxh3_64_intdigest(data), len(data))
    _segment(head + data)


def _index(data: bytes) -> None:
    """An index whose summary has a right checksum, for a good segment."""
    _SEGMENT.write_bytes(_GOOD_SEGMENT)
    head = segment_index._HEAD.pack(b"CLQI", len(data), xxhash.xxh3_64_intdigest(data))
    segment_index.index_path(_SEGMENT).write_bytes(head + data)
    _read_segment()


def _read_segment() -> None:
    try:
        index = segment_index.open_index(_SEGMENT).with_rows()
        fd = os.open(_SEGMENT, os.O_RDONLY)
        try:
            for record in index.records():
                try:
                    segments.read_payload(fd, record)
                except ArchiveError:
                    continue
        finally:
            os.close(fd)
    except ArchiveError:
        return


def _resealed(data: bytes) -> bytes:
    """The first record with its checksums made right."""
    size = segments._FIELDS.size
    if len(data) < size + 4 or data[:4] != b"CLQR":
        return data
    fields = list(segments._FIELDS.unpack_from(data))
    name = data[size + 4 : size + 4 + fields[3]]
    body = data[size + 4 + len(name) :][: fields[4]]
    fields[-1] = xxhash.xxh3_64_intdigest(body)
    head = segments._FIELDS.pack(*fields)
    return head + segments._CHECK.pack(segments._check(head, name)) + data[size + 4 :]


def _manifest(data: bytes) -> None:
    for name in (manifest_name(4, data), manifest_name(0, data)):
        (_FOLDER / name).write_bytes(data)
        try:
            manifest = load_manifest(_FOLDER, name)
            assert Manifest.decode(manifest.encode()) == manifest
            manifest.files()
        except SnapshotInvalid:
            pass
        finally:
            (_FOLDER / name).unlink()


def _rows(data: bytes) -> None:
    _ROWS.path(_PIECE).write_bytes(data)
    try:
        _ROWS.read(_PIECE)
    except SnapshotInvalid:
        return
    assert data == _GOOD_ROWS


def _schedule(data: bytes) -> None:
    path = _FOLDER / "schedule.log"
    for content in (data, b"clawq-schedule 1 base=0\n" + data + end_line(data)):
        path.write_bytes(content)
        try:
            for _ in read_schedule(path):
                pass
        except ScheduleInvalid:
            continue


_READERS: tuple[Callable[[bytes], None], ...] = (_segment, _records, _header, _index, _manifest, _rows, _schedule)
_HEADER = segments.pack_header(segments.SegmentHeader("0" * 32, 1, 5, cursors={"slot-1": "5-6"}))
_RECORD = segments.pack_record(Entry("slot-1", 5, 7, b"payload " * 40), True, len(_HEADER))[0]
_GOOD_SEGMENT = _HEADER + _RECORD


def seeds() -> list[bytes]:
    """One of each file."""
    _SEGMENT.write_bytes(_GOOD_SEGMENT)
    summary = segment_index.build(_SEGMENT).summary
    lines = b'w 1\np 0\no 0 slot-1 5\nf 0 1\nv 0 3 7 2\nx 0 3 7 2\nu 12\ntune {"set":4}\nsession {"n":1}\n'
    files = (
        _GOOD_SEGMENT, _RECORD, _HEADER[segments._SEGMENT_HEAD.size :], msgspec.msgpack.encode(summary),
        _MANIFEST.encode(), _GOOD_ROWS, lines,
    )  # fmt: skip
    return [bytes([number]) + content for number, content in enumerate(files)]
