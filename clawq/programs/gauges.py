"""Gauges: the run's numbers by the names of `clawq.metrics.CATALOGUE`, read from the learner's parts, and shown."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from clawq.programs.appraisal import Appraisal
from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.replay.ledger import STALE
from clawq.types import Metrics

#: Fragments beside the outbox that an actor killed by force may take with it: one in flight, one being built.
UNSENT_FRAGMENTS = 2


class Rate:
    """Events per second of a growing counter, over the last `window_s` seconds."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def observe(self, now_s: float, count: float) -> float:
        """Note the counter's value and return its rate."""
        self._points.append((now_s, count))
        while len(self._points) > 2 and now_s - self._points[0][0] > self._window_s:
            self._points.popleft()
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class Gauges:
    """Reads the parts.

    Args:
        parts: of the learner.
        notices: the newest is shown; they count failures.
        appraisal: has the numbers of the newest evaluation.
        report: see Trainer.
    """

    def __init__(
        self, parts: Parts, notices: Notices, appraisal: Appraisal, report: Callable[[int, float, Metrics], None]
    ) -> None:
        self._parts, self._notices, self._appraisal, self._report = parts, notices, appraisal, report
        self._env_rate, self._update_rate = Rate(), Rate()

    def show(self, version: int, stage: str) -> None:
        """Send all numbers to the board and to the writers.

        Args:
            version: the learner's weights version.
            stage: what the learner is doing, for people.
        """
        numbers, parts = self.read(version), self._parts
        note = parts.link.note or self._notices.recent
        parts.link.show({**numbers, "stage": stage, "note": note, **parts.tempo.texts()})
        self._report(parts.intake.env_steps, numbers["wall_s"], numbers)

    def read(self, version: int) -> Metrics:
        """All numbers now, under the learner's weights version."""
        parts = self._parts
        numbers = {**self._progress(version), **self._books(self._notices.failures)}
        numbers |= parts.sampler.metrics() | parts.quarantine.metrics()
        numbers |= {} if parts.demonstrations is None else parts.demonstrations.metrics()
        numbers |= parts.tempo.metrics()
        numbers |= {f"train/{name}": value for name, value in parts.updater.metrics.items()}
        numbers |= parts.ageing.metrics()
        numbers |= parts.link.figures() | parts.intake.metrics() | self._appraisal.numbers
        if parts.config.source is None:
            return numbers
        # The fragments' weights versions are those of the run that is followed.
        return {name: value for name, value in numbers.items() if not name.startswith("policy_lag/")}

    def _progress(self, version: int) -> Metrics:
        parts, now_s = self._parts, time.monotonic()
        steps, updates, budget = parts.intake.env_steps, parts.updater.updates, parts.budget
        left_s = budget.left_s(now_s)
        return {
            "env_steps": steps,
            "env_steps_per_s": self._env_rate.observe(now_s, steps),
            "updates": updates,
            "updates_per_s": self._update_rate.observe(now_s, updates),
            "samples_per_insert": parts.limiter.samples / max(1, parts.limiter.inserts),
            "wall_s": budget.used_s(now_s),
            "progress": budget.progress(now_s, steps),
            "weights_version": version,
            "ring/fill": parts.ring.fill,
            "ring/size": parts.ring.size,
            "limiter/error": parts.limiter.error,
            "non_finite_updates": parts.updater.skipped,
            **({} if left_s is None else {"time_left_s": left_s}),
        }

    def _books(self, failures: Mapping[str, int]) -> Metrics:
        """What became of everything that actors made: nothing is missing without a name."""
        counts = self._parts.consumer.counts
        # The bound of what a kill may cost: its outbox, the fragment in flight and the one being built. A server that
        # lost its memory knows nothing of who was killed before; then there are at least the failures that were told.
        lost = max(self._parts.link.lost_lives, failures["actor"])
        most_lost = lost * (self._parts.config.actors.outbox_fragments + UNSENT_FRAGMENTS)
        missing = {
            "refused": counts.refused_steps,
            "unaccounted": counts.unaccounted_steps,
            "voided": self._parts.ring.state.voided,
            **counts.dropped_steps,
        }
        return {
            "fragments": self._parts.intake.fragments,
            "duplicates": counts.duplicates,
            "gap_fragments": counts.gap_fragments,
            "produced_steps": counts.produced_steps,
            "wasted_fragments": counts.rejected.get(STALE, 0),
            "wasted_transitions": counts.stale_steps,
            "actor_failures": failures["actor"],
            "evaluation_failures": failures["evaluation"],
            "lost_unacked": most_lost,
            **{f"recycled/{why}": float(count) for why, count in self._notices.recycled.items()},
            "broken_off_episodes": float(self._notices.broken_off),
            **{f"drops/{reason}": float(steps) for reason, steps in missing.items() if steps > 0},
            **{f"rejected/{reason}": float(count) for reason, count in counts.rejected.items()},
        }
