"""A short storm over a whole system. `ops/storm` runs five minutes of it."""

from pathlib import Path

import pytest
from chaos.system import System
from storm import SETUP, Row, Storm, Weather, rates_in


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_twenty_seconds_of_kills_it_is_as_fast_as_before_and_every_fragment_is_counted(tmp_path: Path) -> None:
    weather = Weather(seconds=20, window_s=10, settle_s=5, learner_s=15, stall_s=15)
    with System(tmp_path, SETUP) as system:
        outcome = Storm(system, weather, seed=3).blow()
        assert not outcome.problems, f"{outcome.problems}\n{system.describe()}"
        system.stop()
    assert not system.leftovers
    assert {one.reader for one in outcome.balances} == {"learner", "archive"}
    assert len(outcome.blows) >= 10
    (before, _), (after, _) = outcome.rates
    assert after >= 0.9 * before, f"{before:.0f} env steps/s before, {after:.0f} after"


def test_rates_are_medians_by_the_runs_own_clock_and_by_the_cpu_time_of_who_was_there_all_along() -> None:
    # 100 env steps a second; the learner's clock stands still for a while, and one process is replaced by another.
    rows = [
        Row(at_s=1000.0 + at, wall_s=float(at), env_steps=100.0 * at, cpu={1: at / 4, 2 if at < 10 else 3: at / 4})
        for at in range(21)
    ]
    rows[7] = Row(1007.0, 2.0, 0.0, rows[7].cpu)
    by_wall, by_cpu = rates_in(rows, 1000.0, 1020.0)
    assert by_wall == pytest.approx(100.0)
    assert by_cpu == pytest.approx(200.0)
    with pytest.raises(AssertionError, match="nothing was seen"):
        rates_in(rows, 0.0, 10.0)
