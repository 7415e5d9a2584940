"""`clawq learner start`: from a configuration to a finished run, in an order that wastes no second.

The coordinator loads while the environment is probed; the run is claimed and registered before torch is imported: so
workers get leases and their actors boot while the learner is still loading.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from clawq.config import RunConfig
from clawq.cores import thread_env
from clawq.errors import Interrupted, UserError
from clawq.programs.demonstration_file import check_readable
from clawq.programs.extras import extras_of
from clawq.programs.following import differences, find_source
from clawq.programs.run import Run, create_run, is_unborn, new_run_id, only_writer, open_run, prepare_folder, refusing
from clawq.programs.servers import servers_for
from clawq.programs.session import invite_actors, open_session, start_coordinator
from clawq.programs.suitability import check_suitable
from clawq.registry import Registration, enrol
from clawq.spawning.failure import Failure
from clawq.spawning.logfile import LIMIT_BYTES, LogFile, log_level
from clawq.spawning.program import run_program
from clawq.spawning.spawner import Spawner
from clawq.specs import EnvSpec
from clawq.transport.keys import new_tag

#: How long the environment may take to say what it is, seconds (a first run may compile or unpack assets).
PROBE_S = 180.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a learner shall do.

    Attributes:
        config: resolved; for a resumed run None means the run's own.
        run_id: name of a new run, None = made from the configuration.
        resume: folder of a run to go on with, None = a new run.
    """

    config: RunConfig | None
    run_id: str | None = None
    resume: Path | None = None

    def or_resumed(self) -> "Order":
        """The same, as a wish to go on with the run of that name if it has begun."""
        if self.config is None or self.run_id is None:
            return self
        folder = Path(self.config.folder).expanduser() / self.run_id
        return self if is_unborn(folder) else replace(self, resume=folder)


def run_daemon(order: Order, stop: threading.Event, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a learner to its end; returns the report.

    Raises UserError, TransportError, LearnerError or ClaimLost, each with a text for people.
    """
    spawner, level = Spawner(), log_level("INFO")
    kept = open_run(order.resume, order.config) if order.resume is not None else None
    config = kept.config if kept is not None else order.config
    if config is None:
        raise UserError("a new run needs a configuration")
    check_readable(config.replay)
    wanted = new_run_id(config, time.time()) if order.run_id is None else order.run_id
    fresh = kept is None and not (Path(config.folder).expanduser() / wanted).exists()
    run_id, folder = (wanted, prepare_folder(config, wanted)) if kept is None else (kept.id, kept.folder)
    tag, logs = new_tag() if kept is None else kept.tag, folder / "logs"
    # Whoever finds the folder in use leaves it as it is.
    with only_writer(folder), refusing(folder, fresh), servers_for(config.redis, run_id, "learner", say) as servers:
        urls = servers.broker_url, servers.data_url
        enrol(Registration("learner", run_id, config.watchdog.learner_limits, urls=urls, run=tag))
        coordinator = start_coordinator(spawner, run_id, tag, logs, *urls)
        try:
            spec = probe(config, spawner, LogFile(logs / "probe.log"), stop)
            check_suitable(config, spec)
            followed = find_source(config, run_id, spec, urls[0], "" if kept is None else kept.follows)
            follows = "" if followed is None else followed.tag
            run = create_run(config, run_id, spec, tag, follows) if kept is None else kept
            check_same_spec(run, spec)
            log_to(run.logs / "learner.log", level)
            say(f"run {run.id} in {run.folder}")
            with open_session(run, *urls, spawner, coordinator) as session:
                session.source = followed
                if kept is None and may_begin_at_random(config, spec):
                    invite_actors(session)
                check_not_stopped(stop)
                from clawq.programs.learner import run_learner

                # That import took seconds.
                check_not_stopped(stop)
                return run_learner(session, stop, say, resume=kept is not None)
        finally:
            coordinator.end_tree()


def may_begin_at_random(config: RunConfig, spec: EnvSpec) -> bool:
    """Whether actors of a new run are of use before its learner has any weights."""
    # In rounds every version is the learner's own, and the first round begins with its first; whoever follows has no
    # actors; and whoever needs extras of the policy cannot use what is done at random.
    return config.sync is None and config.source is None and not extras_of(config, spec)


def probe(config: RunConfig, spawner: Spawner, log_file: LogFile, stop: threading.Event) -> EnvSpec:
    """The environment's spec, found out in a process of its own; UserError with its own words if that fails."""
    request = {"environment": config.environment.model_dump(mode="json")}
    try:
        answer = run_program(spawner, "clawq.programs.probe", request, log_file, PROBE_S, thread_env(1), stop.is_set)
    except Failure as failure:
        check_not_stopped(stop)
        raise UserError(f"environment {config.environment.name}: {failure}") from None
    return EnvSpec.from_json(answer)


def check_not_stopped(stop: threading.Event) -> None:
    """Interrupted if the end is wanted already."""
    if stop.is_set():
        raise Interrupted("stopped before the run began") from None


def check_same_spec(run: Run, spec: EnvSpec) -> None:
    """UserError if the environment is not the one that a resumed run has learned in."""
    if spec.fingerprint != run.spec.fingerprint:
        raise UserError(
            f"the run in {run.folder} was made in another environment than the configuration, or the simulator that is "
            f"installed now, gives here: {differences(run.spec, spec)}. Set it back, or start a new run for that"
        )


def log_to(path: Path, level: str, limit_bytes: int = LIMIT_BYTES) -> None:
    """Send this process's log records of that level to a file; warnings go to stderr too. A full file becomes `.1`."""
    file = RotatingFileHandler(path, maxBytes=limit_bytes, backupCount=1, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # `clawq up` passes on what its learner says on stdout, and keeps stderr for the end.
    loud = logging.StreamHandler(sys.stdout if os.environ.get("CLAWQ_UP") else sys.stderr)
    loud.setLevel(logging.WARNING)
    loud.setFormatter(logging.Formatter("%(message)s"))
    # A full disk must not turn every line that cannot be written into a traceback.
    logging.raiseExceptions = False
    logging.basicConfig(level=level, handlers=[file, loud], force=True)
