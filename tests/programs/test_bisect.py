"""One poisoned fragment among many is named; a log without one is cleared."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from recorded import Recorded

from clawq.cli.bisect import lines
from clawq.errors import TooManyNonFinite, UserError
from clawq.programs import bisect as bisect_module
from clawq.programs.bisect import Bisection, Stopped, Verdict
from clawq.programs.divergence import LEVEL, WINDOW, Limits, Watch


@pytest.fixture(autouse=True)
def short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of a few hundred rows: what is in them is drawn soon."""
    monkeypatch.setattr(bisect_module, "SLACK", 60)


@pytest.fixture
def recorded(record: Callable[..., Recorded]) -> Recorded:
    return record()


def found(recorded: Recorded, limits: Limits | None = None) -> tuple[Verdict, str]:
    """The verdict, and all that is said of it."""
    said: list[str] = []
    recording = recorded.recording()
    verdict = Bisection(recording, limits or Limits(), threading.Event(), said.append).find()
    return verdict, "\n".join([*said, *lines("r1", recording, verdict)])


#: Which of the fragments is the one with absurd rewards.
CULPRIT = 6


def poisoned(recorded: Recorded, reward: float) -> None:
    """Record ordinary fragments, one with absurd rewards, and more, and learn from them for ever."""
    recorded.send("a", 2)
    recorded.send("b", 2)
    recorded.learn(5)
    recorded.send("a")
    recorded.send("b", reward=reward)
    recorded.send("a", 2)
    recorded.train(lambda: False)


def test_a_fragment_with_rewards_beyond_all_numbers_is_named_with_its_origin_and_what_to_do(recorded: Recorded) -> None:
    # The learner skips updates that are not finite, and gives up after some: maybe before the last ones are sent
    with pytest.raises(TooManyNonFinite):
        poisoned(recorded, 1e30)
    slot, epoch, seq = recorded.sent[CULPRIT - 1]
    recorded.end(whole=False)
    verdict, told = found(recorded)
    assert verdict.wrong == "an update was not finite"
    [culprit] = verdict.culprits
    assert (culprit.record.slot, culprit.record.epoch, culprit.record.seq) == (slot, epoch, seq)
    assert culprit.number == CULPRIT
    assert verdict.confirmed
    for text in (
        f"culprit: fragment {CULPRIT}, b {epoch}-{seq}",
        "by host/worker",
        "rewards 1e+30 to 1e+30",
        f"clawq log show r1 b {epoch}-{seq}",
        f"clawq log quarantine r1 --slot b --epoch {epoch} --from {seq} --to {seq}",
        "without it learning stays sound",
    ):
        assert text in told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_loss_that_jumps_is_found_by_its_level(record: Callable[..., Recorded]) -> None:
    # Of batches of 64, most hold a row of one poisoned fragment: the median knows.
    limit = {"samples_per_insert": 16, "min_size_to_sample": 40, "error_buffer": None}
    recorded = record(replay={"capacity": 5000, "batch_size": 64}, rate_limit=limit)
    recorded.send("a", 50)
    recorded.train(lambda: recorded.trainer.parts.updater.updates > LEVEL + 2 * WINDOW)
    recorded.send("a", 3)
    recorded.send("b", reward=1e7)
    culprit = recorded.sent[-1]
    recorded.send("a", 12)
    recorded.learn(30)
    recorded.end(whole=False)
    verdict, told = found(recorded)
    assert verdict.wrong is not None
    assert "the median of critic_loss" in verdict.wrong
    [suspect] = verdict.culprits
    assert (suspect.record.slot, suspect.record.epoch, suspect.record.seq) == culprit
    assert verdict.confirmed
    assert "learning stays sound" in told


def test_a_log_without_divergence_is_cleared(recorded: Recorded) -> None:
    recorded.send("a", 10)
    recorded.learn(10)
    recorded.end()
    verdict, told = found(recorded)
    assert verdict == Verdict(recorded.trainer.parts.updater.updates, None)
    assert told == f"nothing goes wrong: {verdict.updates} updates, to the end of the recording"
    with pytest.raises(UserError, match="--metric loss: this algorithm reports critic_loss"):
        found(recorded, Limits("loss"))
    # And where everything is above a bound, no fragment is to blame
    _, told = found(recorded, Limits(bound=1e-12))
    assert "no fragment is to blame" in told
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        Bisection(recorded.recording(), Limits(), stop, lambda text: None).find()


def watched(values: list[float], **limits: Any) -> int | None:
    """The first value that is wrong."""
    watch = Watch(Limits(**limits))
    wrong = (i for i, value in enumerate(values) if watch.observe({"loss": value}, False) is not None)
    return next(wrong, None)


def test_what_counts_as_divergence() -> None:
    calm = [1.0] * 300
    assert watched(calm) is None
    assert watched([*calm, 1e9, *calm]) is None, "one wild batch is none"
    first = watched([*calm, *[101.0] * WINDOW])
    assert first is not None
    assert len(calm) + WINDOW / 2 <= first < len(calm) + WINDOW
    assert watched([*calm, *[99.0] * 1000]) is None
    # A loss that fell and comes back is none either; nor is one that grows slowly
    assert watched([50.0] * 150 + [0.01] * 300 + [60.0] * 100) is None
    assert watched([1.01**n for n in range(2000)]) is None
    assert watched([*calm, math.nan]) == len(calm)
    assert watched([*calm, 8.0], bound=7.0) == len(calm)
    assert Watch(Limits()).observe({}, True) == "an update was not finite"


@pytest.mark.parametrize("seed", range(20))
def test_a_metric_within_its_level_never_counts(seed: int) -> None:
    values = np.random.default_rng(seed).uniform(0.05, 4.0, 400)
    assert watched(list(values)) is None
