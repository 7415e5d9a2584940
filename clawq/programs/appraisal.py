"""Appraisal: how good the weights are, by evaluations that workers make while the run goes on.

Now and then weights are published for an evaluation, and the state that made them is kept as a candidate; when the
numbers arrive (as an event), they are shown, the best candidate becomes the best checkpoint, and a run that is good
enough ends. Who evaluates is the coordinator's affair.

It is one evaluation at a time: with workers that are slower than the interval, newer ones would replace each before it
began.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.programs.saver import Saver, Snapshot
from clawq.types import Metrics

#: What is shown of an evaluation.
NAMES = ("mean_return", "std_return", "success", "mean_length", "version")


class Appraisal:
    """The evaluations of one run.

    Args:
        parts: of the learner.
        saver: writes candidates.
        notices: for people.
        report: see Trainer.

    Attributes:
        best_return: of all evaluations.
        numbers: of the newest one, `eval/...`.
    """

    def __init__(
        self, parts: Parts, saver: Saver, notices: Notices, report: Callable[[int, float, Metrics], None]
    ) -> None:
        self.best_return = -math.inf
        self.numbers: Metrics = {}
        self._parts, self._saver, self._notices, self._report = parts, saver, notices, report
        self._candidate: Snapshot | None = None
        #: Version of the training evaluation that is under way.
        self._evaluating: int | None = None
        self._begun_s = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether it is time for one; the next is due an interval later. The first call begins the first interval."""
        parts, wanted = self._parts, self._parts.config.evaluation
        interval_s = wanted.interval_s
        if interval_s is None or parts.updater.updates == 0:
            return False
        if self._begun_s == -math.inf:
            self._begun_s = now_s
        left_s = parts.budget.left_s(now_s)
        # One that would overlap with the final evaluation only takes cores away from the last updates.
        if now_s - self._begun_s < interval_s or (left_s is not None and left_s <= interval_s / 2):
            return False
        if self._evaluating is not None and now_s - self._begun_s < wanted.timeout_s:
            return False
        self._begun_s = now_s
        return True

    def begin(self, candidate: Snapshot) -> None:
        """Ask for an evaluation of the weights that were just published.

        Args:
            candidate: the state that made them.
        """
        self._evaluating = candidate.version
        if candidate.ring is not None:
            # Later the rows are gone: it is a checkpoint now, and gets its score when that is known.
            self._saver.save(candidate)
        self._candidate = replace(candidate, ring=None)
        self.ask(candidate.version, "training", self._parts.config.evaluation.episodes)

    def ask(self, version: int, label: str, episodes: int) -> None:
        """Ask the coordinator for an evaluation of these weights."""
        self._parts.link.notify("evaluation_wanted", version=version, label=label, episodes=episodes)

    def ended(self, facts: Mapping[str, Any]) -> None:
        """An evaluation is done, or failed: the next may be asked for."""
        if facts.get("version") == self._evaluating:
            self._evaluating = None

    def take(self, facts: Mapping[str, Any]) -> None:
        """An evaluation is done: show it, keep the best, end the run if it is good enough."""
        self.ended(facts)
        try:
            told = {f"eval/{name}": float(facts[name]) for name in NAMES if facts.get(name) is not None}
        except (TypeError, ValueError, OverflowError):
            told = {}
        numbers = {name: number for name, number in told.items() if math.isfinite(number)}
        if not {"eval/mean_return", "eval/version"} <= numbers.keys():
            self._notices.tell(
                "an evaluation that cannot be understood was left out; has that worker another version of clawq?"
            )
            return
        self.numbers = numbers
        mean_return, budget = numbers["eval/mean_return"], self._parts.budget
        budget.scored(mean_return, numbers.get("eval/success"))
        if mean_return > self.best_return:
            self.best_return = mean_return
            self._keep_candidate(int(numbers["eval/version"]), mean_return)
        self._report(self._parts.intake.env_steps, budget.used_s(time.monotonic()), numbers)

    def _keep_candidate(self, version: int, score: float) -> None:
        """Save the state that made the evaluated weights, with its score."""
        if self._candidate is not None and self._candidate.version == version:
            self._saver.save(self._candidate, score)
            self._candidate = None
