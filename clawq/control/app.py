"""The Celery app: `celery -A clawq.control.app worker` is a clawq worker, with any pool.

Celery carries commands, never experience; every command can be derived again from the desired state, so tasks are
acknowledged early and a lost one costs a fraction of a second. JSON only, no result backend, no prefetch, bounded
timeouts (the settings were measured; see the notes beside them). Queues have no exchange, so a run leaves no binding.

The worker finds its Redis in CLAWQ_BROKER_URL and CLAWQ_DATA_URL, or in the host's state file. This module, and what it
imports, loads neither torch nor a simulator (tested): whatever needs them runs as an exec'ed program.

Plugins: an entry point in `clawq.tasks` is either a plain function, which becomes the task `clawq.<entry point name>`
with clawq's settings and needs no Celery import; or a Celery task (`celery.shared_task(acks_late=True)(function)`),
taken as it is under its own name. They are loaded when a worker starts; one that cannot be loaded becomes a task that
says why, and stops nobody else. Send them with `send_command`.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, signals

from clawq import plugins
from clawq.control import tasks
from clawq.control.lifecycle import bind_lifecycle
from clawq.control.queues import DEFAULT_QUEUE, KEY_PREFIX, make_queue
from clawq.control.settings import HostSettings
from clawq.control.subscription import Subscription
from clawq.errors import PluginError
from clawq.transport.client import celery_url

log = logging.getLogger(__name__)

#: Modules that have no business in a Celery process: forking after they ran hangs, and CUDA dies with a fork.
HEAVY_MODULES = ("torch", "gymnasium", "mujoco", "jax", "isaacgym")


def make_app(broker_url: str | None) -> Celery:
    """A Celery app with clawq's settings, without tasks. `None`: it can be imported, but not connected."""
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
        # The default gives up, and exits, after 100 tries.
        broker_connection_max_retries=None,
        broker_pool_limit=2,
        broker_transport_options={
            "global_keyprefix": KEY_PREFIX,
            "visibility_timeout": 300,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 10,
            "client_name": "clawq-celery",
        },
        task_default_queue=DEFAULT_QUEUE,
        task_default_exchange="",
        task_default_routing_key=DEFAULT_QUEUE,
        task_create_missing_queues=True,
    )
    if sys.platform == "win32":
        made.conf.worker_pool = "threads"
    return made


def send_command(sender: Celery, name: str, queue: str = DEFAULT_QUEUE, **arguments: Any) -> str:
    """Send one task once and return its Celery id; nothing is retried.

    Args:
        sender: from `make_app`.
        name: full task name, as `clawq.rollout`.
        queue: a run's queue, or the queue of all workers.
        arguments: JSON-able keyword arguments of the task.
    """
    return str(sender.send_task(name, kwargs=arguments, queue=make_queue(queue), ignore_result=True).id)


def register_tasks(target: Celery) -> None:
    """Register the rollout task and all task plugins."""
    target.task(name="clawq.rollout")(tasks.rollout)
    for name in plugins.names("tasks"):
        _register_plugin(target, name)


def _register_plugin(target: Celery, name: str) -> None:
    before = set(sys.modules)
    try:
        task = plugins.load("tasks", name)
    except PluginError as error:
        log.warning("%s", error)
        task = _complain(error)
    heavy = [module for module in HEAVY_MODULES if module in sys.modules and module not in before]
    if heavy:
        log.warning(
            "the task plugin %r imports %s into the Celery process; forked pools may hang. Import it inside the task's "
            "own program instead (pool_process().run_program)",
            name,
            ", ".join(heavy),
        )
    if isinstance(task, Task) or hasattr(task, "apply_async"):
        # shared_task registers with every app once it is finalized; naming it here makes that certain.
        target.tasks.register(task)
        return
    target.task(name=f"clawq.{name}")(task)


def _complain(error: PluginError) -> Callable[..., Any]:
    def unusable(*_: Any, **__: Any) -> Any:
        raise error

    return unusable


def _worker_app() -> Celery:
    settings = HostSettings.from_host()
    made = make_app(settings.broker_url)
    if settings.remote_control:
        made.conf.update(worker_enable_remote_control=True, worker_send_task_events=True, task_send_sent_event=True)
    bind_lifecycle(made)
    made.steps["consumer"].add(Subscription)
    return made


app = _worker_app()


def _on_import_modules(**_: Any) -> None:
    register_tasks(app)


signals.import_modules.connect(_on_import_modules, sender=app, weak=False)


__all__ = ["app", "make_app", "register_tasks", "send_command"]
