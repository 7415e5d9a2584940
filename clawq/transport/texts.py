"""Texts that somebody else wrote into Redis, read so that nothing in them can do harm.

Whatever is wrong with one is a ValueError, and nothing else: garbage, JSON that is nested without end, numbers with a
million digits. What becomes of it is for the caller: one of many entries is left out, a record that cannot be done
without is `unreadable`, which whoever reads it waits out as if Redis were away, and says so.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from clawq.errors import RecordUnreadable
from clawq.json_text import LARGEST

T = TypeVar("T")

_WHOLE = re.compile(rb"[0-9]{1,20}")
_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
_SUM = re.compile(rb"-?[0-9]{1,18}")
_SHOWN = 60


def parse_whole(text: bytes | None, absent: int = 0) -> int:
    """The number 0 .. 2^63-1 in digits, `absent` if there is nothing; ValueError otherwise."""
    if text is None:
        return absent
    if not _WHOLE.fullmatch(text) or (number := int(text)) >= LARGEST:
        raise ValueError(f"{shown(text)} is no whole number from 0 on")
    return number


def parse_count(text: bytes | None) -> int:
    """A sum that Redis keeps, which may be below zero; 0 if there is none, or if somebody else wrote there."""
    return int(text) if text and _SUM.fullmatch(text) else 0


def parse_cursors(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Slot -> id of a stream entry; those that are no ids are left out: nothing is known of where they point."""
    return {slot.decode(errors="replace"): one.decode() for slot, one in raw.items() if _ID.fullmatch(one)}


def parse_cursor(raw: Any) -> str | None:
    """The id of a stream entry, None for whatever is none."""
    return raw.decode() if isinstance(raw, bytes) and _ID.fullmatch(raw) else None


def readable(raw: Mapping[bytes, bytes], parse: Callable[[bytes], T]) -> dict[str, T]:
    """Name -> what `parse` makes of the text; entries of which it makes a ValueError are none of ours, and left out."""
    found = {}
    for name, text in raw.items():
        try:
            found[name.decode()] = parse(text)
        except ValueError:
            continue
    return found


def unreadable(what: str, why: object) -> RecordUnreadable:
    """The error for a record that cannot be done without."""
    return RecordUnreadable(
        f"{what} cannot be read: {str(why)[:200]}. Somebody else wrote there; it is read again until it is mended"
    )


def shown(text: object) -> str:
    """A value for an error's text, not longer than a line."""
    # Cut first: the repr of megabytes is megabytes, and that of a number with a million digits is none at all.
    if isinstance(text, bytes | str):
        words = repr(text[: _SHOWN + 1])
    elif isinstance(text, int) and abs(text) >= 2 * LARGEST:
        words = "a number beyond 2^64"
    elif text is None or isinstance(text, int | float):
        words = repr(text)
    else:
        words = f"a {type(text).__name__}"
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


__all__ = ["parse_count", "parse_cursor", "parse_cursors", "parse_whole", "readable", "shown", "unreadable"]
