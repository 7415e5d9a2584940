"""What the archive's writer needs of a file system: a lock, whole writes, folders that last."""

import os
from pathlib import Path
from typing import IO

from clawq.errors import ArchiveUnfit
from clawq.state import hold


def locked(folder: Path) -> IO[str]:
    """A lock on the folder that ends with its holder. Raises ArchiveUnfit if somebody else holds it."""
    lock = hold(folder / "lock")
    if lock is None:
        raise ArchiveUnfit(f"the archive {folder} is being written by another learner")
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
