"""What tests may have left behind on this machine: processes by an inherited mark, and shared memory."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

_SHARED = Path("/dev/shm")


def marked_processes(variable: str, mark: str, ending_s: float) -> list[psutil.Process]:
    """Living processes that inherited the mark; those that are about to end get a few seconds for it."""
    deadline = time.monotonic() + ending_s
    found = [p for p in psutil.process_iter() if _is_marked(p, variable, mark)]
    return psutil.wait_procs(found, max(0.0, deadline - time.monotonic()))[1]


def _is_marked(process: psutil.Process, variable: str, mark: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(variable) == mark
    except psutil.Error:
        return False


def command_line(process: psutil.Process) -> str:
    """For people; `?` of one that is gone."""
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "?"


def shared_memory() -> dict[str, float]:
    """Names in /dev/shm, and the earliest that is known of each, by the wall clock."""
    found = {}
    for path in _SHARED.iterdir() if _SHARED.is_dir() else ():
        with contextlib.suppress(OSError):
            times = path.lstat()
            found[path.name] = min(times.st_atime, times.st_mtime, times.st_ctime)
    return found


def note_shared_memory() -> set[str]:
    """The names in /dev/shm that this process makes as files or folders from now on, for as long as it lives."""
    noted: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            made = arguments[0]
            if isinstance(made, str | os.PathLike) and (path := Path(made)).is_relative_to(_SHARED):
                noted.add(path.relative_to(_SHARED).parts[0])

    sys.addaudithook(note)
    return noted


def in_use(name: str) -> bool:
    """Whether a living process has that shared memory mapped."""
    path = str(_SHARED / name)
    for process in psutil.process_iter():
        try:
            if any(region.path == path for region in process.memory_maps()):
                return True
        except (psutil.Error, OSError):
            continue
    return False
