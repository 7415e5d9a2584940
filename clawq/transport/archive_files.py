"""What the archive's writer needs of a file system: a lock, whole writes, folders that last."""

import fcntl
import logging
import os
from pathlib import Path

from clawq.errors import ArchiveUnfit

log = logging.getLogger(__name__)


def locked(folder: Path) -> int:
    """A lock on the folder that ends with its holder."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ArchiveUnfit(f"the archive {folder} is being written by another learner") from None
    except OSError:
        log.warning("%s is on a file system without locks; make sure that it has only one learner", folder)
    return lock


def write_all(fd: int, content: bytes, offset: int) -> None:
    """Write all of it at that offset. OSError if the disk refuses; then some of it may be there."""
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Make new and renamed files of a folder last."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
