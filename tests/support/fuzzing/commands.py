"""Entries of a Celery queue: what is taken for a message, Celery's own request can be made of."""

import base64
import json
from typing import Any

from celery import Celery
from celery.exceptions import InvalidTaskError
from celery.worker.request import Request
from garbage import GARBAGE, message
from kombu.transport.redis import Channel

from clawq.control.messages import parse_message
from fuzzing import check_text

_NAME = "clawq.rollout"
_APP: Any = Celery("fuzzed", set_as_current=False)


@_APP.task(name=_NAME, shared=False)  # type: ignore[untyped-decorator]
def _rollout(*args: Any, **named: Any) -> None: ...


class _Decoding(Channel):
    """As a channel decodes bodies, without a connection."""

    def __init__(self) -> None: ...


def one_input(data: bytes) -> None:
    """Parse it, as it is and as the body of a good one, and let Celery have what is accepted."""
    _take(data)
    whole = json.loads(message())
    whole["body"] = base64.b64encode(data).decode()
    _take(json.dumps(whole).encode())


def _take(raw: bytes) -> None:
    channel: Any = _Decoding()
    try:
        found, call = parse_message(raw, channel)
    except ValueError as error:
        check_text(error, 100_000)
        return
    if call.task != _NAME:
        return
    made = channel.Message(found, channel=channel)
    try:
        request = Request(made, app=_APP, task=_rollout, hostname="fuzzed")
    except InvalidTaskError:
        return  # Celery says so, and goes on
    assert (request.id, request.args, request.kwargs) == (found["headers"]["id"], call.args, call.named)
    assert isinstance(hash(made.delivery_tag), int)
    soft, hard = request.time_limits
    assert all(limit is None or limit >= 0 for limit in (soft, hard))


def seeds() -> list[bytes]:
    """Good ones, and what is wrong in one place."""
    return [message(), message("body", [[1], {"a": 2}, None]), message("headers.eta", "2026-11-30T10:00:00"), *GARBAGE]
