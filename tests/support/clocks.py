"""Processes whose wall clock is wrong.

Of our own programs by `chaos/site` (Python's `time.time`: under libfaketime `time.sleep` of Python 3.11 fails); of a
Redis by libfaketime (`apt install libfaketime`), which can set it while the server runs.
"""

import os
from pathlib import Path

#: Goes before everything else in PYTHONPATH: its sitecustomize reads CLAWQ_CHAOS_*.
SITE = Path(__file__).parent / "chaos" / "site"
_SHARED = Path("/dev/shm")


def with_site(**env: str) -> dict[str, str]:
    """For the environment of one of our programs that shall heed these variables."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))), **env}


def shifted(seconds: int) -> dict[str, str]:
    """For the environment of one of our programs whose wall clock is so wrong all the time."""
    return with_site(CLAWQ_CHAOS_CLOCK=str(seconds))


def can_set() -> bool:
    """Whether a server's clock can be set here."""
    return _library() is not None


def settable(file: Path) -> dict[str, str]:
    """For the environment of a server whose wall clock is as wrong as the file says (see `set_clock`), at any time."""
    set_clock(file, 0)
    wrong = {"FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(_library()), **wrong}


def set_clock(file: Path, seconds: int) -> None:
    """Let it be so wrong within a second."""
    file.write_text(f"{seconds:+d}s\n")


def tidy(pid: int) -> None:
    """Take away the shared memory that libfaketime leaves of a process that was killed."""
    for path in _SHARED.glob(f"*faketime_*_{pid}"):
        path.unlink(missing_ok=True)


def _library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").rglob("libfaketime.so.1"))), None)
