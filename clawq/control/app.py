"""The Celery app: `celery -A clawq.control.app worker` is a clawq worker, with any pool.

Celery carries commands, never experience; every command can be derived again from the desired state, so tasks are
acknowledged early and a lost one costs a fraction of a second (clawq.control.celery_settings). The worker subscribes
to the queues of the runs that exist (clawq.control.subscription) and ends in order (clawq.control.lifecycle).

The worker finds its Redis in CLAWQ_BROKER_URL and CLAWQ_DATA_URL, or in the host's state file. This module, and what it
imports, loads neither torch nor a simulator (tested): whatever needs them runs as an exec'ed program.

Plugins: an entry point in `clawq.tasks` is either a plain function, which becomes the task `clawq.<entry point name>`
with clawq's settings and needs no Celery import; or a Celery task (`celery.shared_task(acks_late=True)(function)`),
taken as it is under its own name. They are loaded when a worker starts; one that cannot be loaded becomes a task that
says why, and stops nobody else. Send them with `clawq.control.celery_settings.send_command`.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, signals
from celery.local import Proxy
from kombu.transport import TRANSPORT_ALIASES

from clawq import plugins
from clawq.control import tasks
from clawq.control.celery_settings import make_app
from clawq.control.commands import CountedRequest, SturdyTransport
from clawq.control.lifecycle import bind_lifecycle
from clawq.control.settings import HostSettings
from clawq.control.subscription import Subscription
from clawq.errors import ClawqError, PluginError

log = logging.getLogger(__name__)

#: Modules that have no business in a Celery process: forking after they ran hangs, and CUDA dies with a fork.
HEAVY_MODULES = ("torch", "gymnasium", "mujoco", "jax", "isaacgym")


def register_tasks(target: Celery) -> None:
    """Register the rollout task and all task plugins."""
    target.task(name="clawq.rollout")(tasks.rollout)
    for name in plugins.names("tasks"):
        _register_plugin(target, name)
    for task in target.tasks.values():
        task.Request = CountedRequest


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
    if issubclass(type(task), Proxy):
        # A shared task: Celery has given it to every app when its module was imported. `type` does not look through
        # the proxy, as isinstance would.
        return
    if isinstance(task, Task):
        target.tasks.register(task)
        return
    target.task(name=f"clawq.{name}")(task)


def _complain(error: PluginError) -> Callable[..., Any]:
    def unusable(*_: Any, **__: Any) -> Any:
        raise error

    return unusable


def _worker_app() -> Celery:
    try:
        settings = HostSettings.from_host()
        made = make_app(settings.broker_url)
    except ClawqError as error:
        # `celery -A` would show a traceback.
        raise SystemExit(f"clawq worker: {error}") from None
    if settings.remote_control:
        made.conf.update(worker_enable_remote_control=True, worker_send_task_events=True, task_send_sent_event=True)
    bind_lifecycle(made)
    made.steps["consumer"].add(Subscription)
    return made


# Both names of Redis in URLs; socket files go by the first.
for _scheme in ("redis", "rediss"):
    TRANSPORT_ALIASES[_scheme] = f"{SturdyTransport.__module__}:{SturdyTransport.__name__}"
app = _worker_app()


def _on_import_modules(**_: Any) -> None:
    register_tasks(app)


signals.import_modules.connect(_on_import_modules, sender=app, weak=False)


__all__ = ["app", "register_tasks"]
