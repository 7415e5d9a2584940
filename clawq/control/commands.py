"""How a worker takes commands off the broker: what it cannot run, or kills worker after worker, is set aside.

`SturdyTransport` is kombu's Redis transport with one difference: an entry of a queue that is no message (garbage, half
a message), or names a task that this worker does not have, is logged and kept as a dead command
(clawq.transport.commands). kombu and Celery let the worker die of the one, so that a handful of such entries would end
all workers, and throw the other away.

`CountedRequest` is Celery's request with one difference: a command that is acknowledged late is counted when it is
begun, and set aside after three attempts whose end no worker lived to see. Celery has no bound of its own: a task that
kills its worker is delivered again for ever.
"""

import logging
from functools import cache
from queue import Empty
from typing import Any

from celery import current_app
from celery.worker.request import Request
from celery.worker.state import task_ready
from kombu.transport.redis import Channel, Transport

from clawq.control import pool_process
from clawq.control.messages import parse_message
from clawq.control.queues import COMMAND_HEADER
from clawq.errors import TransportError
from clawq.json_text import parse_json
from clawq.transport.client import connect
from clawq.transport.commands import MAX_ATTEMPTS, Commands, pack_arguments
from clawq.transport.keys import QUEUE

log = logging.getLogger(__name__)

#: How queues end in which whoever asks workers by remote control (`celery inspect`) finds their answers.
_ANSWERS = ".reply.celery.pidbox"


class SturdyChannel(Channel):
    """A channel that outlives whatever is in a queue."""

    def _brpop_read(self, **options: Any) -> bool:
        """As in kombu 5.7, but that it looks at what came before it hands it on."""
        # kombu is half typed.
        channel: Any = self
        try:
            try:
                found = channel.client.parse_response(channel.client.connection, "BRPOP", **options)
            except channel.connection_errors:
                channel.client.connection.disconnect()
                raise
            if not found:
                raise Empty
            queue = _text(found[0]).rsplit(channel.sep, 1)[0]
            channel._queue_cycle.rotate(queue)
            message = self._message(bytes(found[1]), queue)
            if message is not None:
                channel.connection._deliver(message, queue)
            return True
        finally:
            channel._in_poll = None
            channel._flush_brpop_reauth()

    def _message(self, raw: bytes, queue: str) -> dict[str, Any] | None:
        """The entry, parsed; None if it was set aside."""
        # (A run may be called like that, too.)
        if queue.endswith(_ANSWERS) and not queue.startswith(f"{QUEUE}."):
            answer: dict[str, Any] = parse_json(raw)
            return answer
        try:
            message, call = parse_message(raw, self)
        except ValueError as error:
            what = f"{len(raw)} bytes, {raw[:80]!r}"
            log.error("an entry of queue %s is no command and is set aside (%s): %s", queue, str(error)[:200], what)
            bury("garbage", queue, raw)
            return None
        if call.task not in current_app.tasks:
            log.error("this worker has no task %r (is its plugin installed?); it is set aside", call.task[:80])
            bury("unknown", queue, pack_arguments(call.args, call.named), call.task, call.command)
            return None
        return message


class SturdyTransport(Transport):
    """Redis, with channels that outlive garbage."""

    Channel = SturdyChannel


class CountedRequest(Request):  # type: ignore[misc]  # celery has no types
    """A request for a task; see the module's text. All of it happens in the worker's main process."""

    @property
    def command(self) -> str:
        """The command's own id, or the best that Celery has."""
        return str(self.request_dict.get(COMMAND_HEADER) or self.root_id or self.id)

    def revoked(self) -> bool:
        """Asked by Celery right before a task is begun: whether it must not be."""
        request: Any = self
        if self.task.acks_late and not request._already_revoked and self._worn_out():
            task_ready(self)
            self.acknowledge()
            request._already_revoked = True
        return bool(super().revoked())

    def acknowledge(self) -> None:
        """The task has ended, one way or the other."""
        if self.task.acks_late and not self.acknowledged:
            _counted(lambda commands: commands.ended(self.command))
        super().acknowledge()

    def _worn_out(self) -> bool:
        attempt = _counted(lambda commands: commands.begin(self.command))
        if attempt is None or attempt <= MAX_ATTEMPTS:
            return False
        queue = str((self.delivery_info or {}).get("routing_key", ""))
        log.error(
            "task %s was begun %d times and never ended; it is set aside (`clawq worker dead`)", self.name, MAX_ATTEMPTS
        )
        bury("attempts", queue, pack_arguments(self.args or (), self.kwargs or {}), str(self.name), self.command)
        return True


def bury(reason: str, queue: str, head: bytes, task: str = "", command: str = "") -> None:
    """Keep what will not be tried (again)."""
    identity = pool_process.identity()
    worker = identity.worker if identity is not None else ""
    _counted(lambda commands: commands.bury(reason, queue, head, worker, task, command))


def _counted(use: Any) -> Any:
    """Use the books on the broker; None if they cannot be reached: work goes before counting."""
    try:
        return use(_commands())
    except TransportError as error:
        log.warning("%s; this attempt is not counted", error)
        return None


@cache
def _commands() -> Commands:
    identity = pool_process.identity()
    if identity is None:
        raise TransportError("no worker, no broker")
    return Commands(connect(identity.settings.require_urls()[0]))


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


__all__ = ["CountedRequest", "SturdyChannel", "SturdyTransport", "bury"]
