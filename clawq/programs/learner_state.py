"""A learner's state, as a checkpoint holds it (DESIGN §5): everything that a resumed learner needs but the ring's rows.

It also counts the run's sessions: one for each process that learned for it. Where a session begins is recorded in the
schedule, because what an earlier one did after our checkpoint did not happen.
"""

import time
from collections.abc import Mapping
from typing import Any

from clawq.programs.appraisal import Appraisal
from clawq.programs.parts import Parts
from clawq.programs.publishing import Publishing
from clawq.programs.resume import ring_state
from clawq.programs.run import without_secrets
from clawq.programs.saver import Snapshot


class LearnerState:
    """Takes the state, and puts it back.

    Args:
        parts: of the learner.
        identity: what a checkpoint must name to be recognised (run tag, spec, config).
        publishing: knows the weights version.
        appraisal: knows the best return.

    Attributes:
        sessions: processes that this run has had, this one included once its session began.
    """

    def __init__(self, parts: Parts, identity: Mapping[str, Any], publishing: Publishing, appraisal: Appraisal) -> None:
        self.sessions = 0
        self._parts, self._identity = parts, dict(identity)
        self._publishing, self._appraisal = publishing, appraisal
        self._schedule_position = 0

    def configured(self) -> None:
        """The configuration was changed live: what a checkpoint says of it, a resume compares with."""
        self._identity["config"] = without_secrets(self._parts.config).model_dump(mode="json")

    def snapshot(self) -> Snapshot:
        """The state now, to be saved, with the ring's rows where these are saved."""
        parts = self._parts
        ring = None if parts.snapshots is None else parts.snapshots.cut()
        return Snapshot(self._publishing.version, self.state_dict(), parts.consumer.committed_cursors(), ring)

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors and plain values; copies."""
        parts = self._parts
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
            "version": self._publishing.version,
            "updates": parts.updater.updates,
            "skipped_updates": parts.updater.skipped,
            "env_steps": parts.intake.env_steps,
            "used_s": parts.budget.used_s(time.monotonic()),
            "best_return": self._appraisal.best_return,
            "schedule": {"position": parts.recorder.mark(), "sessions": self.sessions},
        }

    def load_state_dict(self, state: Mapping[str, Any], head: int) -> None:
        """Go on from a checkpoint; its ring is here again (`clawq.programs.resume`), as far as there is a log.

        Versions never go back: the next one is above both the checkpoint's and `head`.
        """
        parts = self._parts
        parts.batches.rewind()
        parts.updater.algorithm.load_state_dict(state["algorithm"])
        parts.limiter.load_state_dict(state["limiter"])
        parts.sampler.load_state_dict(state["sampler"])
        # A run may get demonstrations, or lose them, when it is resumed.
        if parts.demonstrations is not None and state.get("demonstrations") is not None:
            parts.demonstrations.load_state_dict(state["demonstrations"])
        parts.ageing.load_state_dict(state.get("staleness", {}))
        parts.tempo.load_state_dict(state.get("rounds", {}))
        self._publishing.version = max(int(state["version"]), head)
        parts.updater.updates = self._publishing.updates = int(state["updates"])
        parts.updater.skipped = int(state["skipped_updates"])
        parts.intake.env_steps = int(state["env_steps"])
        parts.budget.used_before_s = float(state["used_s"])
        self._appraisal.best_return = float(state["best_return"])
        # Checkpoints of older versions of clawq have no schedule.
        schedule = state.get("schedule", {"position": -1, "sessions": 0})
        self.sessions, self._schedule_position = int(schedule["sessions"]), int(schedule["position"])

    def begin_session(self, facts: Mapping[str, Any]) -> None:
        """Record that this process goes on from here: what an earlier one did after our checkpoint did not happen.

        Args:
            facts: JSON-able; what learning depends on beside the log (see schedule.SessionBegun).
        """
        parts = self._parts
        self.sessions += 1
        version = self._publishing.version
        told = {"n": self.sessions, "updates": parts.updater.updates, "version": version, **facts}
        if parts.demonstrations is not None:
            told["demonstrations"] = parts.demonstrations.digest
        parts.recorder.begin(told, self._schedule_position)
        parts.quarantine.record()
