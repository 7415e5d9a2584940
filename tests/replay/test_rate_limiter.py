"""The rate limiter: exact, never both sides blocked, and impossible settings refused with the reason."""

import math
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


@st.composite
def rhythms(draw: st.DrawFn, most: int) -> list[tuple[float, int]]:
    """How one side wants to move: the pause before each lump, and its size; some stretches are much faster."""
    speed = st.sampled_from([0.001, 0.1, 1.0, 50.0])
    return [(draw(speed), draw(st.integers(1, most))) for _ in range(draw(st.integers(5, 30)))]


@given(limiters(), st.data())
@settings(max_examples=60, deadline=None)
def test_with_any_speeds_and_lumps_of_both_sides_the_error_stays_within_the_buffer_and_both_sides_go_on(
    made: tuple[RateLimiter, float, int, int, int, float], data: st.DataObject
) -> None:
    limiter, ratio, batch, largest, least_size, buffer = made
    wishes = {"insert": data.draw(rhythms(largest)), "sample": data.draw(rhythms(batch))}
    cans = {"insert": limiter.can_insert, "sample": limiter.can_sample}
    moves = {"insert": limiter.inserted, "sample": limiter.sampled}
    due_s, turn = {side: wish[0][0] for side, wish in wishes.items()}, dict.fromkeys(wishes, 0)
    after_filling = {"insert": 0, "sample": 0}
    now_s, stuck = 0.0, 0
    for _ in range(2 * (least_size + 200)):
        # Whoever is due first tries; who is refused tries again when the other side has moved.
        side = min(due_s, key=lambda one: (due_s[one], one))
        now_s = max(now_s, due_s[side])
        pause_s, lump = wishes[side][turn[side] % len(wishes[side])]
        if cans[side](lump):
            moves[side](lump)
            turn[side] += 1
            stuck = 0
            after_filling[side] += not limiter.filling
            due_s[side] = now_s + pause_s
            other = "sample" if side == "insert" else "insert"
            due_s[other] = max(due_s[other] if due_s[other] < math.inf else now_s, now_s)
        else:
            stuck += 1
            due_s[side] = math.inf
        assert stuck < 2, f"both sides are blocked: error {limiter.error}, bounds {limiter.bounds}"
        assert_valid(limiter)
        if not limiter.filling:
            low, high = limiter.bounds
            # What fills the ring may end with a lump that goes past the least size, by less than the lump.
            assert abs(limiter.error - (low + high) / 2) <= buffer * (1 + 1e-12)
        if min(after_filling.values()) > 30:
            break
    # Progress: neither side could run away from the other for long.
    room = 2 * buffer
    assert limiter.filling or abs((limiter.inserts - least_size) * ratio - limiter.samples) <= room


@given(limiters(), st.lists(st.tuples(st.booleans(), st.floats(0.01, 64), st.integers(1, 500)), max_size=12))
@settings(max_examples=50, deadline=None)
def test_settings_changed_live_cause_no_burst_and_never_block_both_sides(
    made: tuple[RateLimiter, float, int, int, int, float], changes: list[tuple[bool, float, int]]
) -> None:
    limiter, _, batch, largest, _, _ = made
    for inserting, ratio, least_size in changes:
        before = limiter.inserts, limiter.samples
        limiter.retune(ratio, least_size, None, limiter.inserts)
        assert_valid(limiter)
        assert (limiter.inserts, limiter.samples) == before
        assert limiter.filling == (limiter.inserts < least_size)
        if not limiter.filling:
            # Balanced: what may be sampled without a further insert is the buffer, not what another ratio owes.
            low, high = limiter.bounds
            assert abs(limiter.error - (low + high) / 2) <= (high - low) / 2 * (1 + 1e-12)
        for _ in range(20):
            can_insert, can_sample = limiter.can_insert(largest), limiter.can_sample(batch)
            assert can_insert or can_sample
            if can_insert and (inserting or not can_sample):
                limiter.inserted(largest)
            else:
                limiter.sampled(batch)
            assert_valid(limiter)


def test_another_ratio_taken_live_owes_nothing_for_the_past() -> None:
    limiter = warmed(2.0)
    inserts = limiter.inserts
    limiter.retune(64.0, 100, 4096, inserts)
    assert limiter.error == sum(limiter.bounds) / 2
    burst = 0
    while limiter.can_sample(16):
        limiter.sampled(16)
        burst += 16
    assert burst == 4096
    assert_valid(limiter)


def test_a_larger_buffer_keeps_the_error_and_a_smaller_one_that_it_does_not_fit_begins_balanced() -> None:
    limiter = warmed(1.0)
    while limiter.can_insert(16):
        limiter.inserted(16)
    drift = limiter.error - sum(limiter.bounds) / 2
    limiter.retune(1.0, 100, 128, limiter.inserts)
    assert limiter.error - sum(limiter.bounds) / 2 == drift > 32
    limiter.retune(1.0, 100, 32, limiter.inserts)
    assert limiter.error == sum(limiter.bounds) / 2
    assert_valid(limiter)


@pytest.mark.parametrize(
    ("settings_wanted", "reason"),
    [((None, 100, None), "cannot be taken away"), ((8.0, 100, 10.0), "for ever"), ((8.0, 0, None), "at least 1")],
)
def test_C30_impossible_settings_are_refused_live_too_and_change_nothing(
    settings_wanted: tuple[float | None, int, float | None], reason: str
) -> None:
    limiter = warmed(2.0)
    before = limiter.state_dict(), limiter.bounds
    with pytest.raises(ConfigError, match=reason):
        limiter.retune(*settings_wanted, limiter.inserts)
    assert (limiter.state_dict(), limiter.bounds) == before
