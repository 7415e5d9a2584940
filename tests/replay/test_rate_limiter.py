"""The rate limiter: exact, never both sides blocked, and impossible settings refused with the reason."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.errors import ConfigError, RateLimitTimeout
from clawq.replay.rate_limiter import (
    Patience,
    RateLimiter,
    Unlimited,
    default_error_buffer,
    make_limiter,
    refusal,
)


def assert_valid(limiter: Unlimited) -> None:
    ok, why = limiter.check_valid()
    assert ok, why


@st.composite
def limiters(draw: st.DrawFn, tight: bool = False) -> tuple[RateLimiter, float, int, int, int, float]:
    ratio = draw(st.one_of(st.floats(0.01, 64), st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 8.0])))
    batch, largest = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    least_size = draw(st.integers(1, 500))
    needed = max(batch, largest * ratio)
    buffer = needed if tight else needed * draw(st.floats(1.0, 4.0))
    return RateLimiter(ratio, least_size, buffer, batch, largest), ratio, batch, largest, least_size, buffer


@given(limiters(), st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=200))
@settings(max_examples=200, deadline=None)
def test_whoever_asks_first_the_error_stays_inside_its_bounds(
    made: tuple[RateLimiter, float, int, int, int, float], wishes: list[tuple[bool, float]]
) -> None:
    limiter, ratio, batch, largest, least_size, buffer = made
    inserts = samples = 0
    for inserting, share in wishes:
        if inserting:
            steps = round(share * largest)
            allowed = limiter.can_insert(steps)
            drift = (inserts + steps - least_size) * Fraction(repr(ratio)) - samples
            # Slow transcription of the rule: while filling anything goes; then the error must not pass its bound.
            assert allowed == (inserts < least_size or drift <= Fraction(repr(buffer)))
            if allowed:
                limiter.inserted(steps)
                inserts += steps
        else:
            allowed = limiter.can_sample(batch)
            drift = (inserts - least_size) * Fraction(repr(ratio)) - samples - batch
            assert allowed == (inserts >= least_size and drift >= -Fraction(repr(buffer)))
            if allowed:
                limiter.sampled(batch)
                samples += batch
        assert_valid(limiter)
        assert (limiter.inserts, limiter.samples) == (inserts, samples)
        if inserts >= least_size:
            low, high = limiter.bounds
            assert low - 1e-6 <= limiter.error <= high + 1e-6


@given(limiters(tight=True), st.lists(st.integers(0, 2), max_size=300))
@settings(max_examples=200, deadline=None)
def test_C30_both_sides_are_never_blocked_at_once_even_with_the_smallest_buffer_allowed(
    made: tuple[RateLimiter, float, int, int, int, float], choices: list[int]
) -> None:
    limiter, _, batch, largest, _, _ = made
    for choice in choices:
        can_insert, can_sample = limiter.can_insert(largest), limiter.can_sample(batch)
        assert can_insert or can_sample
        if can_insert and (choice or not can_sample):
            limiter.inserted(largest)
        else:
            limiter.sampled(batch)
        assert_valid(limiter)


def test_in_the_long_run_each_env_step_is_sampled_as_often_as_was_asked_for() -> None:
    limiter = RateLimiter(0.1, 100, None, batch_size=8, largest_insert=10)
    for _ in range(100_000):
        if limiter.can_sample(8):
            limiter.sampled(8)
        elif limiter.can_insert(10):
            limiter.inserted(10)
    drift = limiter.samples - 0.1 * (limiter.inserts - 100)
    assert limiter.inserts > 10_000
    assert abs(drift) <= default_error_buffer(0.1, 100, 8, 10)


def test_nothing_is_sampled_before_the_least_size_and_inserting_is_free_until_then() -> None:
    limiter = RateLimiter(1.0, 1000, 10, batch_size=10, largest_insert=10)
    for _ in range(99):
        assert limiter.can_insert(10)
        limiter.inserted(10)
        assert not limiter.can_sample(10)
        assert_valid(limiter)
    limiter.inserted(10)
    assert limiter.can_sample(10)
    assert limiter.error == 1000
    assert limiter.bounds == (990, 1010)


def test_a_fragment_larger_than_declared_cannot_block_for_ever() -> None:
    limiter = RateLimiter(1.0, 1, 10, batch_size=10, largest_insert=10)
    limiter.inserted(1)
    assert limiter.can_insert(1000)
    limiter.inserted(1000)
    assert not limiter.can_insert(1)
    while limiter.can_sample(10):
        limiter.sampled(10)
    assert limiter.can_insert(1000)
    assert_valid(limiter)


@pytest.mark.parametrize(
    ("ratio", "buffer", "batch", "largest", "reason"),
    [
        pytest.param(0.0, 10.0, 1, 1, r"samples_per_insert: 0.0; must be a finite number above 0", id="no_ratio"),
        pytest.param(-1.0, 10.0, 1, 1, "samples_per_insert: -1.0", id="negative_ratio"),
        pytest.param(float("nan"), 10.0, 1, 1, "samples_per_insert: nan", id="nan_ratio"),
        pytest.param(float("inf"), 10.0, 1, 1, "samples_per_insert: inf", id="infinite_ratio"),
        pytest.param(1.0, 0.0, 1, 1, "error_buffer: 0.0", id="no_buffer"),
        pytest.param(1.0, float("inf"), 1, 1, "error_buffer: inf", id="infinite_buffer"),
        pytest.param(
            1.0, 255.0, 256, 1, "below replay.batch_size 256; .* for ever; raise .* to at least 256", id="batch"
        ),
        pytest.param(1.0, 0.99, 1, 1, "batch_size 1", id="reverbs_rule_for_lumps_of_one"),
        pytest.param(8.0, 1000.0, 256, 160, "below 160 env steps .* = 1280; .* for ever", id="fragment"),
        pytest.param(1.0, 10.0, 0, 1, "must be at least 1", id="empty_batch"),
        pytest.param(1.0, 10.0, 1, 0, "must be at least 1", id="empty_insert"),
    ],
)
def test_C30_impossible_settings_are_refused_with_the_reason(
    ratio: float, buffer: float, batch: int, largest: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        RateLimiter(ratio, 100, buffer, batch, largest)


@pytest.mark.parametrize(("buffer", "batch", "largest"), [(256.0, 256, 256), (256.0, 256, 1), (256.0, 1, 256)])
def test_the_smallest_possible_buffer_is_taken(buffer: float, batch: int, largest: int) -> None:
    assert refusal(1.0, buffer, batch, largest) is None
    assert refusal(1.0, buffer - 0.5, batch, largest) is not None


def test_a_least_size_below_one_is_refused() -> None:
    for ratio in (None, 1.0):
        with pytest.raises(ConfigError, match="min_size_to_sample: 0"):
            make_limiter(ratio, 0, None, 1, 1)


def test_the_buffer_that_is_chosen_is_always_possible() -> None:
    for ratio in (0.01, 1.0, 64.0):
        for batch in (1, 256):
            for largest in (1, 1024):
                assert_valid(RateLimiter(ratio, 2000, None, batch, largest))


def test_unlimited_waits_only_for_the_least_size() -> None:
    limiter = make_limiter(None, 100, None, 10, 10)
    assert not isinstance(limiter, RateLimiter)
    limiter.inserted(99)
    assert not limiter.can_sample(10)
    limiter.inserted(1)
    for _ in range(1000):
        assert limiter.can_sample(10)
        limiter.sampled(10)
        assert_valid(limiter)
    assert limiter.can_insert(10**9)
    assert limiter.error == 0


def warmed(ratio: float = 2.0) -> RateLimiter:
    limiter = RateLimiter(ratio, 100, 64, batch_size=16, largest_insert=16)
    for _ in range(50):
        if limiter.can_insert(16):
            limiter.inserted(16)
        if limiter.can_sample(16):
            limiter.sampled(16)
    return limiter


def test_a_resumed_limiter_goes_on_exactly() -> None:
    first = warmed()
    second = RateLimiter(2.0, 100, 64, batch_size=16, largest_insert=16)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    for _ in range(100):
        for one in (first, second):
            if one.can_sample(16):
                one.sampled(16)
            elif one.can_insert(16):
                one.inserted(16)
        assert second.state_dict() == first.state_dict()
        assert_valid(second)


@pytest.mark.parametrize("kept", [0, 40, 99])
def test_a_ring_that_was_lost_is_filled_again_without_a_burst_of_updates_after_it(kept: int) -> None:
    limiter = warmed()
    drift = limiter.error - limiter.bounds[0]
    limiter.rebase(kept)
    assert_valid(limiter)
    inserted = 0
    while not limiter.can_sample(1):
        assert limiter.can_insert(10)
        limiter.inserted(10)
        inserted += 10
        assert_valid(limiter)
    assert inserted == -(-(100 - kept) // 10) * 10
    # The error is where it was, but for the last fragment's part beyond the filling.
    assert limiter.error - limiter.bounds[0] == drift + 2.0 * (inserted - (100 - kept))


def test_rebase_with_a_ring_that_was_rebuilt_whole_changes_nothing() -> None:
    for limiter in (warmed(), RateLimiter(2.0, 100, 64, 16, 16)):
        before = limiter.state_dict()
        limiter.rebase(limiter.inserts)
        assert limiter.state_dict() == before


def test_another_ratio_after_a_resume_begins_balanced() -> None:
    limiter = RateLimiter(8.0, 100, 256, batch_size=16, largest_insert=16)
    limiter.load_state_dict(warmed(2.0).state_dict())
    low, high = limiter.bounds
    assert limiter.error == (low + high) / 2
    assert_valid(limiter)


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_C30_a_side_that_is_blocked_for_too_long_is_named_with_error_and_bounds() -> None:
    clock = ManualClock()
    limiter = RateLimiter(1.0, 10, 10, batch_size=10, largest_insert=10)
    limiter.inserted(10)
    patience = Patience(limiter, 5.0, clock)
    assert patience.blocked("sample") == 0
    clock.now_s += 4.9
    assert patience.blocked("sample") == pytest.approx(4.9)
    clock.now_s += 0.2
    with pytest.raises(RateLimitTimeout) as told:
        patience.blocked("sample")
    assert (told.value.side, told.value.error, told.value.bounds) == ("sample", 10, (0, 20))
    assert told.value.waited_s == pytest.approx(5.1)
    assert "sample was blocked for 5.1 s" in str(told.value)
    assert patience.blocked("sample") == 0


def test_progress_ends_a_wait_of_that_side_only() -> None:
    clock = ManualClock()
    patience = Patience(Unlimited(1), 5.0, clock)
    patience.blocked("sample")
    patience.blocked("insert")
    clock.now_s += 4
    patience.moved("sample")
    clock.now_s += 2
    assert patience.blocked("sample") == 0
    with pytest.raises(RateLimitTimeout, match="insert"):
        patience.blocked("insert")
