"""Files of a run folder that are not what clawq wrote: each told with the file, the place or key in it, and what to do.

    with damaged(path, "Put a copy back."):
        facts = json.loads(path.read_text())
        tag = facts["tag"]

Whatever reading and taking apart raises becomes one error of ours. A file that is not there is left to the caller.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clawq.errors import ClawqError, UserError
from clawq.json_text import parse_json


@contextmanager
def damaged(path: Path, advice: str, kind: type[ClawqError] = UserError) -> Iterator[None]:
    """Raise `kind` instead of what a damaged file makes its reader raise.

    Args:
        path: of the file.
        advice: what to do about it, as a sentence.
        kind: of the error.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or error}. {advice}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ClawqError) as error:
        raise kind(f"{path} is damaged: {_told(error)}. {advice}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; for use under `damaged`."""
    facts = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise TypeError(f"it holds {type(facts).__name__}, where keys and values belong")
    return facts


def _told(error: BaseException) -> str:
    """What is wrong, in one line."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON at line {error.lineno}, column {error.colno} ({error.msg})"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 text at byte {error.start}"
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    if errors := getattr(error, "errors", None):
        # pydantic's: the first of its mistakes, with its place.
        first = errors()[0]
        unknown = "this clawq knows no such setting; another version of it may have written the file"
        return f"{'.'.join(map(str, first['loc']))}: {unknown if first['type'] == 'extra_forbidden' else first['msg']}"
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


__all__ = ["damaged", "read_object"]
