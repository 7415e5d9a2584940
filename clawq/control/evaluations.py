"""The evaluations that a run wants and has not got, folded from the run's events.

    evaluation_wanted  {version, label, episodes}    appended by the learner; its event id is the evaluation's id
    evaluation_started, evaluation, evaluation_failed {id, ...}    appended by workers (and failures by the coordinator)

Since everything comes from events, a coordinator that was started again knows what its predecessor knew.
"""

from dataclasses import replace
from typing import Any

from clawq.control.reconcile import MAX_ATTEMPTS, PASSING_FAILURES, Evaluation
from clawq.transport.control import Event


class Evaluations:
    """Outstanding evaluations, by id."""

    def __init__(self, default_episodes: int) -> None:
        self._default_episodes = default_episodes
        self._outstanding: dict[str, Evaluation] = {}

    @property
    def outstanding(self) -> tuple[Evaluation, ...]:
        """Oldest first."""
        return tuple(self._outstanding.values())

    def take(self, event: Event, now_s: float) -> None:
        """Fold one event."""
        if event.kind == "evaluation_wanted":
            self._outstanding[event.id] = self._wanted(event, now_s)
            return
        evaluation = self._outstanding.get(str(event.facts.get("id", "")))
        if evaluation is None:
            return
        if event.kind == "evaluation_started":
            self._outstanding[evaluation.id] = replace(evaluation, started_s=now_s)
        elif event.kind == "evaluation":
            del self._outstanding[evaluation.id]
        elif event.kind == "evaluation_failed":
            self._failed(evaluation, str(event.facts.get("reason", "")))

    def sent(self, evaluation: Evaluation, now_s: float) -> None:
        """It was sent."""
        if evaluation.id in self._outstanding:
            again = replace(evaluation, sent_s=now_s, attempts=evaluation.attempts + 1)
            self._outstanding[evaluation.id] = again

    def _failed(self, evaluation: Evaluation, reason: str) -> None:
        if reason in PASSING_FAILURES and evaluation.attempts < MAX_ATTEMPTS:
            self._outstanding[evaluation.id] = replace(evaluation, sent_s=None, started_s=None)
        else:
            del self._outstanding[evaluation.id]

    def _wanted(self, event: Event, now_s: float) -> Evaluation:
        facts: dict[str, Any] = event.facts
        episodes = int(facts.get("episodes") or self._default_episodes)
        return Evaluation(event.id, int(facts["version"]), str(facts.get("label", "")), episodes, now_s)


__all__ = ["Evaluations"]
