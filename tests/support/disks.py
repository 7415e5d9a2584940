"""A small file system of a test's own, to be filled."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size (as `512k`) at `folder`; skips the test where that may not be made."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not may_mount() or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def may_mount() -> bool:
    """Whether this user may make a file system; a container may forbid it all the same."""
    return os.geteuid() == 0


def fill(folder: Path) -> Path:
    """Take all the room that is left; returns the file that takes it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast
