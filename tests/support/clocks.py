"""Processes whose wall clock is wrong, or is set while they run, by libfaketime (`apt install libfaketime`)."""

from pathlib import Path


def _library() -> Path | None:
    return next((path for path in sorted(Path("/usr/lib").rglob("libfaketime.so.1"))), None)


def can_shift() -> bool:
    """Whether that library is installed."""
    return _library() is not None


def shifted(seconds: int) -> dict[str, str]:
    """For the environment of a process whose wall clock is so wrong all the time."""
    return {**_base(), "FAKETIME": f"{seconds:+d}s"}


def settable(file: Path) -> dict[str, str]:
    """For the environment of a process whose wall clock is as wrong as the file says (see `set_clock`), at any time."""
    set_clock(file, 0)
    return {**_base(), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_CACHE_DURATION": "1"}


def set_clock(file: Path, seconds: int) -> None:
    """Let it be so wrong within a second."""
    file.write_text(f"{seconds:+d}s\n")


def _base() -> dict[str, str]:
    return {"LD_PRELOAD": str(_library()), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
