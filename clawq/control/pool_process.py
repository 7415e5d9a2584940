"""What one pool process of a worker owns: its spawner, its slots, its clients of Redis.

With `threads` and `solo` the worker's main process is the one pool process; with `prefork` every child is one, with one
slot. All of it is made at the first task and belongs to the process that made it: after a fork a child starts afresh
and touches neither threads nor sockets of its parent.
"""

import os
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from clawq.control.actor_process import ActorProcess, Lease, Patience
from clawq.control.pulse import PulseSender
from clawq.control.queues import ACTIVE_STATES
from clawq.control.recycling import Limits, Recycler
from clawq.control.settings import HostSettings, slot_name
from clawq.control.shutdown import Shutdown
from clawq.control.slots import Slots
from clawq.cores import thread_env
from clawq.errors import ClawqError, TransportError
from clawq.registry import Registration, Registry, enrol
from clawq.spawning.failure import Failure
from clawq.spawning.logfile import LogFile
from clawq.spawning.program import run_program
from clawq.spawning.spawner import Spawner
from clawq.transport.client import connect, translated
from clawq.transport.control import ControlRecord, Events, RunRecord, RunRegistry
from clawq.transport.keys import RunKeys

#: The program that runs in a slot.
ACTOR_PROGRAM = "clawq.programs.actor"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the worker is; made in its main process before a pool forks.

    Attributes:
        worker: its name on this host.
        main_pid: pid of the worker's main process.
        pool: `threads`, `prefork` or `solo`.
        concurrency: tasks at a time, over all pool processes.
        settings: the host's own configuration.
        shutdown: begins when the worker ends.
        pulse: tells a supervisor that the worker lives; None where there is none.
    """

    worker: str
    main_pid: int
    pool: str
    concurrency: int
    settings: HostSettings
    shutdown: Shutdown
    pulse: PulseSender | None = None

    @property
    def slots(self) -> int:
        """Actors of the whole worker. With threads one thread is kept for evaluations and other tasks."""
        return max(1, self.concurrency - 1) if self.pool == "threads" else self.concurrency

    @property
    def name(self) -> str:
        """The worker's name among those of all hosts; its slots' names begin with it."""
        return self.slot(0).rpartition("-")[0]

    def slot(self, number: int) -> str:
        """Name of one of its slots."""
        return slot_name(self.worker, number, self.settings.place)

    @property
    def slots_here(self) -> int:
        """Actors of one pool process."""
        return self.slots if self.pool == "threads" else 1


class PoolProcess:
    """See the module's text. Threads may use it at the same time."""

    def __init__(self, identity: Identity) -> None:
        self.pid = os.getpid()
        self.identity = identity
        self.spawner = Spawner()
        self._first_slot = _child_index() if identity.pool == "prefork" else 0
        names = [identity.slot(self._first_slot + k) for k in range(identity.slots_here)]
        if identity.pool == "prefork":
            # Forked, so nobody registered it; it shows no progress, since a lease's own clocks bound what it does.
            enrol(Registration("pool", names[0], urls=identity.settings.require_urls()), parent=identity.main_pid)
        recycler = Recycler(identity.settings.actor_memory_mb)
        self.slots = Slots(names, self._start_actor, identity.shutdown, is_over=self.stopped, recycler=recycler)

    @cached_property
    def registry(self) -> RunRegistry:
        """The runs that exist."""
        return RunRegistry(self.broker_client)

    @cached_property
    def broker_client(self) -> Any:
        """A client of the broker."""
        return connect(self.identity.settings.require_urls()[0])

    @cached_property
    def data_client(self) -> Any:
        """A client of the data server."""
        return connect(self.data_url)

    @property
    def data_url(self) -> str:
        """Where the data server is, as this host sees it."""
        return self.identity.settings.require_urls()[1]

    def run(self, run_id: str) -> RunRecord | None:
        """The record of a run that is not over, else None."""
        record = self.registry.get(run_id)
        return record if record is not None and record.state in ACTIVE_STATES else None

    def stopped(self, run_tag: str) -> bool | None:
        """Whether the run is over for actors. None: nobody knows, or no lease can come, since a server is away."""
        try:
            control = ControlRecord(self.data_client, RunKeys(run_tag)).read()
            if control is not None and control.stop:
                return True
            with translated(self.broker_client):
                self.broker_client.ping()
        except TransportError:
            return None
        return False

    def events(self, run: RunRecord) -> Events:
        """The events of a run."""
        return Events(self.data_client, run.keys)

    def log_file(self, name: str) -> LogFile:
        """A log in this host's log folder."""
        return LogFile(self.identity.settings.log_folder / f"{name}.log")

    def run_program(self, program: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run an exec'ed program under a task; ended when the worker ends. See `clawq.spawning.program`.

        Args:
            program: module to run.
            request: its JSON request; `run` in it says for whom. `data_url` is added.
            timeout_s: it is ended when it takes longer.
        """
        log_file = self.log_file(f"{self.identity.slot(self._first_slot)}-{program.rpartition('.')[2]}")
        env = self.child_env(request["run"]) if "run" in request else {}
        request = {"data_url": self.data_url, **request}
        shutdown = self.identity.shutdown
        return run_program(self.spawner, program, request, log_file, timeout_s, env, lambda: shutdown.begun)

    def child_env(self, run: dict[str, Any]) -> dict[str, str]:
        """Environment of a program that works for a run: its tag, and the sizes of thread pools."""
        threads = self.identity.settings.actor_threads or _run_threads(run)
        return {"CLAWQ_RUN": str(run["tag"]), **thread_env(threads)}

    def _start_actor(self, lease: Lease) -> ActorProcess:
        run, settings = dict(lease.run), self.identity.settings
        if (why := Registry().unfit().get(lease.slot)) is not None:
            raise Failure("given_up", f"this slot is given up for now by the watchdog: {why}", "")
        # Here, so that a Celery process that drives no actor does without pydantic.
        from clawq.config import Watchdog

        limits = Watchdog.model_validate(run.get("config", {}).get("watchdog", {}))
        memory = Limits.of(run, settings.actor_memory_mb).registered
        known = Registration("actor", lease.slot, limits.actor_limits | memory, urls=settings.require_urls())
        child = self.spawner.spawn(
            ACTOR_PROGRAM, self.log_file(lease.slot), self.child_env(run), control=True, registration=known
        )
        return ActorProcess(child, str(run["tag"]), Patience.of_run(limits, settings.stall_s), _run_envs(run))


_lock = threading.Lock()
_identity: Identity | None = None
_current: PoolProcess | None = None


def introduce(identity: Identity) -> None:
    """Say who this worker is (once, in its main process)."""
    global _identity
    _identity = identity


def identity() -> Identity | None:
    """Who this worker is, None outside a worker."""
    return _identity


def pool_process() -> PoolProcess:
    """This process's own; made when first asked for. Raises ClawqError outside a worker."""
    global _current
    if _identity is None:
        raise ClawqError("this works only inside a clawq worker (celery -A clawq.control.app worker)")
    with _lock:
        if _current is None or _current.pid != os.getpid():
            _current = PoolProcess(_identity)
        return _current


def kill_actors() -> None:
    """SIGKILL the actors of this process, if it has any. Safe in a signal handler."""
    if _current is not None and _current.pid == os.getpid():
        _current.slots.kill_all()


def _child_index() -> int:
    from billiard.process import current_process

    return int(getattr(current_process(), "index", 0) or 0)


def _run_threads(run: dict[str, Any]) -> int:
    cores = run.get("config", {}).get("cores") or {}
    return int(cores.get("actor_threads") or 1)


def _run_envs(run: dict[str, Any]) -> int:
    return int(run.get("config", {}).get("environment", {}).get("num_envs") or 0)


# A fork while another thread holds the lock would leave it locked in the child for ever.
if hasattr(os, "register_at_fork"):

    def _fresh_lock() -> None:
        global _lock
        _lock = threading.Lock()

    os.register_at_fork(after_in_child=_fresh_lock)

__all__ = ["ACTOR_PROGRAM", "Identity", "PoolProcess", "identity", "introduce", "kill_actors", "pool_process"]
