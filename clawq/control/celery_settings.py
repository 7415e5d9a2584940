"""Celery apps with clawq's settings, for workers and for whoever sends commands.

JSON only, no result backend, no prefetch, early acknowledgement, bounded timeouts: every setting below was measured
(faults, restarts of Redis, shutdowns, each pool). Sending retries nothing: redis-py's and Celery's own retries make
duplicates, and who sends can derive again what to send.
"""

import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery

from clawq.control.queues import COMMAND_HEADER, DEFAULT_QUEUE, make_queue
from clawq.errors import UserError
from clawq.transport.commands import Commands, DeadCommand
from clawq.transport.keys import CELERY_PREFIX, QUEUE
from clawq.transport.urls import celery_url


def make_app(broker_url: str | None, platform: str = sys.platform) -> Celery:
    """A Celery app with clawq's settings, without tasks.

    Args:
        broker_url: of the broker; None: the app can be imported, but not connected.
        platform: as `sys.platform`; on Windows a bare `celery worker` gets the threads pool, as there is no fork.
    """
    made = Celery("clawq", broker=celery_url(broker_url) if broker_url else None, set_as_current=False)
    made.conf.update(
        # JSON is the whole accept list: pickle accepted is code accepted.
        task_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        # Reports go to the run's events; results would pile up on the broker.
        result_backend=None,
        task_ignore_result=True,
        # Early: late acks only buy duplicates and poison loops for commands that can be sent again.
        task_acks_late=False,
        task_publish_retry=False,
        worker_disable_prefetch=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_soft_shutdown_timeout=0.0,
        worker_proc_alive_timeout=60,
        worker_consumer="clawq.control.subscription:PatientConsumer",
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_retry=True,
        # A broker that answers with an error (it is full, or loading) ends a worker otherwise.
        broker_channel_error_retry=True,
        # The default gives up, and exits, after 100 tries.
        broker_connection_max_retries=None,
        broker_pool_limit=2,
        broker_transport_options={
            "global_keyprefix": CELERY_PREFIX,
            "visibility_timeout": 300,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            # A reply that got lost is waited for so long, perhaps from just before the network is back: with 30 s, work
            # could begin half a minute after that.
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
            # A queue that is added joins the next BRPOP; the default of 1 s would hold up a run's first lease.
            "polling_interval": 0.25,
            "client_name": "clawq-celery",
        },
        task_default_queue=DEFAULT_QUEUE,
        task_default_exchange="",
        task_default_routing_key=DEFAULT_QUEUE,
        task_create_missing_queues=True,
    )
    if platform == "win32":
        made.conf.worker_pool = "threads"
    return made


def send_command(
    sender: Celery, name: str, queue: str = DEFAULT_QUEUE, connection: Any = None, **arguments: Any
) -> str:
    """Send one task once and return its Celery id; nothing is retried.

    It gets an id of its own too, under which its attempts are counted if its task is acknowledged late.

    Args:
        sender: from `make_app`.
        connection: a kombu connection to use; None takes one from the app's pool.
        name: full task name, as `clawq.rollout`.
        queue: a run's queue, or the queue of all workers.
        arguments: JSON-able keyword arguments of the task.
    """
    return _send(sender, name, queue, uuid.uuid4().hex, (), arguments, connection)


def give_back(sender: Celery, commands: Commands, dead: DeadCommand) -> str:
    """Send a dead command once more, under its old id and with all its attempts before it; returns its Celery id.

    Whoever dies in the midst of it leaves it among the dead as well: it may then be sent twice, but not lost.

    Raises:
        UserError: it is none that can be sent.
    """
    arguments = dead.arguments()
    if arguments is None or not (dead.queue == QUEUE or dead.queue.startswith(f"{QUEUE}.")):
        raise UserError(
            f"{dead.id} cannot be given back: "
            + ("it is no command" if dead.reason == "garbage" else "not all of it was kept")
            + f"; drop it with `clawq worker dead drop {dead.id}`"
        )
    commands.ended(dead.command)
    sent = _send(sender, dead.task, dead.queue, dead.command, *arguments)
    commands.drop(dead.id)
    return sent


def _send(
    sender: Celery,
    name: str,
    queue: str,
    command: str,
    args: Sequence[Any],
    named: Mapping[str, Any],
    connection: Any = None,
) -> str:
    headers = {COMMAND_HEADER: command}
    where = {"queue": make_queue(queue), "connection": connection, "headers": headers}
    return str(sender.send_task(name, args=list(args), kwargs=dict(named), **where).id)


__all__ = ["give_back", "make_app", "send_command"]
