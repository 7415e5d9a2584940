"""How many times each env step is sampled: Reverb's SampleToInsertRatio (Cassirer et al. 2021, arXiv:2102.04736 §3.4).

    error = inserts · samples_per_insert − samples

must stay inside bounds: centre ± error_buffer, where the centre is the error at the moment when sampling may begin
(min_size_to_sample · samples_per_insert). Inserting raises the error, sampling lowers it; whoever would leave the
bounds waits. Both come in lumps here (a fragment's valid env steps, a batch), so the buffer must hold the larger lump,
or both sides could wait for each other for ever: such settings are refused when constructed.

Pure and exact: integers (the ratio is a fraction of two), no clock. It does not block; its caller asks, acts, tells.
`Patience` is the clock beside it: it turns a side that was blocked for too long into an error that says so.
`Unlimited` is the twin for a fully asynchronous run.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal

from clawq.errors import ConfigError, RateLimitTimeout

Side = Literal["insert", "sample"]
#: error_buffer, if the user names none, as a share of min_size_to_sample · samples_per_insert (Acme's tolerance).
DEFAULT_TOLERANCE = 0.1


class Unlimited:
    """No ratio: neither side waits for the other, but sampling begins at `min_size_to_sample` env steps.

    Counts are env steps (valid rows) and transitions.

    Args:
        min_size_to_sample: env steps in the ring before the first batch.

    Attributes:
        inserts: env steps inserted so far.
        samples: transitions sampled so far.
    """

    def __init__(self, min_size_to_sample: int) -> None:
        self._min_size = _least_size(min_size_to_sample)
        self.inserts = self.samples = 0
        #: Inserts that call for no samples, since they fill the ring; and how many of those are still to come.
        self._exempt = self._to_fill = min_size_to_sample

    @property
    def error(self) -> float:
        """Nothing is balanced: 0."""
        return 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest error allowed."""
        return -math.inf, math.inf

    @property
    def filling(self) -> bool:
        """True until the ring holds enough to sample from."""
        return self._to_fill > 0

    def can_insert(self, steps: int) -> bool:
        """May `steps` env steps be inserted now?"""
        return True

    def can_sample(self, transitions: int) -> bool:
        """May `transitions` be sampled now?"""
        return not self.filling

    def inserted(self, steps: int) -> None:
        """Count `steps` env steps that were inserted."""
        self.inserts += steps
        self._to_fill = max(0, self._to_fill - steps)

    def sampled(self, transitions: int) -> None:
        """Count `transitions` that were sampled."""
        self.samples += transitions

    def excuse(self, steps: int) -> None:
        """Say that `steps` of the env steps inserted cannot be sampled any more (and are sampled once at most).

        They then call for no samples, as if they had never come.
        """
        self._exempt += steps

    def rebase(self, size: int) -> None:
        """Say, after a resume, how many env steps the ring really holds (it may not have been rebuilt whole).

        Sampling waits until it is filled again. What fills it calls for no samples: no burst of updates follows.
        """
        missing = max(0, self._min_size - size)
        self._exempt += missing - self._to_fill
        self._to_fill = missing

    def retune(
        self, samples_per_insert: float | None, min_size_to_sample: int, error_buffer: float | None, size: int
    ) -> None:
        """Take other settings while the ring holds `size` env steps; meanings and refusals are those of the class.

        If the ring holds less than the new `min_size_to_sample`, it is filled up to it first.
        """
        self._min_size = _least_size(min_size_to_sample)
        self.rebase(size)

    def state_dict(self) -> dict[str, int]:
        """The counters."""
        return {
            "inserts": self.inserts,
            "samples": self.samples,
            "exempt": self._exempt,
            "to_fill": self._to_fill,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.inserts, self.samples = state["inserts"], state["samples"]
        self._exempt, self._to_fill = state["exempt"], state["to_fill"]

    def check_valid(self) -> tuple[bool, str]:
        """Do the counters agree? (True, "") or (False, what is wrong)."""
        if min(self.inserts, self.samples, self._to_fill) < 0 or self._exempt < self._to_fill:
            return False, f"a counter is out of range: {self.state_dict()}"
        return True, ""


class RateLimiter(Unlimited):
    """Keeps the samples of each env step near `samples_per_insert`.

    An insert larger than `largest_insert` is judged as if it had that size, so that it can never block for ever; it
    passes the upper bound by what it has more.

    Args:
        samples_per_insert: transitions sampled for each env step inserted, > 0.
        min_size_to_sample: env steps in the ring before the first batch.
        error_buffer: how far the error may run from the centre; None = chosen from the sizes.
        batch_size: transitions of one batch.
        largest_insert: most env steps inserted at once (T·N of a fragment).

    Raises:
        ConfigError: a value is out of range, or the two sides could block each other.
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | None,
        batch_size: int,
        largest_insert: int,
    ) -> None:
        super().__init__(min_size_to_sample)
        self._batch_size, self._largest = batch_size, largest_insert
        self._set(samples_per_insert, min_size_to_sample, error_buffer)
        #: Samples that are paid for: nothing of them is weighed against inserts.
        self._forgiven = 0

    def _set(self, samples_per_insert: float, min_size_to_sample: int, error_buffer: float | None) -> None:
        """Take ratio and buffer; ConfigError, and nothing is changed, if they cannot work."""
        batch_size, largest = self._batch_size, self._largest
        if error_buffer is None:
            error_buffer = default_error_buffer(samples_per_insert, min_size_to_sample, batch_size, largest)
        refused = refusal(samples_per_insert, error_buffer, batch_size, largest)
        if refused:
            raise ConfigError("rate_limit", [refused])
        ratio, buffer = Fraction(repr(float(samples_per_insert))), Fraction(repr(float(error_buffer)))
        # Everything is counted in 1/unit transitions: whole numbers, so no rounding ever adds up.
        self._unit = math.lcm(ratio.denominator, buffer.denominator)
        self._ratio, self._buffer = int(ratio * self._unit), int(buffer * self._unit)

    @property
    def error(self) -> float:
        """The error: inserts · samples_per_insert − samples, in transitions."""
        return (self.inserts * self._ratio - self.samples * self._unit) / self._unit

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest error allowed, in transitions."""
        centre = self._exempt * self._ratio - self._forgiven * self._unit
        return (centre - self._buffer) / self._unit, (centre + self._buffer) / self._unit

    def can_insert(self, steps: int) -> bool:
        """May `steps` env steps be inserted now? While the ring is filling: yes."""
        return self.filling or self._drift + min(steps, self._largest) * self._ratio <= self._buffer

    def can_sample(self, transitions: int) -> bool:
        """May `transitions` be sampled now?"""
        return not self.filling and self._drift - transitions * self._unit >= -self._buffer

    @property
    def _drift(self) -> int:
        """Distance of the error from the centre, in 1/unit transitions."""
        return (self.inserts - self._exempt) * self._ratio - (self.samples - self._forgiven) * self._unit

    def retune(
        self, samples_per_insert: float | None, min_size_to_sample: int, error_buffer: float | None, size: int
    ) -> None:
        """As its base. Under another ratio, or outside of a smaller buffer, both sides begin balanced: no burst.

        Raises ConfigError, and nothing is changed, if the settings cannot work.
        """
        if samples_per_insert is None:
            raise ConfigError("rate_limit", ["samples_per_insert: a limit cannot be taken away while the learner runs"])
        before = Fraction(self._ratio, self._unit)
        self._set(samples_per_insert, _least_size(min_size_to_sample), error_buffer)
        super().retune(samples_per_insert, min_size_to_sample, error_buffer, size)
        if Fraction(self._ratio, self._unit) != before or abs(self._drift) > self._buffer:
            self._begin_balanced()

    def _begin_balanced(self) -> None:
        self._exempt, self._forgiven = self.inserts + self._to_fill, self.samples

    def state_dict(self) -> dict[str, int]:
        """The counters, and the ratio that they were made under."""
        ratio = Fraction(self._ratio, self._unit)
        more = {"forgiven": self._forgiven, "ratio_over": ratio.numerator, "ratio_under": ratio.denominator}
        return super().state_dict() | more

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken; if that was under another ratio, begin balanced."""
        super().load_state_dict(state)
        same = Fraction(state.get("ratio_over", 0), state.get("ratio_under", 1)) == Fraction(self._ratio, self._unit)
        if same:
            self._forgiven = state["forgiven"]
        else:
            self._begin_balanced()

    def check_valid(self) -> tuple[bool, str]:
        """Do the counters agree, and can one side move? (True, "") or (False, what is wrong)."""
        ok, why = super().check_valid()
        if ok and not self.can_insert(self._largest) and not self.can_sample(1):
            return False, f"both sides are blocked: error {self.error}, bounds {self.bounds}"
        return ok, why


def _least_size(min_size_to_sample: int) -> int:
    if min_size_to_sample < 1:
        raise ConfigError("rate_limit", [f"min_size_to_sample: {min_size_to_sample}; must be at least 1"])
    return min_size_to_sample


def make_limiter(
    samples_per_insert: float | None,
    min_size_to_sample: int,
    error_buffer: float | None,
    batch_size: int,
    largest_insert: int,
) -> Unlimited:
    """A `RateLimiter`, or its twin `Unlimited` where `samples_per_insert` is None."""
    if samples_per_insert is None:
        return Unlimited(min_size_to_sample)
    return RateLimiter(samples_per_insert, min_size_to_sample, error_buffer, batch_size, largest_insert)


def default_error_buffer(
    samples_per_insert: float, min_size_to_sample: int, batch_size: int, largest_insert: int
) -> float:
    """Twice what is needed, or a tenth of what the first env steps call for, whichever is larger."""
    needed = max(batch_size, largest_insert * samples_per_insert)
    return float(max(2 * needed, DEFAULT_TOLERANCE * min_size_to_sample * samples_per_insert))


def refusal(samples_per_insert: float, error_buffer: float, batch_size: int, largest_insert: int) -> str | None:
    """Why these settings cannot work, as `path: what; rule; consequence`; None if they can.

    The buffer must be at least batch_size, or the first batch would have to wait for inserts that wait for it; and at
    least largest_insert · samples_per_insert, for the like reason. With both, its range of 2 · error_buffer is at least
    one lump of each side, so at any error at least one side can move (Reverb's rule is this one for lumps of 1).
    """
    if not (math.isfinite(samples_per_insert) and samples_per_insert > 0):
        return f"samples_per_insert: {samples_per_insert}; must be a finite number above 0, or null for no limit"
    if batch_size < 1 or largest_insert < 1:
        return f"batch_size {batch_size} and largest insert {largest_insert} must be at least 1"
    if not (math.isfinite(error_buffer) and error_buffer > 0):
        return f"error_buffer: {error_buffer}; must be a finite number above 0, or null"
    insert = largest_insert * samples_per_insert
    if error_buffer < batch_size:
        return (
            f"error_buffer: {error_buffer:g} is below replay.batch_size {batch_size}; the allowed range of the error, "
            f"2·error_buffer, must hold a whole batch on either side of its centre, or sampling and inserting end up "
            f"waiting for each other for ever; raise error_buffer to at least {max(batch_size, insert):g}, or set null"
        )
    if error_buffer < insert:
        return (
            f"error_buffer: {error_buffer:g} is below {largest_insert} env steps of one fragment · samples_per_insert "
            f"{samples_per_insert:g} = {insert:g}; inserting one fragment would leave the allowed range, so both sides "
            f"end up waiting for each other for ever; raise error_buffer to at least {insert:g}, set it to null, or "
            f"make fragments smaller (actors.fragment_bytes)"
        )
    return None


class Patience:
    """Notices that one side has been blocked for too long.

    Args:
        limiter: whose error and bounds are told.
        timeout_s: how long a side may be blocked without a break.
        clock: monotonic seconds.
    """

    def __init__(self, limiter: Unlimited, timeout_s: float, clock: Callable[[], float]) -> None:
        self._limiter, self._timeout_s, self._clock = limiter, timeout_s, clock
        self._since: dict[Side, float] = {}

    def blocked(self, side: Side) -> float:
        """Note that `side` cannot move now; returns for how many seconds it could not.

        Raises RateLimitTimeout after `timeout_s`; the wait then begins anew, so a caller may go on.
        """
        now = self._clock()
        waited_s = now - self._since.setdefault(side, now)
        if waited_s >= self._timeout_s:
            del self._since[side]
            raise RateLimitTimeout(side, self._limiter.error, self._limiter.bounds, waited_s)
        return waited_s

    def moved(self, side: Side) -> None:
        """Note that `side` made progress."""
        self._since.pop(side, None)
