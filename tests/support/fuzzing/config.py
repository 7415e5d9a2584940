"""The configuration behind its text: a mapping, as a run record or a run folder has it, or a good one changed.

What begins with a brace is JSON. Other inputs are changes, three bytes or more each: which key, what to do, and the
value, so that every input gets past the reader and most mistakes are of meaning.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

from clawq.config_file import parse_config
from clawq.errors import ConfigError
from clawq.json_text import parse_json
from fuzzing import check_text

SMALL: dict[str, Any] = {"name": "small", "environment": {"name": "point"}}
_GOOD: dict[str, Any] = parse_config(SMALL, "small").model_dump(mode="json")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2.0, 0.5, 1e9, 1e-9, -0.0, 1e308, 2**31, 2**62, 2**63 - 1, 10**400, "", "a", "1",
    "none", "sync", "uniform", "prioritized", "fifo", "td3", "sac", "point", "../x", "/", "\0", "\u2028", "x" * 300, [],
    [1], ["jsonl"], ["jsonl", "jsonl"], [[]], {}, {"a": 1}, float("nan"), "\ud800", {"name": "sac"}, {"options": None},
    {"name": "point", "options": {"a": []}},
)  # fmt: skip


def one_input(data: bytes) -> None:
    """Validate; what is accepted must come back equal from its dump."""
    try:
        raw = parse_json(data) if data[:1] == b"{" else _changed(data)
    except ValueError:
        return
    if not isinstance(raw, dict):
        return
    try:
        config = parse_config(raw, "fuzzed")
    except ConfigError as error:
        check_text(error, 1_000_000)
        return
    assert parse_config(config.model_dump(mode="json"), "dumped") == config


def _changed(data: bytes) -> dict[str, Any]:
    """The good one with the changes that the bytes stand for, twelve at most."""
    raw = copy.deepcopy(_GOOD)
    at = 0
    for _ in range(12):
        if len(data) < at + 3:
            break
        which, what, value = data[at : at + 3]
        at += 3
        path = _PATHS[which % len(_PATHS)]
        if what < 128:
            _put(raw, path, _VALUES[value % len(_VALUES)])
        elif what < 192:
            _put(raw, path, value - 128 if what % 2 else (value - 128) * 10.0 ** (what % 12 - 6))
        elif what < 224:
            length, at = value % 24, at + value % 24
            _put(raw, path, data[at - length : at].decode("latin-1"))
        elif what < 240:
            _put(raw, (*path, f"key{value}"), 1)
        else:
            _put(raw, path, None, gone=True)
    return raw


def _put(raw: dict[str, Any], path: tuple[str, ...], value: Any, gone: bool = False) -> None:
    at: Any = raw
    for part in path[:-1]:
        at = at.get(part) if isinstance(at, dict) else None
    if not isinstance(at, dict):
        return
    if gone:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = copy.deepcopy(value)


def _paths(raw: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in raw.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from _paths(value, (*above, name))


_PATHS = tuple(_paths(_GOOD))


def seeds() -> list[bytes]:
    """Two as JSON, and some changes."""
    changes = (bytes((3, 130, 140)), bytes((40, 5, 7, 80, 129, 200)), bytes((9, 200, 3)) + b"abc", bytes((1, 250, 0)))
    return [*(json.dumps(one).encode() for one in (SMALL, _GOOD)), *changes]
