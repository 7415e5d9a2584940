"""When a run is over: the spent share of its budget, as one pure object.

The clock starts with the first env step that arrives, so that start-up is not counted. A resumed run goes on with the
seconds that it had used.
"""

from dataclasses import dataclass

from clawq.config import Budget


@dataclass(frozen=True, slots=True)
class More:
    """What is spent, in words, and an override that gives more of it."""

    spent: str
    key: str


@dataclass(slots=True)
class BudgetMeter:
    """Follows one run's budget.

    Attributes:
        budget: the limits.
        used_before_s: seconds used by earlier processes of the same run.
        started_s: monotonic time of the first env step of this process, None before.
        reached: why the run is over, once it is.
        ended_s: monotonic time at which it was over; the clock stands then.
    """

    budget: Budget
    used_before_s: float = 0.0
    started_s: float | None = None
    reached: str | None = None
    ended_s: float | None = None

    def start(self, now_s: float) -> None:
        """The first env step has arrived."""
        if self.started_s is None:
            self.started_s = now_s

    def used_s(self, now_s: float) -> float:
        """Seconds since the first env step, over all processes of the run."""
        if self.started_s is None:
            return self.used_before_s
        return self.used_before_s + (self.ended_s or now_s) - self.started_s

    def left_s(self, now_s: float) -> float | None:
        """Seconds left, None without a time limit."""
        if self.budget.seconds is None:
            return None
        return max(0.0, self.budget.seconds - self.used_s(now_s))

    def progress(self, now_s: float, env_steps: int) -> float:
        """Spent share, 0..1: the larger of time and env steps; 0 if neither is limited."""
        shares = [0.0]
        if self.budget.seconds is not None:
            shares.append(self.used_s(now_s) / self.budget.seconds)
        if self.budget.env_steps is not None:
            shares.append(env_steps / self.budget.env_steps)
        return min(1.0, max(shares))

    def spent(self, now_s: float, env_steps: int) -> bool:
        """True once the run is over; `reached` says why."""
        if self.reached is None and self.progress(now_s, env_steps) >= 1.0:
            by_steps = self.budget.env_steps is not None and env_steps >= self.budget.env_steps
            self.reached = f"{env_steps} env steps" if by_steps else f"{self.budget.seconds:g} s of wall time"
        if self.reached is not None and self.ended_s is None:
            self.ended_s = now_s
        return self.reached is not None

    def more(self, now_s: float, env_steps: int) -> "More | None":
        """What would let a run go on that has nothing left to spend; None while it has."""
        budget = self.budget
        if budget.env_steps is not None and env_steps >= budget.env_steps:
            return More(f"{env_steps} of {budget.env_steps} env steps", f"budget.env_steps={2 * budget.env_steps}")
        if budget.seconds is not None and self.used_s(now_s) >= budget.seconds:
            used = f"{self.used_s(now_s):.0f} of {budget.seconds:g} s of wall time"
            return More(used, f"budget.seconds={2 * budget.seconds:g}")
        return None

    def scored(self, mean_return: float, success: float | None) -> None:
        """An evaluation arrived; the run is over if it meets a target."""
        goal_return, goal_success = self.budget.target_return, self.budget.target_success
        if goal_return is not None and mean_return >= goal_return:
            self.reached = self.reached or f"mean return {mean_return:.3f} (target {goal_return:g})"
        if goal_success is not None and success is not None and success >= goal_success:
            self.reached = self.reached or f"success {success:.2f} (target {goal_success:g})"
