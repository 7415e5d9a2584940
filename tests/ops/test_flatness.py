"""The soak's verdict: what grows is named, what is noisy, jumps once in the warm-up or stays below its bound is not."""

import math
import random

import pytest

from ops.bench.flatness import Series, judge, names_of_faults

HOUR = range(0, 3600, 5)


def points(value: object) -> list[tuple[float, float]]:
    assert callable(value)
    return [(float(at), float(value(at))) for at in HOUR]


def test_noise_of_a_fifth_is_flat_and_a_leak_of_a_tenth_under_it_is_not() -> None:
    noise = random.Random(1)
    flat = judge(Series("rss"), points(lambda at: 500 * (1 + noise.uniform(-0.1, 0.1))))
    assert (flat.word, flat.fault) == ("flat", False)
    # From the middle of the second quarter to that of the last it is 1800 s: 14 % an hour are 7 %, less one eighth.
    leak = judge(Series("rss"), points(lambda at: 500 * (1 + 0.14 * at / 3600) * (1 + noise.uniform(-0.1, 0.1))))
    assert (leak.word, leak.fault) == ("grows", True)
    assert leak.slope_per_h == pytest.approx(70, rel=0.3)


def test_the_figures_of_a_straight_line_are_exact() -> None:
    found = judge(Series("x"), points(lambda at: 100 + at / 36))
    assert (found.early, found.late, found.most) == pytest.approx((137.5, 187.5, 199.86), abs=0.1)
    assert found.change == pytest.approx(50 / 137.5, abs=0.005)
    assert found.trend == pytest.approx(50 / 137.5, abs=0.005)
    assert found.slope_per_h == pytest.approx(100)


def test_what_happens_in_the_warm_up_counts_for_nothing_and_a_step_after_it_does() -> None:
    assert judge(Series("x"), points(lambda at: 900 if at < 890 else 100)).word == "flat"
    late = judge(Series("x"), points(lambda at: 110 if at > 2000 else 100))
    assert late.fault
    assert late.change == pytest.approx(0.1)


def test_a_sawtooth_is_flat() -> None:
    # As an archive that drops its oldest segment, or a file that is begun anew
    assert judge(Series("bytes"), points(lambda at: 100 + at % 300 / 10)).word == "flat"


def test_what_goes_up_and_down_by_a_quarter_is_flat_whenever_it_is_looked_at() -> None:
    # As a run folder whose checkpoints keep now more, now fewer files; single samples of it have slopes of 5 %
    for seed in range(100):
        noise = random.Random(seed)
        found = judge(Series("MB"), points(lambda at, noise=noise: noise.uniform(51, 69)))
        assert not found.fault, (seed, found.line)


@pytest.mark.parametrize(("falls", "fault"), [(False, False), (True, True)])
def test_falling_is_a_fault_of_what_should_be_large(falls: bool, fault: bool) -> None:
    found = judge(Series("x", falls=falls), points(lambda at: 100 - at / 360))
    assert (found.word, found.fault) == ("falls", fault)
    assert not judge(Series("x", falls=True), points(lambda at: 100 + at / 36)).fault


def test_a_change_below_the_grain_is_none_and_one_above_it_is() -> None:
    one_more = points(lambda at: 7 if at < 1800 else 8)
    assert judge(Series("threads", grain=1), one_more).word == "flat"
    assert judge(Series("threads"), one_more).word == "grows"
    assert judge(Series("threads", grain=1), points(lambda at: 7 if at < 1800 else 9)).fault


def test_what_has_a_bound_may_grow_up_to_it() -> None:
    events = Series("events", bound=11_000, bounded_by="XADD MAXLEN ~ 10 000")
    below = judge(events, points(lambda at: at))
    assert (below.word, below.fault) == ("below its bound", False)
    assert "XADD MAXLEN" in below.line
    above = judge(events, points(lambda at: 4 * at))
    assert (above.word, above.fault) == ("above its bound", True)


def test_what_was_zero_and_is_not_any_more_grows() -> None:
    found = judge(Series("zombies"), points(lambda at: 0 if at < 2700 else 1))
    assert found.change == math.inf
    assert found.fault


def test_a_series_that_is_hardly_there_is_no_pass() -> None:
    assert judge(Series("rss"), []).word == "too few samples"
    verdicts = [judge(Series("rss"), [(1.0, 1.0)]), judge(Series("cpu", told=True), [(1.0, 1.0)])]
    assert names_of_faults(verdicts) == ["rss"]
