"""The Celery queues: one for everybody, two for each run.

    clawq              commands that belong to no run, to any worker
    clawq.<run>        rollout leases of the run
    clawq.<run>.tasks  evaluations and other tasks of the run: a queue of their own, never behind leases

Queues have no exchange: publishing goes straight to the Redis list, and an empty queue leaves nothing behind in Redis.
"""

from kombu.entity import Exchange, Queue

from clawq.transport.keys import QUEUE, queue_name

#: The queue of every worker, for commands that belong to no run.
DEFAULT_QUEUE = QUEUE
#: Header of a message with the command's own id: Celery's may change on the way.
COMMAND_HEADER = "clawq_command"
#: States of a run record in which workers serve the run.
ACTIVE_STATES = frozenset({"starting", "running"})


def make_queue(name: str) -> Queue:
    """A queue without an exchange."""
    return Queue(name, Exchange(""), routing_key=name)  # type: ignore[no-untyped-call]


def lease_queue(run_id: str) -> str:
    """The queue of a run's rollout leases."""
    return queue_name(run_id)


def task_queue(run_id: str) -> str:
    """The queue of a run's other tasks."""
    return f"{queue_name(run_id)}.tasks"


def run_queues(run_id: str) -> tuple[str, str]:
    """Both queues of a run."""
    return lease_queue(run_id), task_queue(run_id)


__all__ = [
    "ACTIVE_STATES",
    "COMMAND_HEADER",
    "DEFAULT_QUEUE",
    "lease_queue",
    "make_queue",
    "run_queues",
    "task_queue",
]
