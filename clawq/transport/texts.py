"""JSON that somebody else wrote into Redis: whatever is wrong with it is a ValueError, and nothing else."""

import json
from typing import Any


def parse_json(text: bytes | str) -> Any:
    """The value; ValueError if it is none, or if it is nested so deeply that it cannot be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None


__all__ = ["parse_json"]
