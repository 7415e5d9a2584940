"""Which processes outlived the one that started them."""

import time
from collections.abc import Iterable

import psutil

#: Between two looks, seconds.
_LOOK_S = 0.02


def outliving(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended within `timeout_s`.

    One that is dead and that only init has yet to reap has ended: how soon init does that is the machine's affair.
    One that a process of ours left unreaped has not.
    """
    deadline = time.monotonic() + timeout_s
    left = list(processes)
    while left := [process for process in left if not _ended(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_S)
    return left


def _ended(process: psutil.Process) -> bool:
    try:
        if not process.is_running():
            return True
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() == 1
    except psutil.NoSuchProcess:
        return True
