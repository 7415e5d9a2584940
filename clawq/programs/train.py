"""The learner's main loop: commit, sample, update, publish, checkpoint, until the budget is spent.

    while the run goes on:
        intake.commit()                      # staged fragments into the ring, as the rate limiter allows
        if limiter.can_sample(B): updater.update(batch)
        else:                     wait for a fragment
        now and then:             publish weights, checkpoint, tell the gauges

One thread runs it; reading and publishing have threads of their own (`Consumer`, `Link`), and a checkpoint is written
by a third while updates go on. Composition and the ends of a run are in `clawq.programs.learner`.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from clawq.config import RunConfig
from clawq.errors import ActorFailed, ConfigError, RateLimitTimeout, RoundTimeout
from clawq.programs import learning, tuning
from clawq.programs.flow import FlowGauge
from clawq.programs.gauges import Gauges
from clawq.programs.link import Outgoing
from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.programs.resume import ring_state
from clawq.programs.run import without_secrets
from clawq.programs.saver import Saver, Snapshot
from clawq.programs.schedule import PROGRESS_STEPS
from clawq.programs.tempo import Turn
from clawq.replay.rate_limiter import Patience, Side
from clawq.transport.control import Event
from clawq.types import Metrics

#: Fragments committed between two updates at the most: committing must not starve the updates.
COMMITS_PER_UPDATE = 4
#: How long the loop waits for a fragment when it can neither commit nor sample, seconds.
IDLE_WAIT_S = 0.05
#: How often everything beside the updates is looked after, seconds.
LOOK_INTERVAL_S = 0.02
#: How often the board and the writers get numbers, seconds.
GAUGE_INTERVAL_S = 1.0
#: Share of the stream budget after which a checkpoint is due: streams are trimmed only behind checkpoints, and actors
#: that write faster than that must not fill the server meanwhile.
CHECKPOINT_SHARE = 0.25
#: Between two checkpoints while the streams are full and nothing but that makes room, seconds.
PRESSED_INTERVAL_S = 2.0
#: Actor failures after which a run that never got a fragment gives up.
FAILURES_AT_START = 5
#: Without a fragment for so long, the run counts as waiting for experience, seconds.
STARVED_S = 3.0
#: A run without a worker says so after this time, and again now and then, seconds.
LONELY_S, LONELY_INTERVAL_S = 5.0, 60.0
#: Rounds that go on without somebody are told this often, seconds; all are counted.
ROUND_INTERVAL_S = 30.0


class Trainer:
    """Runs the loop. `stage` says what it is doing, for people.

    Args:
        parts: see Parts.
        identity: what a checkpoint must name to be recognised (run tag, spec, config).
        report: called every second with the run's numbers, for the metric writers.
    """

    def __init__(
        self, parts: Parts, identity: Mapping[str, Any], report: Callable[[int, float, Metrics], None]
    ) -> None:
        self.parts = parts
        self.version = 0
        self.stage = "waiting for actors"
        self.best_return = -math.inf
        #: Why it ends, other than by budget or by somebody's wish.
        self.ending = ""
        #: Processes that this run has had, this one included once its session began.
        self.sessions = 0
        self._schedule_position = 0
        self.notices = Notices(time.monotonic)
        self._identity, self._report = dict(identity), report
        self._gauges = Gauges(parts)
        self._saver = Saver(parts.checkpoints, parts.recorder.sync, parts.link.checkpointed, parts.snapshots)
        self._candidate: Snapshot | None = None
        #: Version of the training evaluation that is under way.
        self._evaluating: int | None = None
        self._skipped_rows = 0
        self._patience = Patience(parts.limiter, parts.config.rate_limit.timeout_s, time.monotonic)
        #: Keeps a configuration that was changed live (in the run folder, and where workers see it).
        self.keep_config: Callable[[RunConfig], None] = lambda config: None
        self._flow = FlowGauge(parts.intake, parts.consumer, parts.link)
        self._stop = threading.Event()
        self._published_updates = -1
        #: Spent share of the budget that updates are told, in 1/PROGRESS_STEPS: it changes rarely, to be recorded.
        self._thousandths = 0
        self._looked_s = self._published_s = self._gauged_s = self._evaluated_s = -math.inf
        self._committed_s = self._checkpointed_s = time.monotonic()
        self._checkpointed_bytes = 0

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self, stop: threading.Event) -> None:
        """Train until the budget is spent or `stop` is set.

        Raises LearnerError when learning cannot go on, ClaimLost when another learner took the run over.
        """
        parts = self.parts
        self._stop = stop
        self._note_progress(time.monotonic())
        while not stop.is_set() and not parts.budget.spent(time.monotonic(), parts.tempo.env_steps):
            committed = parts.intake.commit(COMMITS_PER_UPDATE, self.version)
            self._watch_inserts(committed)
            if committed:
                self._committed_s = time.monotonic()
                parts.budget.start(self._committed_s)
            updated = parts.tempo.may_update(committed) and self._update_once()
            if not committed and not updated:
                self._idle(time.monotonic())
            now_s = time.monotonic()
            self._flow.look(now_s)
            if now_s - self._looked_s >= LOOK_INTERVAL_S:
                self._looked_s = now_s
                self._now_and_then(now_s)

    def _update_once(self) -> bool:
        parts, replay = self.parts, self.parts.config.replay
        if not parts.limiter.can_sample(replay.transitions) or not parts.sampler.ready(replay.drawn):
            return False
        parts.recorder.updated(self._thousandths)
        learning.update(parts, self._thousandths / PROGRESS_STEPS, self.version)
        self.stage = "training"
        self._patience.moved("sample")
        return True

    def _note_progress(self, now_s: float) -> None:
        self._thousandths = int(PROGRESS_STEPS * self.parts.tempo.progress(now_s))

    def _idle(self, now_s: float) -> None:
        """Nothing can be committed or updated: as the tempo says."""
        try:
            turn = self.parts.tempo.idle(now_s, self.parts.config.rate_limit.timeout_s)
        except RoundTimeout as error:
            # Workers may come and go, so a long wait is no error of the run.
            facts = {"version": error.version, "waited_s": round(error.waited_s, 1), "missing": error.missing}
            self.parts.link.notify("round_timeout", **facts)
            self.notices.tell(str(error))
            turn = Turn("publish")
        if turn.word:
            self.notices.tell_now_and_then("round", turn.word, ROUND_INTERVAL_S)
        if turn.action == "wait":
            self._wait()
        elif turn.action == "publish" and not self._evaluate_when_due(now_s):
            self.publish()
        # Of the same round, every update is told the same.
        self._note_progress(now_s)
        self._checkpoint_when_due(now_s)

    def _wait(self) -> None:
        """Nothing can be done now: wait for a fragment, and say what is missing."""
        parts = self.parts
        if parts.intake.fragments == 0:
            self.stage = "waiting for actors"
            self._complain_when_lonely(time.monotonic())
        elif not parts.tempo.free:
            self.stage = "filling the ring" if parts.limiter.filling else "waiting for a round"
            self._complain_when_lonely(time.monotonic())
        elif parts.limiter.filling:
            self.stage = "filling the ring"
            self._complain_when_stuck("sample")
        elif time.monotonic() - self._committed_s > STARVED_S:
            self.stage = "waiting for experience"
            self._complain_when_stuck("sample")
            self._complain_when_lonely(time.monotonic())
        parts.intake.wait(IDLE_WAIT_S)

    def _complain_when_lonely(self, now_s: float) -> None:
        """Without a worker nothing will ever come: say what to do about it."""
        if self.parts.link.figures().get("workers") == 0.0 and now_s - self._committed_s > LONELY_S:
            self.notices.tell_now_and_then(
                "lonely",
                "waiting: no worker serves this run; start one with `clawq worker start` on any machine that reaches "
                "this Redis",
                LONELY_INTERVAL_S,
            )

    def _watch_inserts(self, committed: int) -> None:
        """Follow whether inserting moves, or waits for samples."""
        if committed or not self.parts.intake.blocked:
            self._patience.moved("insert")
        else:
            self._complain_when_stuck("insert")
        if committed and self.parts.limiter.filling:
            self._patience.moved("sample")

    def _complain_when_stuck(self, side: Side) -> None:
        """Workers may come and go, and updates may be slow, so a long wait does not end the run; it is told."""
        try:
            self._patience.blocked(side)
        except RateLimitTimeout as error:
            self.notices.tell(str(error))
            low, high = error.bounds
            facts = {"side": side, "error": error.error, "low": low, "high": high, "waited_s": error.waited_s}
            self.parts.link.notify("rate_limit_timeout", **facts)

    def _now_and_then(self, now_s: float) -> None:
        self.parts.link.check()
        self._note_progress(now_s)
        self._note_refusals()
        if self.parts.tempo.free:
            self._publish_when_due(now_s)
        if now_s - self._gauged_s >= GAUGE_INTERVAL_S:
            self._gauged_s = now_s
            self.gauge()
            self.parts.recorder.flush()
            self._read_events()
            self._end_with_source()
        self._checkpoint_when_due(now_s)
        if self.parts.tempo.free:
            self._evaluate_when_due(now_s)

    # --- weights -----------------------------------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return self.parts.updater.updates > self._published_updates

    def _publish_when_due(self, now_s: float) -> None:
        if now_s - self._published_s >= self.parts.config.learner.publish_interval_s and self._has_news():
            self.publish()
            self._published_s = now_s

    def publish(self, wanted: str | None = None) -> int:
        """Hand the current weights to the link under the next version; returns it.

        Args:
            wanted: the label of an evaluation that needs this version: it is kept until the next one of that label.
        """
        updater = self.parts.updater
        self.version += 1
        self.parts.recorder.published(self.version)
        self._flow.published(time.monotonic())
        learning.advance(self.parts, self.version)
        self._published_updates = updater.updates
        arrays = {name: tensor.numpy() for name, tensor in updater.algorithm.weights().items()}
        metadata = {"env_steps": self.parts.intake.env_steps}
        pin = None if wanted is None else f"wanted-{wanted}"
        self.parts.link.publish(Outgoing(self.version, arrays, updater.updates, metadata, pin))
        self.parts.tempo.published(self.version)
        return self.version

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate_when_due(self, now_s: float) -> bool:
        """Publish weights and ask for their evaluation if it is time for that; whether it was.

        One at a time: with workers that are slower than the interval, newer ones would replace each before it began.
        """
        wanted = self.parts.config.evaluation
        interval_s = wanted.interval_s
        if interval_s is None or self.parts.updater.updates == 0:
            return False
        if self._evaluated_s == -math.inf:
            self._evaluated_s = now_s
        left_s = self.parts.budget.left_s(now_s)
        # One that would overlap with the final evaluation only takes cores away from the last updates.
        if now_s - self._evaluated_s < interval_s or (left_s is not None and left_s <= interval_s / 2):
            return False
        if self._evaluating is not None and now_s - self._evaluated_s < wanted.timeout_s:
            return False
        self._evaluated_s = now_s
        self._evaluating = version = self.publish("training")
        snapshot = self._snapshot()
        if snapshot.ring is not None:
            # Later the rows are gone: it is a checkpoint now, and gets its score when that is known.
            self._saver.save(snapshot)
        self._candidate = replace(snapshot, ring=None)
        self.request_evaluation(version, "training", wanted.episodes)
        return True

    def request_evaluation(self, version: int, label: str, episodes: int) -> None:
        """Ask the coordinator for an evaluation of these weights."""
        self.parts.link.notify("evaluation_wanted", version=version, label=label, episodes=episodes)

    def _read_events(self) -> None:
        events = self.parts.link.take_events()
        withdrawn = {event.facts.get("id") for event in events if event.kind == "tune_withdrawn"}
        for event in events:
            if event.id in withdrawn:
                continue
            if event.kind == "evaluation":
                self.take_evaluation(event.facts)
            else:
                self.take_event(event, self._stop)

    def take_event(self, event: Event, stop: threading.Event) -> None:
        """What an event other than an evaluation means at any time; `stop` is set if somebody wants that."""
        if event.kind == "stop_wanted":
            stop.set()
        elif event.kind == "tune_wanted":
            self._tune(event)
        elif event.kind == "quarantine_wanted":
            answer = self.parts.quarantine.command(event.facts)
            if answer is not None:
                self.parts.link.notify("quarantine", **answer)
        elif event.kind == "lease":
            self.notices.waited(event.facts)
        elif event.kind == "actor_failed":
            self._note_failure("actor", event.facts)
        elif event.kind == "evaluation_failed":
            self._evaluation_ended(event.facts)
            if event.facts.get("reason") != "superseded":
                self._note_failure("evaluation", event.facts)

    def _tune(self, event: Event) -> None:
        """Change settings live, between two updates, and answer."""
        link = self.parts.link
        try:
            if self.parts.budget.reached is not None:
                raise ConfigError("clawq tune", ["the run is over: it is being finished"])
            self.parts, changes = tuning.take(self.parts, event.facts.get("set"))
        except ConfigError as error:
            link.notify("tune_refused", id=event.id, mistakes=list(error.mistakes))
            return
        config, unkept = self.parts.config, ""
        # What a checkpoint says of the configuration, a resume compares with.
        self._identity["config"] = without_secrets(config).model_dump(mode="json")
        self._patience = Patience(self.parts.limiter, config.rate_limit.timeout_s, time.monotonic)
        try:
            self.keep_config(config)
        except OSError as error:
            unkept = f"in effect, but not written to the run folder: {error.strerror or error}"
        told = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
        self.notices.tell(f"changed live: {told or 'nothing'}")
        link.notify("tuned", id=event.id, changes=changes, unkept=unkept)

    def _note_failure(self, what: str, facts: Mapping[str, Any]) -> None:
        """Tell why something failed; if no actor has ever worked, end with its words instead of waiting for ever."""
        error, count = self.notices.failed(what, facts), self.notices.failures[what]
        if what == "actor" and self.parts.intake.fragments == 0 and count >= FAILURES_AT_START:
            raise ActorFailed(f"no actor could start; {count} tries failed. The last one: {error}")

    def take_evaluation(self, facts: Mapping[str, Any]) -> None:
        """An evaluation is done: show it, keep the best, end the run if it is good enough."""
        self._evaluation_ended(facts)
        names = ("mean_return", "std_return", "success", "mean_length", "version")
        try:
            told = {f"eval/{name}": float(facts[name]) for name in names if facts.get(name) is not None}
        except (TypeError, ValueError, OverflowError):
            told = {}
        numbers = {name: number for name, number in told.items() if math.isfinite(number)}
        if not {"eval/mean_return", "eval/version"} <= numbers.keys():
            self.notices.tell(
                "an evaluation that cannot be understood was left out; has that worker another version of clawq?"
            )
            return
        self._gauges.evaluation = numbers
        mean_return, success = numbers["eval/mean_return"], numbers.get("eval/success")
        self.parts.budget.scored(mean_return, success)
        if mean_return > self.best_return:
            self.best_return = mean_return
            self._keep_candidate(int(numbers["eval/version"]), mean_return)
        self._report(self.parts.intake.env_steps, self.parts.budget.used_s(time.monotonic()), numbers)

    def _evaluation_ended(self, facts: Mapping[str, Any]) -> None:
        if facts.get("version") == self._evaluating:
            self._evaluating = None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed learner needs (DESIGN §5), as tensors and plain values; copies."""
        parts = self.parts
        parts.batches.rewind()
        return {
            **self._identity,
            "algorithm": parts.updater.algorithm.state_dict(),
            "limiter": parts.limiter.state_dict(),
            "sampler": parts.sampler.state_dict(),
            "demonstrations": None if parts.demonstrations is None else parts.demonstrations.state_dict(),
            "consumer": parts.consumer.state_dict(),
            "ring": ring_state(parts.ring),
            "staleness": parts.ageing.state_dict(),
            "rounds": parts.tempo.state_dict(),
            "version": self.version,
            "updates": parts.updater.updates,
            "skipped_updates": parts.updater.skipped,
            "env_steps": parts.intake.env_steps,
            "used_s": parts.budget.used_s(time.monotonic()),
            "best_return": self.best_return,
            "schedule": {"position": parts.recorder.mark(), "sessions": self.sessions},
        }

    def load_state_dict(self, state: Mapping[str, Any], head: int) -> None:
        """Go on from a checkpoint; its ring is here again (`clawq.programs.resume`), as far as there is a log.

        Versions never go back: the next one is above both the checkpoint's and `head`.
        """
        parts = self.parts
        parts.batches.rewind()
        parts.updater.algorithm.load_state_dict(state["algorithm"])
        parts.limiter.load_state_dict(state["limiter"])
        parts.sampler.load_state_dict(state["sampler"])
        # A run may get demonstrations, or lose them, when it is resumed.
        if parts.demonstrations is not None and state.get("demonstrations") is not None:
            parts.demonstrations.load_state_dict(state["demonstrations"])
        parts.ageing.load_state_dict(state.get("staleness", {}))
        parts.tempo.load_state_dict(state.get("rounds", {}))
        self.version = max(int(state["version"]), head)
        parts.updater.updates = self._published_updates = int(state["updates"])
        parts.updater.skipped = int(state["skipped_updates"])
        parts.intake.env_steps = int(state["env_steps"])
        parts.budget.used_before_s = float(state["used_s"])
        self.best_return = float(state["best_return"])
        # Checkpoints of older versions of clawq have no schedule.
        schedule = state.get("schedule", {"position": -1, "sessions": 0})
        self.sessions, self._schedule_position = int(schedule["sessions"]), int(schedule["position"])

    def begin_session(self, facts: Mapping[str, Any]) -> None:
        """Record that this process goes on from here: what an earlier one did after our checkpoint did not happen.

        Args:
            facts: JSON-able; what learning depends on beside the log (see schedule.SessionBegun).
        """
        self.sessions += 1
        told = {"n": self.sessions, "updates": self.parts.updater.updates, "version": self.version, **facts}
        if self.parts.demonstrations is not None:
            told["demonstrations"] = self.parts.demonstrations.digest
        self.parts.recorder.begin(told, self._schedule_position)
        self.parts.quarantine.record()

    def checkpoint(self, wait: bool = False) -> None:
        """Write a checkpoint beside the loop; skipped while another one is being written, unless `wait`."""
        if self._saver.busy and not wait:
            return
        self._checkpointed_s, self._checkpointed_bytes = time.monotonic(), self.parts.intake.payload_bytes
        self._saver.save(self._snapshot())
        self._note_refusals(wait)

    def _end_with_source(self) -> None:
        """A follower ends with the run that it follows, once all that it read is in its ring."""
        parts = self.parts
        how = parts.link.source_ended
        if how is None or parts.consumer.staged[0] or parts.intake.pending:
            return
        self.ending = f"the run that it follows, {parts.config.source and parts.config.source.run}, has {how}"
        if how == "finished":
            parts.budget.reached = parts.budget.reached or self.ending
        elif how == "stopped":
            self._stop.set()

    def _checkpoint_when_due(self, now_s: float) -> None:
        late = now_s - self._checkpointed_s >= self.parts.config.learner.checkpoint_interval_s
        if (late or self._much_to_checkpoint()) and self.parts.tempo.settled:
            self.checkpoint()

    def _much_to_checkpoint(self) -> bool:
        if self.parts.link.pressed and time.monotonic() - self._checkpointed_s >= PRESSED_INTERVAL_S:
            return True
        fresh_bytes = self.parts.intake.payload_bytes - self._checkpointed_bytes
        return fresh_bytes >= CHECKPOINT_SHARE * self.parts.link.stream_budget_bytes

    def _snapshot(self) -> Snapshot:
        parts = self.parts
        ring = None if parts.snapshots is None else parts.snapshots.cut()
        return Snapshot(self.version, self.state_dict(), parts.consumer.committed_cursors(), ring)

    def _keep_candidate(self, version: int, score: float) -> None:
        """Save the state that made the evaluated weights, with its score."""
        if self._candidate is not None and self._candidate.version == version:
            self._saver.save(self._candidate, score)
            self._candidate = None

    def _note_refusals(self, wait: bool = False) -> None:
        self._saver.write_ahead()
        self._complain_of_slow_disk()
        for error in self._saver.refusals(wait):
            self.notices.tell(str(error))
            self.parts.link.notify("checkpoint_failed", error=str(error))

    def _complain_of_slow_disk(self) -> None:
        rings = self.parts.snapshots
        if rings is not None and rings.skipped > self._skipped_rows:
            self._skipped_rows = rings.skipped
            self.notices.tell_now_and_then(
                "snapshot",
                f"the disk is slower than the experience: {rings.skipped} rows of the replay ring were overwritten "
                "before they were written; a resume would miss them (learner.snapshot=never does without)",
                LONELY_INTERVAL_S,
            )

    def close(self) -> None:
        """End the saver after what it is writing, and the schedule."""
        self._saver.close()
        self.parts.recorder.close()

    # --- numbers -----------------------------------------------------------------------------------------------------

    def gauge(self) -> None:
        """Send the run's numbers to the board and to the writers."""
        numbers, link = self.numbers(), self.parts.link
        link.show(
            {**numbers, "stage": self.stage, "note": link.note or self.notices.recent, **self.parts.tempo.texts()}
        )
        self._report(self.parts.intake.env_steps, numbers["wall_s"], numbers)

    def numbers(self) -> Metrics:
        """The run's numbers by the names of clawq.metrics.CATALOGUE."""
        return self._gauges.read(self.version, self.notices.failures)
