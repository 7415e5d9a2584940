"""The learner's tempo: when fragments are committed, updates made and weights published beside one another.

`Free` is the asynchronous learner: it commits what there is, updates as the rate limiter allows, and publishes by time.
`ByRounds` goes by rounds (`sync` in the configuration; `clawq.replay.rounds` says what a round is):

    lag 0   wait for the quota of version v -> commit it, in order -> all its updates -> publish v + 1
    lag 1   wait for the quota of version v -> publish v + 1 -> commit it, in order -> all its updates

Under lag 1 actors collect the next round while the learner trains on this one. Nothing that is learned depends on time:
commits, updates and versions follow from the fragments alone, and the spent share of a budget in env steps is that of
whole rounds. The trainer asks; nothing here waits or touches Redis.

A round that is waited for longer than `rate_limit.timeout_s`, or whose fragments went away with a data Redis that came
back empty, is called again: the same weights are published as the next version, under which all actors collect anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from clawq.config import RunConfig, Sync
from clawq.errors import RoundTimeout
from clawq.programs.budget import BudgetMeter
from clawq.programs.intake import Intake
from clawq.programs.link import Link
from clawq.replay.rounds import Rounds, RoundSupply, Terms
from clawq.types import Metrics


@dataclass(frozen=True, slots=True)
class Turn:
    """What a learner does that can neither commit nor update.

    Attributes:
        action: `wait` for a fragment; `publish` the next version; `go_on`, since something has changed.
        word: something that people should know.
    """

    action: Literal["wait", "publish", "go_on"]
    word: str = ""


class Tempo(Protocol):
    """What the trainer asks.

    Attributes:
        free: weights may be published at any time, and are published by time.
        settled: nothing is under way that a checkpoint would tear apart.
        env_steps: by which the budget is judged.
    """

    @property
    def free(self) -> bool: ...
    @property
    def settled(self) -> bool: ...
    @property
    def env_steps(self) -> int: ...
    def may_update(self, committed: int) -> bool:
        """May an update be made, when so many fragments were committed just before it?"""
        ...

    def progress(self, now_s: float) -> float:
        """Spent share of the budget, 0..1, for schedules."""
        ...

    def idle(self, now_s: float, timeout_s: float) -> Turn:
        """Nothing could be committed or updated: what now? `timeout_s` is the longest wait for a round.

        Raises RoundTimeout when a round was waited for in vain: publish then, so that all collect anew.
        """
        ...

    def published(self, version: int) -> None:
        """That version was handed out."""
        ...

    def metrics(self) -> Metrics:
        """Numbers, by the names of clawq.metrics.CATALOGUE."""
        ...

    def texts(self) -> dict[str, str]:
        """Words for the board."""
        ...

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Free:
    """The asynchronous learner.

    Args:
        intake: counts env steps.
        budget: of the run.
    """

    free = settled = True

    def __init__(self, intake: Intake, budget: BudgetMeter) -> None:
        self._intake, self._budget = intake, budget

    @property
    def env_steps(self) -> int:
        """All that are committed."""
        return self._intake.env_steps

    def may_update(self, committed: int) -> bool:
        """Always."""
        return True

    def progress(self, now_s: float) -> float:
        """See Tempo."""
        return self._budget.progress(now_s, self._intake.env_steps)

    def idle(self, now_s: float, timeout_s: float) -> Turn:
        """Wait."""
        return _WAIT

    def published(self, version: int) -> None:
        """Nothing follows from it."""

    def metrics(self) -> Metrics:
        """None."""
        return {}

    def texts(self) -> dict[str, str]:
        """None."""
        return {}

    def state_dict(self) -> dict[str, int]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


class ByRounds:
    """See the module's text.

    Args:
        supply: where the intake takes fragments from.
        intake: commits them.
        budget: of the run.
        link: knows when the data server came back empty.
        lag: 0 or 1.
    """

    free = False

    def __init__(self, supply: RoundSupply, intake: Intake, budget: BudgetMeter, link: Link, lag: int) -> None:
        self._supply, self._intake, self._budget, self._link = supply, intake, budget, link
        self._lag = lag
        self._env_steps: int | None = None
        self._restores = link.restores
        self.settled = False
        #: A round was handed on, and its weights are still to be published (lag 0).
        self._owes_version = False
        self._now_s = 0.0

    @property
    def rounds(self) -> Rounds:
        """The open round."""
        return self._supply.rounds

    @property
    def env_steps(self) -> int:
        """Those of whole rounds."""
        return self._intake.env_steps if self._env_steps is None else self._env_steps

    def may_update(self, committed: int) -> bool:
        """Once the whole round is committed."""
        return not committed

    def progress(self, now_s: float) -> float:
        """By env steps where they are limited, whatever the clock says."""
        if self._budget.budget.env_steps is None:
            return self._budget.progress(now_s, self.env_steps)
        return min(1.0, self.env_steps / self._budget.budget.env_steps)

    def idle(self, now_s: float, timeout_s: float) -> Turn:
        """See Tempo."""
        self._now_s = now_s
        if self._intake.env_steps != self._env_steps:
            # All updates of what was committed are made: the moment to look whether the budget is spent.
            self._env_steps, self.settled = self._intake.env_steps, True
            return Turn("go_on")
        self.settled = True
        if self._owes_version:
            return Turn("publish")
        if self.rounds.ready(now_s):
            word = self._short()
            if self._lag:
                return Turn("publish", word)
            self._hand_on()
            self._owes_version = True
            return Turn("go_on", word)
        return self._patience(now_s, timeout_s)

    def _patience(self, now_s: float, timeout_s: float) -> Turn:
        """Wait, but not for what will never come."""
        if self._link.restores != self._restores:
            self._restores = self._link.restores
            return Turn("publish", f"round {self.rounds.version} is called again: Redis lost what was not read")
        if (waited_s := self.rounds.waited_s(now_s)) >= timeout_s:
            raise RoundTimeout(self.rounds.version, waited_s, self.rounds.describe_missing())
        return _WAIT

    def _short(self) -> str:
        if not (missing := self.rounds.describe_missing()):
            return ""
        return f"round {self.rounds.version} goes on without {missing}"

    def _hand_on(self) -> None:
        self._supply.release()
        self.settled = False

    def published(self, version: int) -> None:
        """The next round begins; under lag 1 the one before it is handed on."""
        if self._lag and self.rounds.ready(self._now_s):
            self._hand_on()
        self._owes_version = False
        self.rounds.open(version)

    def metrics(self) -> Metrics:
        """See RoundSupply."""
        return self._supply.metrics()

    def texts(self) -> dict[str, str]:
        """Which round it is, and who is waited for."""
        if not self.rounds.version:
            return {}
        missing = self.rounds.describe_missing()
        waited = f", waiting for {missing}" if missing and self.settled else ""
        return {"round": f"{self.rounds.version}{waited}"}

    def state_dict(self) -> dict[str, int]:
        """The counters of rounds."""
        return self.rounds.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.rounds.load_state_dict(state)


def terms_of(sync: Sync, num_envs: int) -> Terms:
    """What makes a round of that configuration complete."""
    return Terms(sync.seats, sync.quota_steps, num_envs, sync.deadline_s, sync.quorum)


def make_tempo(config: RunConfig, supply: RoundSupply | None, intake: Intake, budget: BudgetMeter, link: Link) -> Tempo:
    """The tempo that the configuration asks for; `supply` is the intake's where it goes by rounds."""
    if config.sync is None or supply is None:
        return Free(intake, budget)
    return ByRounds(supply, intake, budget, link, config.sync.deterministic_lag)


_WAIT = Turn("wait")

__all__ = ["ByRounds", "Free", "Tempo", "Turn", "make_tempo", "terms_of"]
