"""Files that a run reads back: archive segments and their indexes, snapshots of the ring, schedules."""

import os
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

_HEADER = segments.pack_header(segments.SegmentHeader("0" * 32, 1, 5, cursors={"slot-1": "5-6"}))
_RECORD = segments.pack_record(Entry("slot-1", 5, 7, b"payload " * 40), True, len(_HEADER))[0]
_GOOD_SEGMENT = _HEADER + _RECORD


class Files:
    """The target. It writes what it is given into a folder that is its caller's, and reads it from there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._segment_file = folder, folder / "segment-000000000001.clq"
        columns = (("obs", "float32", (3,)), ("valid", "bool", ()))
        self._row_files = RowFiles(folder, "rows", "0" * 32, "0" * 16, columns)
        self._piece = self._row_files.write(0, {"obs": np.ones((4, 3), np.float32), "valid": np.ones(4, np.bool_)})
        self._good_rows = self._row_files.path(self._piece).read_bytes()
        owner = Owner("hand-1", "0" * 32, "0" * 16)
        self._good_manifest = Manifest(owner, self._row_files.columns, 4, 0, 4, (self._piece,), ())
        self._readers: tuple[Callable[[bytes], None], ...] = (
            self._segment, self._records, self._header, self._index, self._manifest, self._rows, self._schedule,
        )  # fmt: skip

    def one_input(self, data: bytes) -> None:
        """The first byte chooses which file it is."""
        reader = self._readers[(data[0] if data else 0) % len(self._readers)]
        reader(data[1:])

    def seeds(self) -> list[bytes]:
        """One of each file."""
        self._segment_file.write_bytes(_GOOD_SEGMENT)
        summary = segment_index.build(self._segment_file).summary
        lines = b'w 1\np 0\no 0 slot-1 5\nf 0 1\nv 0 3 7 2\nx 0 3 7 2\nu 12\ntune {"set":4}\nsession {"n":1}\n'
        files = (
            _GOOD_SEGMENT, _RECORD, _HEADER[segments._SEGMENT_HEAD.size :], msgspec.msgpack.encode(summary),
            self._good_manifest.encode(), self._good_rows, lines,
        )  # fmt: skip
        return [bytes([number]) + content for number, content in enumerate(files)]

    def _segment(self, data: bytes) -> None:
        self._segment_file.write_bytes(data)
        segment_index.index_path(self._segment_file).unlink(missing_ok=True)
        _read_segment(self._segment_file)

    def _records(self, data: bytes) -> None:
        """Records behind a good header, their checksums made right."""
        self._segment(_HEADER + _resealed(data))

    def _header(self, data: bytes) -> None:
        """A segment whose header has a right checksum."""
        head = segments._SEGMENT_HEAD.pack(b"CLQS", segments.FORMAT, 0, xxhash.xxh3_64_intdigest(data), len(data))
        self._segment(head + data)

    def _index(self, data: bytes) -> None:
        """An index whose summary has a right checksum, for a good segment."""
        self._segment_file.write_bytes(_GOOD_SEGMENT)
        head = segment_index._HEAD.pack(b"CLQI", len(data), xxhash.xxh3_64_intdigest(data))
        segment_index.index_path(self._segment_file).write_bytes(head + data)
        _read_segment(self._segment_file)

    def _manifest(self, data: bytes) -> None:
        for name in (manifest_name(4, data), manifest_name(0, data)):
            (self._folder / name).write_bytes(data)
            try:
                manifest = load_manifest(self._folder, name)
                assert Manifest.decode(manifest.encode()) == manifest
                manifest.files()
            except SnapshotInvalid:
                pass
            finally:
                (self._folder / name).unlink()

    def _rows(self, data: bytes) -> None:
        self._row_files.path(self._piece).write_bytes(data)
        try:
            self._row_files.read(self._piece)
        except SnapshotInvalid:
            return
        assert data == self._good_rows

    def _schedule(self, data: bytes) -> None:
        path = self._folder / "schedule.log"
        for content in (data, b"clawq-schedule 1 base=0\n" + data + end_line(data)):
            path.write_bytes(content)
            try:
                for _ in read_schedule(path):
                    pass
            except ScheduleInvalid:
                continue


def _read_segment(path: Path) -> None:
    try:
        index = segment_index.open_index(path).with_rows()
        fd = os.open(path, os.O_RDONLY)
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
