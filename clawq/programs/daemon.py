"""`clawq learner start`: from a configuration to a finished run, in an order that wastes no second.

The run is claimed and registered, and its coordinator started, before torch is imported: so workers get leases and
their actors boot while the learner is still loading.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawq.config import RunConfig
from clawq.cores import thread_env
from clawq.errors import UserError
from clawq.programs.run import Run, create_run, new_run_id, open_run, prepare_folder
from clawq.programs.servers import servers_for
from clawq.programs.session import open_session
from clawq.spawning.failure import Failure
from clawq.spawning.logfile import LogFile
from clawq.spawning.program import run_program
from clawq.spawning.spawner import Spawner
from clawq.specs import EnvSpec

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


def run_daemon(order: Order, stop: threading.Event, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a learner to its end; returns the report.

    Raises UserError, TransportError, LearnerError or ClaimLost, each with a text for people.
    """
    spawner = Spawner()
    kept = open_run(order.resume, order.config) if order.resume is not None else None
    config = kept.config if kept is not None else order.config
    if config is None:
        raise UserError("a new run needs a configuration")
    run_id = kept.id if kept is not None else order.run_id or new_run_id(config, time.time())
    with servers_for(config.redis, run_id, "learner", say) as servers:
        run = kept or new_run(config, run_id, spawner)
        log_to(run.logs / "learner.log")
        say(f"run {run.id} in {run.folder}")
        with open_session(run, servers.broker_url, servers.data_url, spawner) as session:
            from clawq.programs.learner import run_learner

            return run_learner(session, stop, say, resume=kept is not None)


def new_run(config: RunConfig, run_id: str, spawner: Spawner) -> Run:
    """Ask the environment what it is, and make the run's folder."""
    folder = prepare_folder(config, run_id)
    spec = probe(config, spawner, LogFile(folder / "logs" / "probe.log"))
    return create_run(config, run_id, spec)


def probe(config: RunConfig, spawner: Spawner, log_file: LogFile) -> EnvSpec:
    """The environment's spec, found out in a process of its own; UserError with its own words if that fails."""
    request = {"environment": config.environment.model_dump(mode="json")}
    try:
        answer = run_program(spawner, "clawq.programs.probe", request, log_file, PROBE_S, thread_env(1))
    except Failure as failure:
        raise UserError(f"environment {config.environment.name}: {failure}") from None
    return EnvSpec.from_json(answer)


def log_to(path: Path) -> None:
    """Send this process's log records to a file; warnings go to stderr too."""
    level = os.environ.get("CLAWQ_LOG_LEVEL", "INFO").upper()
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loud = logging.StreamHandler(sys.stderr)
    loud.setLevel(logging.WARNING)
    loud.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[file, loud], force=True)
