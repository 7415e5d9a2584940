"""The learner's archive: opened before it trains, written beside it.

What stands between a configuration and an `Archiver`: whether there is one, where, and words for people when the folder
cannot be used. Reading a run's log from its folder is here too, for whoever has no learner.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from clawq.errors import ArchiveDamaged, ArchiveUnfit, CodecError, UserError
from clawq.programs.run import Run
from clawq.transport.archive import Archive
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.archiver import Archiver
from clawq.transport.arrears import Arrears
from clawq.transport.books import Books
from clawq.transport.codec import decode
from clawq.transport.keys import ARCHIVE, RunKeys
from clawq.transport.log import RunLog
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.retained import EntryId
from clawq.transport.stream import parse_id
from clawq.transport.tally import Tally


def open_archiver(run: Run, data: Any, say: Callable[[str], None]) -> Archiver | None:
    """The archiver of a run, not started yet; None if the configuration wants none.

    Args:
        run: whose.
        data: client of the data server.
        say: told what a crash or a bad disk cost.

    Raises:
        UserError: the folder cannot be used.
    """
    wanted = run.config.archive
    if not wanted.enabled:
        # The run may have had one until it was resumed: nobody writes it any more, so nobody must wait for it.
        readers = Readers(data, RunKeys(run.tag))
        if any(record.name == ARCHIVE for record in readers.list()):
            readers.leave(ARCHIVE)
        return None
    limits = ArchiveLimits(wanted.segment_bytes, wanted.bytes, wanted.compression == "zstd")
    try:
        writer = ArchiveWriter(run.archive, run.tag, limits)
    except OSError as error:
        raise UserError(
            f"the archive {run.archive} cannot be written: {error.strerror or error}. Choose another folder with "
            "archive.folder=PATH, or go without: archive.enabled=false"
        ) from None
    except ArchiveUnfit as error:
        raise UserError(f"{error}. Choose another folder with archive.folder=PATH.") from None
    for loss in writer.losses:
        say(f"archive: {loss}")
    required = wanted.on_full == "block"
    keys = RunKeys(run.tag)
    reader = StreamReader(data, keys, ARCHIVE, writer.cursors(), required=required)
    books = Books(data, keys, ARCHIVE)
    return Archiver(reader, writer, wanted.on_full, (open_tally(books, writer, run), books))


def open_tally(books: Books, writer: ArchiveWriter, run: Run) -> Tally:
    """What the archive did so far with what the streams hold: as it was published, and as its records tell.

    A process that was killed had written more than it had published, if anything.
    """
    published, cursors = books.read(), writer.cursors()
    positions = published[0] if published else {}
    if any(parse_id(one.at) > parse_id(cursors.get(slot, "0-0")) for slot, one in positions.items()):
        # It is another archive by now: it begins anew.
        published, positions = None, {}
    tally, archive = Tally(published), Archive(run.archive, run.tag)
    for slot, stream in books.streams().items():
        known = positions.get(slot)
        at = parse_id(known.at) if known and known.born == stream.born else (stream.born, 0)
        if published and slot in cursors and parse_id(cursors[slot]) > at:
            found = archive.records(slot, after=at)
            tally.caught_up(slot, stream, (f"{one.record.epoch}-{one.record.seq}" for one in found))
    return tally


def arrears(run: Run, data: Any, seen: Callable[[str], EntryId]) -> Arrears:
    """What only the run's archive has of its streams, if it has one, for a reader that has `seen` of a slot so much."""
    return Arrears(data, RunKeys(run.tag), partial(Archive, run.archive, run.tag), seen)


def newest_version(run: Run) -> int:
    """The newest weights version of which the archive's last fragments tell, 0 if it has none.

    A data server that came back empty has forgotten its versions; the next must be above those that were acted under.
    """
    archive, last = Archive(run.archive, run.tag), dict[str, EntryId]()
    for index in archive.segments:
        # (Last written, last in the order: each segment is opened once.)
        for slot, held in index.summary.slots.items():
            last.pop(slot, None)
            last[slot] = held.newest
    try:
        return max((_version(archive, slot, entry) for slot, entry in last.items()), default=0)
    finally:
        archive.close()


def _version(archive: Archive, slot: str, entry: EntryId) -> int:
    """Of that fragment; 0 if it cannot be read."""
    located = archive.find(slot, *entry)
    try:
        return 0 if located is None else decode(archive.read(located)).meta.weights_version
    except (ArchiveDamaged, CodecError):
        return 0


def open_log(run: Run, data: Any | None) -> RunLog:
    """The log of a run: its streams if a client is given, and its archive if there is one."""
    archive = Archive(run.archive, run.tag) if run.archive.is_dir() else None
    return RunLog(None if data is None else (data, RunKeys(run.tag)), archive)
