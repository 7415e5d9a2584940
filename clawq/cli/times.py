"""Times on the command line: a date and time, or how long ago."""

import re
from datetime import datetime

import click

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def milliseconds(option: str, text: str, now_s: float) -> int:
    """A time on the command line: ISO 8601 (local, unless it names a zone), or how long ago."""
    ago = _AGO.fullmatch(text)
    if ago:
        return int(1000 * (now_s - float(ago[1]) * _UNITS_S[ago[2]]))
    try:
        return int(1000 * datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"--{option}: {text!r} is no time; write 2026-11-29T21:00 or 2026-11-29T21:00:30+01:00, or 15m for a "
            "quarter of an hour ago (s, m, h, d)"
        ) from None


def shown(at_ms: int) -> str:
    """A time in local time, to the millisecond; one that no calendar has, as the number that it is."""
    try:
        return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(at_ms)
