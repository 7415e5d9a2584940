"""What an entry of a queue must be for Celery to take it: a message of its protocol 2, with a body that is a call.

Celery takes these types for granted; an entry that has others ends the worker that reads it, comes back, and ends the
next one. So they are looked at before Celery sees them.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from kombu.exceptions import ContentDisallowed, DecodeError

from clawq.control.queues import COMMAND_HEADER
from clawq.json_text import parse_json


@dataclass(frozen=True, slots=True)
class Call:
    """A task and what it is called with.

    Attributes:
        task: its full name.
        command: the command's own id, or the best that Celery has.
        args: by position.
        named: by name.
    """

    task: str
    command: str
    args: list[Any]
    named: dict[str, Any]


_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Headers(msgspec.Struct, rename={"command": COMMAND_HEADER}):
    task: str
    id: str
    root_id: str | None = None
    parent_id: str | None = None
    shadow: str | None = None
    eta: str | None = None
    expires: str | None = None
    argsrepr: str | None = None
    kwargsrepr: str | None = None
    timelimit: tuple[_Seconds | None, _Seconds | None] | None = None
    retries: int | None = None
    replaced_task_nesting: int | None = None
    stamped_headers: list[str] | None = None
    stamps: dict[str, Any] | None = None
    command: str | None = None
    #: What is packed may unpack to more than there is memory.
    compression: None = None


class _Delivery(msgspec.Struct):
    exchange: str
    routing_key: str


class _Properties(msgspec.Struct):
    delivery_tag: str
    delivery_info: _Delivery
    correlation_id: str | None = None
    reply_to: str | None = None
    priority: int | None = None


class _Message(msgspec.Struct):
    headers: _Headers
    properties: _Properties


#: Nothing else is unpacked.
_JSON = frozenset({"application/json"})
#: What msgspec and kombu raise, beside what is in a program's own reach, for bodies in words that they do not know.
_UNREADABLE = (msgspec.ValidationError, DecodeError, ContentDisallowed)
#: Positional arguments, named ones, and what follows upon the task.
_Body = tuple[list[Any], dict[str, Any], dict[str, Any] | None]


def parse_message(raw: bytes, channel: Any) -> tuple[dict[str, Any], Call]:
    """The message as kombu delivers it, and the call that it is.

    Args:
        raw: an entry of a queue.
        channel: kombu's, which knows how bodies are packed.

    Raises:
        ValueError: it is none that Celery could take.
    """
    message = parse_json(raw)
    try:
        # Half a character of JSON (a lone surrogate) is none that could be written to Redis again.
        json.dumps(message, ensure_ascii=False).encode()
        known = msgspec.convert(message, _Message)
        args, named, _ = msgspec.convert(channel.Message(message, channel=channel, accept=_JSON).payload, _Body)
    except (*_UNREADABLE, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(str(error)) from error
    headers = known.headers
    return message, Call(headers.task, headers.command or headers.root_id or headers.id, args, named)


__all__ = ["Call", "parse_message"]
