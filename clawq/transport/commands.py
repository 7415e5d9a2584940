"""What became of commands that are not tried any more: their attempts are counted, and they are kept for people.

A command that kills the worker that runs it comes back, if it is acknowledged late, and kills the next one, without
end. So each such command is counted under an id of its own before it is begun, and forgotten when it has ended in any
way that a worker lived to see; after `MAX_ATTEMPTS` it is kept here instead. So is what arrives in a queue and is no
command. People look at these with `clawq worker dead`, and give them back or drop them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from clawq.json_text import parse_object
from clawq.transport.client import translated
from clawq.transport.keys import DEAD_COMMANDS_KEY, attempts_key

#: How often a command is begun at most.
MAX_ATTEMPTS = 3
#: A count is forgotten after so long: what is delivered again is so after minutes, seconds.
_ATTEMPTS_TTL_S = 86_400
#: Dead commands that are kept (approximately), and how much of each.
KEPT, _HEAD_BYTES = 1000, 4096


@dataclass(frozen=True, slots=True)
class DeadCommand:
    """A command that is not tried any more.

    Attributes:
        id: of the entry; larger is later.
        reason: `attempts`, `unknown` (the worker had no such task) or `garbage`.
        queue: where it was found.
        task: its name, empty for garbage.
        command: its id, empty for garbage.
        worker: who buried it.
        head: the first bytes of its arguments (`pack_arguments`), or of what arrived.
    """

    id: str
    reason: str
    queue: str
    task: str
    command: str
    worker: str
    head: bytes

    @property
    def buried_ms(self) -> int:
        """When, by the broker's clock."""
        return int(self.id.partition("-")[0])

    def arguments(self) -> tuple[list[Any], dict[str, Any]] | None:
        """What the task was called with; None for garbage, and for more than is kept."""
        try:
            packed = parse_object(self.head)
        except ValueError:
            return None
        args, named = packed.get("args"), packed.get("kwargs")
        return (args, named) if self.task and isinstance(args, list) and isinstance(named, dict) else None


def pack_arguments(args: Sequence[Any], named: Mapping[str, Any]) -> bytes:
    """Arguments of a task as they are kept."""
    return json.dumps({"args": list(args), "kwargs": dict(named)}, default=str).encode()


class Commands:
    """Counts attempts and keeps the dead.

    Args:
        client: of the broker.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client

    def begin(self, command: str) -> int:
        """Count an attempt; returns its number, from 1."""
        key = attempts_key(command)
        with translated(self._client):
            pipe = self._client.pipeline(transaction=True)
            pipe.incr(key)
            pipe.expire(key, _ATTEMPTS_TTL_S)
            return int(pipe.execute()[0])

    def ended(self, command: str) -> None:
        """It has ended, and its worker has not: it may be sent again as if it were new."""
        with translated(self._client):
            self._client.unlink(attempts_key(command))

    def waiting(self, queues: Sequence[str]) -> int:
        """Commands in these lists."""
        with translated(self._client):
            pipe = self._client.pipeline(transaction=False)
            for queue in queues:
                pipe.llen(queue)
            return sum(pipe.execute())

    def bury(self, reason: str, queue: str, head: bytes, worker: str, task: str = "", command: str = "") -> None:
        """Keep one that is not tried any more."""
        facts = {"reason": reason, "queue": queue, "task": task, "command": command, "worker": worker}
        fields: Any = {**facts, "head": head[:_HEAD_BYTES]}
        with translated(self._client):
            self._client.xadd(DEAD_COMMANDS_KEY, fields, maxlen=KEPT, approximate=True)

    def dead(self, count: int = 100) -> list[DeadCommand]:
        """The newest ones, newest first."""
        with translated(self._client):
            entries = self._client.xrevrange(DEAD_COMMANDS_KEY, count=count)
        return [_dead_command(entry_id, fields) for entry_id, fields in entries]

    def drop(self, entry_id: str) -> bool:
        """Keep one no longer; whether it was there."""
        with translated(self._client):
            return bool(self._client.xdel(DEAD_COMMANDS_KEY, entry_id))


def _dead_command(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadCommand:
    texts = {name: fields.get(name.encode(), b"").decode(errors="replace") for name in DeadCommand.__slots__[1:-1]}
    return DeadCommand(entry_id.decode(), **texts, head=fields.get(b"head", b""))


__all__ = ["KEPT", "MAX_ATTEMPTS", "Commands", "DeadCommand", "pack_arguments"]
