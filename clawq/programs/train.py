"""The learner's main loop: commit, sample, update, publish, checkpoint, until the budget is spent.

    while the run goes on:
        intake.commit()                      # staged fragments into the ring, as the rate limiter allows
        if limiter.can_sample(B): updater.update(batch)
        else:                     wait for a fragment
        now and then:             publish weights, checkpoint, tell the gauges

One thread runs it; reading and publishing have threads of their own (`Consumer`, `Link`), and a checkpoint is written
by a third while updates go on. What the loop looks after is in modules of its own: weights (`publishing`), evaluations
(`appraisal`), checkpoints (`safekeeping`, `learner_state`), events (`inbox`), waits (`complaints`), numbers (`gauges`).
Composition and the ends of a run are in `clawq.programs.learner`.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from clawq import progress
from clawq.errors import RoundTimeout
from clawq.programs import learning
from clawq.programs.appraisal import Appraisal
from clawq.programs.complaints import Complaints
from clawq.programs.flow import FlowGauge
from clawq.programs.gauges import Gauges
from clawq.programs.inbox import Inbox
from clawq.programs.learner_state import LearnerState
from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.programs.publishing import Publishing
from clawq.programs.safekeeping import Safekeeping
from clawq.programs.schedule import PROGRESS_STEPS
from clawq.programs.tempo import Turn
from clawq.types import Metrics

#: Fragments committed between two updates at the most: committing must not starve the updates.
COMMITS_PER_UPDATE = 4
#: How long the loop waits for a fragment when it can neither commit nor sample, seconds.
IDLE_WAIT_S = 0.05
#: How often everything beside the updates is looked after, seconds.
LOOK_INTERVAL_S = 0.02
#: How often the board and the writers get numbers, seconds.
GAUGE_INTERVAL_S = 1.0
#: Rounds that go on without somebody are told this often, seconds; all are counted.
ROUND_INTERVAL_S = 30.0


class Trainer:
    """Runs the loop.

    Args:
        parts: see Parts.
        identity: what a checkpoint must name to be recognised (run tag, spec, config).
        report: called every second with the run's numbers, for the metric writers.

    Attributes:
        stage: what it is doing, for people.
        ending: why it ends, other than by budget or by somebody's wish.
    """

    def __init__(
        self, parts: Parts, identity: Mapping[str, Any], report: Callable[[int, float, Metrics], None]
    ) -> None:
        self.parts = parts
        self.stage, self.ending = "waiting for actors", ""
        self.notices = Notices(time.monotonic)
        self._flow = FlowGauge(parts.intake, parts.consumer, parts.link)
        self.publishing = Publishing(parts, self._flow)
        self.safekeeping = Safekeeping(parts, self.notices)
        self.appraisal = Appraisal(parts, self.safekeeping.saver, self.notices, report)
        self.state = LearnerState(parts, identity, self.publishing, self.appraisal)
        self._complaints = Complaints(parts, self.notices)
        self.inbox = Inbox(parts, self.notices, self.appraisal, self._complaints, self.state)
        self._gauges = Gauges(parts, self.notices, self.appraisal, report)
        #: Spent share of the budget that updates are told, in 1/PROGRESS_STEPS: it changes rarely, to be recorded.
        self._thousandths = 0
        self._looked_s = self._gauged_s = -math.inf
        self._mine = progress.mine()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self, stop: threading.Event) -> None:
        """Train until the budget is spent or `stop` is set.

        Raises LearnerError when learning cannot go on, ClaimLost when another learner took the run over.
        """
        parts = self.parts
        self._note_progress(time.monotonic())
        # The very first update may hang already.
        self._mine.moved("step")
        while not stop.is_set() and not parts.budget.spent(time.monotonic(), parts.tempo.env_steps):
            committed = parts.intake.commit(COMMITS_PER_UPDATE, self.publishing.version)
            self._complaints.committed(committed)
            if committed:
                parts.budget.start(time.monotonic())
            updated = parts.tempo.may_update(committed) and self._update_once()
            if not committed and not updated:
                self._idle(time.monotonic())
            now_s = time.monotonic()
            self._flow.look(now_s)
            if now_s - self._looked_s >= LOOK_INTERVAL_S:
                self._looked_s = now_s
                self._now_and_then(now_s, stop)

    def _update_once(self) -> bool:
        parts, replay = self.parts, self.parts.config.replay
        if not parts.limiter.can_sample(replay.transitions) or not parts.sampler.ready(replay.drawn):
            return False
        parts.recorder.updated(self._thousandths)
        learning.update(parts, self._thousandths / PROGRESS_STEPS, self.publishing.version)
        self.stage = "training"
        self._complaints.updated()
        return True

    def _note_progress(self, now_s: float) -> None:
        self._thousandths = int(PROGRESS_STEPS * self.parts.tempo.progress(now_s))

    def _idle(self, now_s: float) -> None:
        """Nothing can be committed or updated: as the tempo says."""
        try:
            turn = self.parts.tempo.idle(now_s, self.parts.config.rate_limit.timeout_s)
        except RoundTimeout as error:
            # Workers may come and go, so a long wait is no error of the run.
            self._complaints.round_timed_out(error)
            turn = Turn("publish")
        if turn.word:
            self.notices.tell_now_and_then("round", turn.word, ROUND_INTERVAL_S)
        if turn.action == "wait":
            self.stage = self._complaints.waiting() or self.stage
            self.parts.intake.wait(IDLE_WAIT_S)
        elif turn.action == "publish" and not self._evaluate_when_due(now_s):
            self.publish()
        # Of the same round, every update is told the same.
        self._note_progress(now_s)
        self._checkpoint_when_due(now_s)

    def _now_and_then(self, now_s: float, stop: threading.Event) -> None:
        # The loop turns, and that is shown here, in the loop: for the watchdog, which asks for nothing more.
        self._mine.moved("step")
        if self._mine.stop_wanted:
            stop.set()
        self.parts.link.check()
        self._note_progress(now_s)
        self.safekeeping.look()
        if self.parts.tempo.free:
            self.publishing.when_due(now_s)
        if now_s - self._gauged_s >= GAUGE_INTERVAL_S:
            self._gauged_s = now_s
            self.gauge()
            self.parts.recorder.flush()
            self.inbox.read(stop)
            self._end_with_source(stop)
        self._checkpoint_when_due(now_s)
        if self.parts.tempo.free:
            self._evaluate_when_due(now_s)

    def _evaluate_when_due(self, now_s: float) -> bool:
        """Publish weights and ask for their evaluation if it is time for that; whether it was."""
        if not self.appraisal.due(now_s):
            return False
        self.publish("training")
        self.appraisal.begin(self.state.snapshot())
        return True

    def _checkpoint_when_due(self, now_s: float) -> None:
        if self.safekeeping.due(now_s) and self.parts.tempo.settled:
            self.checkpoint()

    def _end_with_source(self, stop: threading.Event) -> None:
        """A follower ends with the run that it follows, once all that it read is in its ring."""
        parts = self.parts
        how = parts.link.source_ended
        if how is None or parts.consumer.staged[0] or parts.intake.pending:
            return
        self.ending = f"the run that it follows, {parts.config.source and parts.config.source.run}, has {how}"
        if how == "finished":
            parts.budget.reached = parts.budget.reached or self.ending
        elif how == "stopped":
            stop.set()

    # --- also from without the loop ----------------------------------------------------------------------------------

    def publish(self, wanted: str | None = None) -> int:
        """Publish the current weights; see Publishing."""
        return self.publishing.publish(wanted)

    def checkpoint(self, wait: bool = False) -> None:
        """Write a checkpoint beside the loop; skipped while another one is being written, unless `wait`."""
        if self.safekeeping.saver.busy and not wait:
            return
        self.safekeeping.save(self.state.snapshot())
        self.safekeeping.look(wait)

    def gauge(self) -> None:
        """Send the run's numbers to the board and to the writers."""
        self._gauges.show(self.publishing.version, self.stage)

    def numbers(self) -> Metrics:
        """The run's numbers by the names of clawq.metrics.CATALOGUE."""
        return self._gauges.read(self.publishing.version)

    def close(self) -> None:
        """End the saver after what it is writing, and the schedule."""
        self.safekeeping.saver.close()
        self.parts.recorder.close()
