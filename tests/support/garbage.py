"""What may lie in a Celery queue without being a command: bytes, JSON of any kind, messages with something wrong."""

import base64
import copy
import json
from typing import Any

_WHOLE: dict[str, Any] = {
    "body": [[], {}, None],
    "content-encoding": "utf-8",
    "content-type": "application/json",
    "headers": {"task": "clawq.rollout", "id": "7e57", "root_id": "7e57", "timelimit": [None, None], "retries": 0},
    "properties": {
        "delivery_tag": "7e57",
        "delivery_info": {"exchange": "", "routing_key": "clawq"},
        "body_encoding": "base64",
        "priority": 0,
    },
}
#: Where a whole message has something that Celery cannot take, and what. Each of them ends a worker of Celery's own, or
#: its connection.
_WRONG: tuple[tuple[str, Any], ...] = (
    ("headers.task", ["clawq.rollout"]),
    ("headers.task", "\ud800"),
    ("headers.stamped_headers", 7),
    ("headers.stamps", 7),
    ("headers.id", {"a": 1}),
    ("headers.timelimit", 7),
    ("headers.timelimit", [1, 2, 3]),
    ("headers.timelimit", [None, -1]),
    ("headers.timelimit", [float("nan"), None]),
    ("headers.root_id", ["x"]),
    ("headers.eta", 1e308),
    ("headers", [1]),
    ("headers.compression", "application/x-gzip"),
    ("properties.delivery_tag", ["x"]),
    ("properties.delivery_tag", None),
    ("properties.delivery_info", {"routing_key": "clawq"}),
    ("properties.delivery_info", {"exchange": {}, "routing_key": []}),
    ("properties.delivery_info", 3),
    ("properties.body_encoding", "rot13"),
    ("properties.priority", "high"),
    ("content-type", "application/x-python-serialize"),
    ("content-type", ["application/json"]),
    ("body", {"args": [], "kwargs": {}}),
    ("body", "text"),
    ("body", [1, 2]),
    ("body", [[], [], None]),
    ("body", [[], {}, 7]),
)


def message(where: str = "", wrong: Any = None) -> bytes:
    """A whole message, but for what is wrong at a dotted path of it."""
    found = copy.deepcopy(_WHOLE)
    *path, last = where.split(".")
    at = found
    for name in path:
        at = at[name]
    if where:
        at[last] = wrong
    found["body"] = base64.b64encode(json.dumps(found["body"]).encode()).decode()
    return json.dumps(found).encode()


GARBAGE = (
    b"\xff\xfe\x00",
    b"no json",
    b'{"body": "e30=", "headers',
    b"null",
    b"7",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"properties": {}}',
    b'{"properties": {"delivery_tag": "x", "body_encoding": "base64"}, "body": "!", "headers": {}}',
    b'{"properties": {"delivery_tag": "x"}, "headers": {"task": "clawq.rollout"}}',
    b'{"properties": {"delivery_tag": "x"}, "headers": 3}',
    *(message(where, wrong) for where, wrong in _WRONG),
)
