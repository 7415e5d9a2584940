"""A learner's session: the run claimed and registered, its coordinator started, everything given back at the end.

This part is light (no torch), so that a run is known to its workers, and their actors boot, while the learner is still
importing. One learner for each run: the claim is exclusive, with a time limit that Redis keeps.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clawq import progress
from clawq.errors import ClaimHeld, ClaimLost, TransportError, UserError
from clawq.programs.following import Source
from clawq.programs.keeper import Keeper
from clawq.programs.renewal import Renewal
from clawq.programs.run import Run, without_secrets
from clawq.registry import Registration
from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Child, Spawner
from clawq.transport.claims import Claim, holder_of
from clawq.transport.client import check_server, connect
from clawq.transport.control import ControlRecord, Events, Orders, RunRecord, RunRegistry, end_run
from clawq.transport.keys import RunKeys
from clawq.transport.restarts import bear
from clawq.transport.weights import WeightsPublisher

log = logging.getLogger(__name__)

#: The learner's claim runs out when it was silent for so long, seconds.
CLAIM_TTL_S = 10.0
#: Seconds without a look after which a coordinator counts as hung; until its run is registered it waits for any time.
COORDINATOR_LIMITS = {"serve": 60.0}
#: Reward, ends and validity of one env step in a fragment, about, bytes.
ROW_SCALARS_BYTES = 8


@dataclass(slots=True)
class Session:
    """An open run: clients, claim, and what it will be called when it is over.

    `after` are the ids of the newest event and of the newest order of earlier sessions of the run: what they were told
    is no word to this one.
    `source` is the run that it follows, if it follows one.
    """

    run: Run
    broker_url: str
    data_url: str
    broker: Any
    data: Any
    keys: RunKeys
    claim: Claim
    spawner: Spawner
    record: RunRecord
    state: str = "running"
    after: tuple[str, str] = ("0-0", "0-0")
    keeper: Keeper | None = None
    renewal: Renewal | None = None
    source: Source | None = None

    @property
    def streams(self) -> RunKeys:
        """Keys of the run whose streams are read."""
        return self.keys if self.source is None else self.source.keys

    def take_over_claim(self) -> None:
        """The caller renews the claim from now on; until then it is done for whoever loads. ClaimLost if it is lost."""
        self.end_renewal()
        self.claim.renew()

    def end_renewal(self) -> None:
        """Nobody renews the claim any more beside the caller. Idempotent."""
        if self.renewal is not None:
            self.renewal.close()


@contextmanager
def open_session(
    run: Run, broker_url: str, data_url: str, spawner: Spawner, coordinator: Child | None = None
) -> Iterator[Session]:
    """Claim and register the run; afterwards tell its actors to stop, and give everything back.

    Args:
        run: to be opened.
        broker_url: Celery and the registry.
        data_url: everything else.
        spawner: starts coordinators.
        coordinator: the first one, if it has been started already (see `start_coordinator`).
    """
    broker, data = connect(broker_url), connect(data_url)
    check_server(broker, "broker")
    check_server(data, "data")
    keys = RunKeys(run.tag)
    check_name_is_free(run, RunRegistry(broker), data)
    holder = f"learner {run.id} on {socket.gethostname()}, pid {os.getpid()}"
    try:
        claim = Claim.take(data, keys.claim("learner"), holder, CLAIM_TTL_S)
    except ClaimHeld as error:
        raise UserError(
            f"run {run.id} has a learner already: {error.holder}. Stop it with `clawq learner stop {run.id}`, or start "
            f"another run. (If that learner was killed on another machine, its claim runs out within "
            f"{CLAIM_TTL_S:.0f} s.)"
        ) from None
    progress.mine().holds("learner")
    record = RunRecord(
        run_id=run.id,
        tag=run.tag,
        config=without_secrets(run.config).model_dump(mode="json"),
        spec=run.spec.to_json(),
        state="running",
        created_ms=int(time.time() * 1000),
        learner={"host": socket.gethostname(), "pid": os.getpid(), "folder": str(run.folder)},
    )
    session = Session(run, broker_url, data_url, broker, data, keys, claim, spawner, record, renewal=Renewal(claim))
    try:
        bear(data, keys)
        session.after = (Events(data, keys).newest_id(), Orders(data, keys).newest_id())
        start = partial(start_coordinator, spawner, run.id, run.tag, run.logs, broker_url, data_url)
        session.keeper = Keeper(record, claim, broker, start, coordinator)
        yield session
    finally:
        if session.keeper is not None:
            session.keeper.close()
        session.end_renewal()
        close_session(session)


def check_name_is_free(run: Run, registry: RunRegistry, data: Any) -> None:
    """UserError if another living run has that name here: workers would serve only one of the two."""
    other = registry.get(run.id)
    if other is None or other.tag == run.tag:
        return
    holder = holder_of(data, other.keys.claim("learner"))
    if holder is not None:
        raise UserError(
            f"the name {run.id} is taken on this Redis by another run ({holder}). Choose another one with --run NAME"
        )


def invite_actors(session: Session) -> None:
    """Let actors of a new run begin before its learner has loaded torch: under version 1 they explore at random.

    The version holds nothing to load (`updates` is 0); the learner's first own weights follow as version 2.
    """
    ControlRecord(session.data, session.keys, session.claim).write(
        stop=False, window_bytes=first_window(session.run) or session.run.config.redis.window_bytes, config_epoch=1
    )
    publisher = WeightsPublisher(session.data, session.keys, session.claim)
    publisher.publish({"nothing": np.zeros(1, np.float32)}, 1, updates=0)


def first_window(run: Run) -> int | None:
    """The window until the coordinator knows what the learner takes; None where rounds pace the run.

    Enough for one actor to fill the ring for the first update: what more is made while the learner still loads would
    be old before it is learned from.
    """
    config = run.config
    if config.sync is not None:
        return None
    row_bytes = sum(one.nbytes for one in run.spec.obs.values()) + 4 * run.spec.action.size + ROW_SCALARS_BYTES
    needed = row_bytes * config.rate_limit.min_size_to_sample
    return min(config.redis.window_bytes, needed)


def close_session(session: Session) -> None:
    """Take the run off the list, and its keys too if it is done; what cannot be reached is left to run out.

    A run that another learner has taken over is that one's: every step is fenced, since we may not know it yet.
    """
    try:
        # A claim that lapsed unnoticed and that nobody took is ours to take again.
        session.claim.renew()
        ControlRecord(session.data, session.keys, session.claim).write(stop=True)
        RunRegistry(session.broker).withdraw(session.record)
        if session.state == "done":
            end_run(session.data, session.keys, session.claim)
        session.claim.release()
    except ClaimLost as error:
        log.warning("run %s is left as it is: %s", session.run.id, error)
    except TransportError as error:
        log.warning("while closing run %s: %s", session.run.id, error)
    finally:
        session.broker.close()
        session.data.close()


def start_coordinator(spawner: Spawner, run_id: str, tag: str, logs: Path, broker_url: str, data_url: str) -> Child:
    """Exec a coordinator: it loads Celery, and begins when it is told that its run is registered. It ends with us."""
    env = {"CLAWQ_BROKER_URL": broker_url, "CLAWQ_DATA_URL": data_url, "CLAWQ_RUN": tag}
    log_file = LogFile(logs / "coordinator.log")
    known = Registration("coordinator", f"coordinator {run_id}", COORDINATOR_LIMITS)
    return spawner.spawn(["clawq.control.coordinator", run_id], log_file, env, pipes=True, registration=known)
