"""JSON that somebody else may have written, in Redis or in a file: whatever is wrong with it is a ValueError."""

import json
from typing import Any

#: Whole numbers are below this; Redis itself counts no further.
LARGEST = 2**63


def parse_json(text: bytes | str) -> Any:
    """The value; ValueError if it is none, or if it is nested so deeply that it cannot be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None
    except UnicodeDecodeError as error:
        # That error shows all the bytes.
        raise ValueError(f"no UTF-8 text (byte {error.start})") from None


def parse_object(text: bytes | str) -> dict[str, Any]:
    """The JSON object; ValueError for whatever is none."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def is_whole(value: Any) -> bool:
    """Whether a value of JSON is a whole number 0 .. 2^63-1."""
    return type(value) is int and 0 <= value < LARGEST


__all__ = ["LARGEST", "is_whole", "parse_json", "parse_object"]
