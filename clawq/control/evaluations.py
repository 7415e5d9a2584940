"""The evaluations that a run wants and has not got, folded from the run's events.

    evaluation_wanted  {version, label, episodes}    appended by the learner; its event id is the evaluation's id
    evaluation_started, evaluation, evaluation_failed {id, ...}    appended by workers (and failures by the coordinator)

Since everything comes from events, a coordinator that was started again knows what its predecessor knew. An event that
cannot be understood is left out, or every one of them would end at it.
"""

import logging
from collections.abc import Container
from dataclasses import replace

from clawq.control.arguments import MOST_EPISODES
from clawq.control.reconcile import MAX_ATTEMPTS, PASSING_FAILURES, Evaluation
from clawq.json_text import is_whole
from clawq.transport.control import Event

log = logging.getLogger(__name__)


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
            self._want(event, now_s)
            return
        evaluation = self._outstanding.get(str(event.facts.get("id", "")))
        if evaluation is None:
            return
        if event.kind == "evaluation_started":
            worker = str(event.facts.get("worker", ""))
            self._outstanding[evaluation.id] = replace(evaluation, started_s=now_s, worker=worker, absent_s=None)
        elif event.kind == "evaluation":
            del self._outstanding[evaluation.id]
        elif event.kind == "evaluation_failed":
            self._failed(evaluation, str(event.facts.get("reason", "")))

    def look_for(self, workers: Container[str], now_s: float) -> None:
        """Note which of the workers that began an evaluation are not among the living `workers`."""
        for evaluation in self.outstanding:
            absent_s = None
            # One that did not say its name is not missed.
            if evaluation.worker and evaluation.worker not in workers:
                absent_s = now_s if evaluation.absent_s is None else evaluation.absent_s
            self._outstanding[evaluation.id] = replace(evaluation, absent_s=absent_s)

    def sent(self, evaluation: Evaluation, now_s: float) -> None:
        """It was sent."""
        if evaluation.id in self._outstanding:
            again = replace(evaluation, sent_s=now_s, attempts=evaluation.attempts + 1)
            self._outstanding[evaluation.id] = again

    def _failed(self, evaluation: Evaluation, reason: str) -> None:
        if reason in PASSING_FAILURES and evaluation.attempts < MAX_ATTEMPTS:
            self._outstanding[evaluation.id] = replace(
                evaluation, sent_s=None, started_s=None, worker="", absent_s=None
            )
        else:
            del self._outstanding[evaluation.id]

    def _want(self, event: Event, now_s: float) -> None:
        facts = event.facts
        try:
            version, episodes = int(facts["version"]), int(facts.get("episodes") or self._default_episodes)
            if not is_whole(version) or not 0 < episodes <= MOST_EPISODES:
                raise ValueError("numbers out of range")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("event %s wants an evaluation that cannot be understood: %r", event.id, error)
            return
        self._outstanding[event.id] = Evaluation(event.id, version, str(facts.get("label", "")), episodes, now_s)


__all__ = ["Evaluations"]
