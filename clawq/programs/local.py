"""`clawq up`: a whole run on one machine: Redis, a worker with its slots, a learner with its coordinator.

Everything is a process of its own that cannot outlive this one. This process only watches: it shows the run's board
once a second, passes on what the learner says, and ends when the learner ends; one that was killed is resumed
(`clawq.programs.learner_lives`). Told to stop, it stops the learner first (which writes a checkpoint), then the worker,
then Redis; a second signal ends everything at once.
"""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from clawq import progress
from clawq.config import RunConfig
from clawq.cores import CorePlan, available_cores, device_here, plan_cores, thread_env
from clawq.errors import ActorFailed, LearnerError, TransportError, UserError
from clawq.programs.demonstration_file import check_readable
from clawq.programs.learner_lives import LearnerLives
from clawq.programs.memory import Machine, forecast
from clawq.programs.run import is_unborn, only_up, open_run, prepare_folder, prepare_new_folder
from clawq.programs.servers import Servers, servers_for
from clawq.registry import Registration, enrol
from clawq.spawning.logfile import LogFile, log_level
from clawq.spawning.spawner import Child, Spawner
from clawq.state import named_urls
from clawq.transport.claims import holder_of
from clawq.transport.client import connect
from clawq.transport.control import Board, RunRegistry
from clawq.watchdog.keeping import WatchdogKeeper

#: Between two looks at the board, seconds.
LOOK_S = 0.5
#: How long the learner may take to stop in order, seconds; then it is killed. With the rest under 10 s in all.
LEARNER_STOP_S = 7.0
#: How long the worker may take.
WORKER_STOP_S = 6.0
#: Without a look for so long this process is told to hang, seconds.
WATCH_S = 60.0
#: A worker that ends by itself more often than this within so many seconds is not started again.
WORKER_ENDS, WORKER_ENDS_S = 3, 120.0


class Display(Protocol):
    """Where the run is shown."""

    def show(self, snapshot: Mapping[str, float | str]) -> None:
        """The newest numbers."""
        ...

    def say(self, text: str) -> None:
        """A line that stays."""
        ...


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What `clawq up` was asked to do.

    Attributes:
        config: resolved.
        arguments: the same as words for `clawq learner start` (file and overrides).
        resume: folder of a run to go on with.
        run_id: wanted name.
    """

    config: RunConfig
    arguments: Sequence[str]
    resume: Path | None = None
    run_id: str | None = None


class Household:
    """The processes of one local run, and the order in which they end."""

    def __init__(self) -> None:
        self.spawner = Spawner()
        self.worker: Child | None = None
        self.learner: LearnerLives | None = None
        self.start_worker: Callable[[], Child] | None = None
        self.watchdog: WatchdogKeeper | None = None
        self._worker_ends: list[float] = []

    def look_after_worker(self, say: Callable[[str], None]) -> None:
        """Start the worker again if it has ended; ActorFailed if it keeps ending."""
        if self.worker is None or self.start_worker is None or not self.worker.exited():
            return
        status, words = self.worker.end_tree(), self.worker.log.tail()
        now_s = time.monotonic()
        self._worker_ends = [*(end_s for end_s in self._worker_ends if now_s - end_s < WORKER_ENDS_S), now_s]
        if len(self._worker_ends) > WORKER_ENDS:
            raise ActorFailed(f"the worker keeps ending by itself ({how(status)})\n--- end of its log ---\n{words}")
        say(f"the worker ended by itself ({how(status)}) and is started again; its log is {self.worker.log.path}")
        self.worker = self.start_worker()

    def kill(self) -> None:
        """End everything now (second signal); Redis ends with this process."""
        learner = None if self.learner is None else self.learner.child
        for child in (learner, self.worker):
            if child is not None:
                child.kill_session()

    def end(self) -> int:
        """Learner first, then the worker; returns the learner's exit status."""
        status = 0
        if self.watchdog is not None:
            self.watchdog.close()
        if self.learner is not None:
            self.learner.child.terminate()
            status = self.learner.child.end_tree(LEARNER_STOP_S)
            if self.learner.given_up:
                # However its last life ended: it has not done what it was for.
                status = LearnerError.exit_code
        if self.worker is not None:
            self.worker.terminate()
            self.worker.end_tree(WORKER_STOP_S)
        return status


def run_local(order: LocalRun, display: Display, stop: threading.Event, household: Household) -> int:
    """Run to the end and return the learner's exit status.

    Raises:
        UserError: Redis cannot be had, or the run folder.
        StoreUnavailable: an embedded Redis server ended.
        ActorFailed: the worker keeps ending by itself.
    """
    # A mistake in the environment is told before anything starts.
    log_level("INFO")
    config = order.config
    check_memory(order)
    check_readable(config.replay)
    fresh = order.resume is None and (order.run_id is None or not (Path(config.folder) / order.run_id).exists())
    run_id, folder = identity_of(order)
    with only_up(folder):
        status = _run(order, run_id, folder, display, stop, household)
        if status == UserError.exit_code and fresh and is_unborn(folder):
            # What was wrong has been said, and nothing came of it.
            shutil.rmtree(folder, ignore_errors=True)
    return exit_status(status, stop.is_set())


def _run(
    order: LocalRun, run_id: str, folder: Path, display: Display, stop: threading.Event, household: Household
) -> int:
    """Start everything, follow it, end everything; the learner's own status."""
    cores = core_plan(order.config)
    display.say(cores.text)
    with servers_for(order.config.redis, run_id, "up", display.say) as servers:
        try:
            enrol(Registration("up", f"up {run_id}", {"watch": WATCH_S}))
            household.watchdog = WatchdogKeeper(household.spawner)
            start = partial(start_learner, household.spawner, order, run_id, servers, cores, folder)
            claimed, resume = claim_reader(run_id, servers), order.resume is not None
            household.learner = LearnerLives(start, resume, folder, claimed, display.say)
            household.start_worker = partial(start_worker, household.spawner, run_id, servers, cores, folder)
            household.worker = household.start_worker()
            follow(run_id, servers, household, display, stop)
        finally:
            status = household.end()
    if status != 0 and household.learner is not None:
        display.say(last_words(status, stop.is_set(), household.learner.child.log.tail(30), folder))
    return status


def core_plan(config: RunConfig) -> CorePlan:
    """How the cores are divided.

    A run that goes by rounds gets as many slots as its rounds have seats, unless the user names a number.
    """
    cores, device = config.cores, device_here(config.learner.device)
    plan = plan_cores(available_cores(), cores.learner_threads, cores.slots, cores.actor_threads, device)
    if config.sync is None or cores.slots is not None:
        return plan
    return replace(plan, slots=max(plan.slots, config.sync.actors))


def check_memory(order: LocalRun) -> None:
    """UserError, before anything is started, if the run cannot fit into this machine's memory.

    What a new run's environment shows is not known yet; the learner looks again when it is.
    """
    config, spec = order.config, None
    if order.resume is not None:
        spec = open_run(order.resume, order.config).spec
    gpu = device_here(config.learner.device) != "cpu" and Path("/dev/nvidiactl").exists()
    embedded = named_urls(config.redis) is None
    forecast(config, spec, gpu=gpu, server=None if embedded else 0).check(Machine.here())


def last_words(status: int, told_to_stop: bool, log_tail: str, folder: Path) -> str:
    """What to say of a learner that ended badly: what it said itself and, if it was killed, how to go on."""
    if status >= 0:
        return log_tail
    if told_to_stop and status == -signal.SIGTERM:
        # It was still starting and could not stop in order yet; it has nothing to say.
        return "stopped before the run began"
    onward = f"; go on with `clawq up --resume {folder}`" if (folder / "run.json").is_file() else ""
    return f"{log_tail}\nthe learner was {how(status)}{onward}".lstrip()


def exit_status(status: int, told_to_stop: bool) -> int:
    """The command's exit status from the learner's; a signal counts as shells count it."""
    if status >= 0:
        return status
    return 130 if told_to_stop else 128 - status


def how(status: int) -> str:
    """How a process ended, in words."""
    return f"killed by signal {-status}" if status < 0 else f"status {status}"


def identity_of(order: LocalRun) -> tuple[str, Path]:
    """(run id, run folder) of what was ordered; a folder may have been moved or renamed since it was made."""
    if order.resume is not None:
        run = open_run(order.resume, order.config)
        return run.id, run.folder
    if order.run_id is not None:
        return order.run_id, prepare_folder(order.config, order.run_id)
    return prepare_new_folder(order.config, time.time())


def start_learner(
    spawner: Spawner, order: LocalRun, run_id: str, servers: Servers, cores: CorePlan, folder: Path, resume: bool
) -> Child:
    """Exec `clawq learner start` for this run; what it says comes over a pipe."""
    where = ["--resume", str(folder)] if resume else ["--run", run_id]
    words = ["clawq.cli.main", "learner", "start", *order.arguments, *where]
    env = {**servers.env, **thread_env(cores.learner_threads), "CLAWQ_UP": "1"}
    known = Registration("learner", run_id, order.config.watchdog.learner_limits)
    log = LogFile(folder / "logs" / "learner-process.log")
    return spawner.spawn(words, log, env, pipes=True, registration=known)


def start_worker(spawner: Spawner, run_id: str, servers: Servers, cores: CorePlan, folder: Path) -> Child:
    """Exec `clawq worker start` for this run alone."""
    words = ["clawq.cli.main", "worker", "start", "--slots", str(cores.slots), "--runs", run_id]
    env = {**servers.env, "CLAWQ_ACTOR_THREADS": str(cores.actor_threads), "CLAWQ_LOG_DIR": str(folder / "logs")}
    known = Registration("supervisor", f"worker {run_id}")
    return spawner.spawn(words, LogFile(folder / "logs" / "worker.log"), env, registration=known)


def follow(run_id: str, servers: Servers, household: Household, display: Display, stop: threading.Event) -> None:
    """Show the run until its learner ends or `stop` is set."""
    learner = household.learner
    assert learner is not None
    look = board_reader(run_id, servers)
    mine = progress.mine()
    while not learner.over(LOOK_S) and not stop.is_set():
        mine.moved("watch")
        servers.check()
        household.look_after_worker(display.say)
        display.show(look())
    if learner.child.exited():
        learner.hear_out(2.0)
        display.show({**look(), "stage": "ended"})


def claim_reader(run_id: str, servers: Servers) -> Callable[[], bool]:
    """A function that says whether somebody holds the run's claim; while Redis is away nobody could begin anyway."""
    registry, data = RunRegistry(connect(servers.broker_url)), connect(servers.data_url)

    def claimed() -> bool:
        try:
            record = registry.get(run_id)
            return record is not None and holder_of(data, record.keys.claim("learner")) is not None
        except TransportError:
            return True

    return claimed


def board_reader(run_id: str, servers: Servers) -> Callable[[], Mapping[str, float | str]]:
    """A function that reads the run's board; while Redis is away it says so."""
    registry, data = RunRegistry(connect(servers.broker_url)), connect(servers.data_url)
    last: dict[str, float | str] = {"run": run_id, "stage": "starting"}

    def look() -> Mapping[str, float | str]:
        try:
            record = registry.get(run_id)
            if record is not None:
                last.update(Board(data, record.keys).read())
        except TransportError as error:
            return {**last, "note": f"Redis: {error}"}
        return dict(last)

    return look
