"""The coordinator of one run: `python -m clawq.control.coordinator RUN_ID`, a child of the learner.

It is started early, since Celery takes a while to load, and begins with the first line on its stdin: by then its run is
registered. Four times a second it looks (registry, queue, heartbeats, control record, events) and does what `reconcile`
says: it keeps leases waiting and sends evaluations. It holds nothing that it could not derive again, so it may be
killed and started at any time. A run that is stopped, or not registered (the broker lost it, the learner will register
it again), has no leases. It ends when its stdin ends, which is when the learner is gone; then the run's queues are
emptied. A run that another learner has taken over, and registered as its own, is left alone: that one has a coordinator
too, and the queues are shared.

Redis being away is waited out. URLs come from CLAWQ_BROKER_URL and CLAWQ_DATA_URL, never from argv.
"""

import logging
import math
import os
import select
import sys
import time
from typing import Any

from celery import Celery
from pydantic import ValidationError

from clawq import progress
from clawq.config import RunConfig
from clawq.control.celery_settings import make_app, send_command
from clawq.control.evaluations import Evaluations
from clawq.control.queues import ACTIVE_STATES, lease_queue, run_queues, task_queue
from clawq.control.reconcile import (
    Action,
    Desired,
    DropLeases,
    Evaluation,
    GiveUp,
    ReportGone,
    SendEvaluation,
    SendLeases,
    Snapshot,
    reconcile,
)
from clawq.control.regulator import FLOW_NAMES, FlowMeter, Pace, Regulator, Wishes, set_point_s
from clawq.control.settings import HostSettings
from clawq.errors import ClawqError, TransportError, UserError, WeightsGone
from clawq.transport.client import connect
from clawq.transport.control import (
    Board,
    ControlRecord,
    Events,
    Heartbeats,
    PaceRecord,
    RunRecord,
    RunRegistry,
)
from clawq.transport.pins import Pins

log = logging.getLogger(__name__)

PERIOD_S = 0.25
#: The registry is read every so many looks.
_REGISTRY_LOOKS = 4
_LONGEST_BACK_OFF_S = 5.0


class Coordinator:
    """Looks and acts; all decisions are in `clawq.control.reconcile`.

    Args:
        run: the run's record.
        broker_url: Celery and the registry.
        data_url: control record, heartbeats, events.
    """

    def __init__(self, run: RunRecord, broker_url: str, data_url: str) -> None:
        self.run = run
        self._config = _config_of(run)
        self._sender: Celery = make_app(broker_url)
        self._broker: Any = self._sender.connection_for_write()
        self._broker_errors = (OSError, *self._broker.connection_errors, *self._broker.channel_errors)
        self._registry = RunRegistry(connect(broker_url))
        data = connect(data_url)
        self._control = ControlRecord(data, run.keys)
        self._heartbeats = Heartbeats(data, run.keys)
        self._events = Events(data, run.keys)
        self._board = Board(data, run.keys)
        self._pace_record = PaceRecord(data, run.keys, run.created_ms)
        self._meter, self._regulator = FlowMeter(), Regulator()
        self._pace: Pace | None = None
        self._pins = Pins(data, run.keys)
        self._evaluations = Evaluations(self._config.evaluation.episodes)
        self._last_event = "0-0"
        self._looks = 0
        self._registered, self._taken_over = True, False

    def turn(self, now_s: float) -> list[Action]:
        """Look once, act once; returns what was done. Raises TransportError while a Redis is away."""
        if self._looks % _REGISTRY_LOOKS == 0:
            self._look_up()
        self._looks += 1
        if self._taken_over:
            return []
        try:
            snapshot = self._look(now_s)
            self._regulate(snapshot.slots, now_s)
            actions = reconcile(self._desired(), snapshot, now_s)
            for action in actions:
                self._act(action, now_s)
        except self._broker_errors as error:
            # A broken connection is of no further use; the next turn opens another one.
            self._broker.release()
            self._broker = self._sender.connection_for_write()
            raise TransportError(f"the broker cannot be reached: {error}") from error
        return actions

    def empty_queues(self) -> None:
        """Drop what is left in the run's queues, unless another learner has the run now.

        Raises TransportError if the broker is away.
        """
        self._look_up()
        if self._taken_over:
            log.info("another learner has taken the run over; its queues are left as they are")
            return
        try:
            for name in run_queues(self.run.run_id):
                self._broker.default_channel.queue_purge(name)
        except self._broker_errors as error:
            raise TransportError(f"the broker cannot be reached: {error}") from error

    def _look_up(self) -> None:
        record = self._registry.get(self.run.run_id)
        self._registered = record is not None and record.state in ACTIVE_STATES
        self._taken_over = record is not None and not record.same_session(self.run)
        if record is not None and not self._taken_over and record.config != self.run.config:
            # Its learner was told to go on under other settings.
            self._take(record)

    def _take(self, record: RunRecord) -> None:
        try:
            self._config = _config_of(record)
        except UserError as error:
            log.warning("%s; going on under the settings known before", error)
        self.run = record

    def _desired(self) -> Desired:
        control = self._control.read()
        return Desired(
            # A run with a source learns from that one's actors.
            collect=self._registered and self._config.source is None and not (control is not None and control.stop),
            max_actors=self._config.actors.max_actors if self._pace is None else self._pace.actors,
            evaluation_timeout_s=self._config.evaluation.timeout_s,
        )

    def _regulate(self, slots: int, now_s: float) -> None:
        """Decide the pace and hand it over: the window to the learner, the number of actors to our own leases."""
        config = self._config
        if config.sync is not None:
            return  # rounds have a pace of their own
        flow = self._meter.observe(self._board.pick([f"flow/{name}" for name in FLOW_NAMES]))
        if flow is None:
            return
        wishes = Wishes(
            config.redis.window_bytes, config.actors.max_actors, config.actors.fragment_s, config.staleness.target
        )
        pace = self._regulator.decide(flow, wishes, slots, now_s)
        if pace is None:
            return
        self._pace = pace
        self._pace_record.write(pace.window_bytes)
        told = {"window_bytes": pace.window_bytes, "actors": pace.actors, "set_point_s": set_point_s(flow, wishes)}
        if math.isfinite(flow.delay_s):
            told["delay_s"] = flow.delay_s
        self._board.write({f"pace/{name}": value for name, value in told.items()})

    def _look(self, now_s: float) -> Snapshot:
        # To the end: acting on half of what happened would do again what was done.
        while page := self._events.read(self._last_event):
            for event in page:
                self._last_event = event.id
                self._evaluations.take(event, now_s)
        living = self._heartbeats.read()
        self._evaluations.look_for(living, now_s)
        beats = living.values()
        return Snapshot(
            waiting=self._waiting(),
            slots=sum(beat.slots for beat in beats),
            busy=sum(beat.busy for beat in beats),
            evaluations=self._evaluations.outstanding,
        )

    def _waiting(self) -> int:
        declared = self._broker.default_channel.queue_declare(queue=lease_queue(self.run.run_id))
        return int(declared.message_count)

    def _act(self, action: Action, now_s: float) -> None:
        run_id = self.run.run_id
        match action:
            case SendLeases(count):
                for _ in range(count):
                    self._send("clawq.rollout", lease_queue(run_id), seconds=self._config.actors.lease_s)
            case DropLeases():
                self._broker.default_channel.queue_purge(lease_queue(run_id))
            case SendEvaluation():
                self._send_evaluation(action, now_s)
            case GiveUp(evaluation, reason):
                self._report_failure(evaluation, reason, f"given up: {reason}")
            case ReportGone(evaluation):
                self._report_failure(evaluation, "gone", f"worker {evaluation.worker} is gone")

    def _report_failure(self, evaluation: Evaluation, reason: str, error: str) -> None:
        log.warning("evaluation of weights %d: %s", evaluation.version, error)
        facts: dict[str, Any] = {"id": evaluation.id, "label": evaluation.label, "version": evaluation.version}
        self._events.append("evaluation_failed", **facts, reason=reason, error=error)

    def _send_evaluation(self, action: SendEvaluation, now_s: float) -> None:
        evaluation = action.evaluation
        try:
            # Pinned, or it would be gone before a worker has imported torch.
            self._pins.pin(evaluation.version, f"evaluation-{evaluation.label or 'any'}")
        except WeightsGone:
            # It may not have been published yet; if it never is, the evaluation is given up in time.
            return
        self._send(
            "clawq.evaluate",
            task_queue(self.run.run_id),
            version=evaluation.version,
            episodes=evaluation.episodes,
            seed=self._config.evaluation.seed,
            label=evaluation.label,
            evaluation=evaluation.id,
            timeout_s=self._config.evaluation.timeout_s,
        )
        self._evaluations.sent(evaluation, now_s)

    def _send(self, task: str, queue: str, **arguments: Any) -> None:
        send_command(self._sender, task, queue, self._broker, run_id=self.run.run_id, **arguments)


def find_run(broker_url: str, run_id: str) -> RunRecord:
    """The record of a run. Raises UserError if there is none."""
    run = RunRegistry(connect(broker_url)).get(run_id)
    if run is None:
        raise UserError(f"there is no run {run_id!r} on this broker; `clawq status` lists the runs")
    return run


def _config_of(run: RunRecord) -> RunConfig:
    """A run's settings. Raises UserError for a record that somebody else wrote."""
    try:
        return RunConfig.model_validate(run.config)
    except ValidationError as error:
        raise UserError(f"the settings of {run.run_id} in the registry cannot be read: {error.errors()[0]}") from None


def coordinate(coordinator: Coordinator) -> None:
    """Turn after turn until stdin ends; then the queues of the run are emptied."""
    away_s, mine = 0.0, progress.mine()
    while not _stdin_ended(max(PERIOD_S, away_s)):
        try:
            coordinator.turn(time.monotonic())
            away_s = 0.0
        except TransportError as error:
            if not away_s:
                log.warning("%s; waiting for it", error)
            away_s = min(max(0.5, away_s * 2), _LONGEST_BACK_OFF_S)
        mine.moved("serve")
        if mine.stop_wanted:
            break
    try:
        coordinator.empty_queues()
    except TransportError as error:
        log.warning("the queues of the run could not be emptied: %s", error)


def _stdin_ended(timeout_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 65_536)


def main() -> int:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if not os.read(sys.stdin.fileno(), 65_536):
        return 0
    try:
        broker_url, data_url = HostSettings.from_host().require_urls()
        coordinate(Coordinator(find_run(broker_url, sys.argv[1]), broker_url, data_url))
    except ClawqError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
