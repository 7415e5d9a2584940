"""What tests may have left behind on this machine: processes by an inherited mark, and shared memory."""

import os
import time
from pathlib import Path

import psutil


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


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def in_use(name: str) -> bool:
    """Whether a living process has that shared memory mapped."""
    path = f"/dev/shm/{name}"
    for process in psutil.process_iter():
        try:
            if any(region.path == path for region in process.memory_maps()):
                return True
        except (psutil.Error, OSError):
            continue
    return False
