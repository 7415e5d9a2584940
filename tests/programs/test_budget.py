"""When a run is over."""

from clawq.config import Budget
from clawq.programs.budget import BudgetMeter


def test_the_clock_starts_with_the_first_env_step_and_stands_at_the_end() -> None:
    meter = BudgetMeter(Budget(seconds=10.0))
    assert meter.used_s(100.0) == 0.0
    meter.start(100.0)
    meter.start(105.0)
    assert meter.used_s(104.0) == 4.0
    assert meter.left_s(104.0) == 6.0
    assert not meter.spent(109.9, 5)
    assert meter.spent(110.0, 5)
    assert meter.reached == "10 s of wall time"
    assert meter.used_s(500.0) == 10.0


def test_a_resumed_run_goes_on_with_the_seconds_it_had_used() -> None:
    meter = BudgetMeter(Budget(seconds=10.0), used_before_s=7.0)
    assert meter.used_s(3.0) == 7.0
    meter.start(50.0)
    assert meter.spent(53.0, 0)


def test_progress_is_the_larger_share_and_stays_within_one() -> None:
    meter = BudgetMeter(Budget(seconds=10.0, env_steps=100))
    meter.start(0.0)
    assert meter.progress(2.0, 50) == 0.5
    assert meter.progress(8.0, 50) == 0.8
    assert meter.progress(80.0, 50) == 1.0
    assert meter.spent(1.0, 100)
    assert meter.reached == "100 env steps"


def test_without_limits_it_never_ends_by_itself() -> None:
    meter = BudgetMeter(Budget())
    meter.start(0.0)
    assert meter.progress(1e9, 10**9) == 0.0
    assert not meter.spent(1e9, 10**9)
    assert meter.left_s(5.0) is None


def test_an_evaluation_that_meets_a_target_ends_the_run() -> None:
    meter = BudgetMeter(Budget(target_success=0.8))
    meter.scored(-1.0, None)
    meter.scored(-1.0, 0.79)
    assert not meter.spent(1.0, 1)
    meter.scored(-1.0, 0.8)
    assert meter.spent(1.0, 1)
    assert meter.reached == "success 0.80 (target 0.8)"
    by_return = BudgetMeter(Budget(target_return=-2.0))
    by_return.scored(-1.5, None)
    assert by_return.spent(1.0, 1)
