from collections.abc import Callable, Iterator

import numpy as np
import pytest

from clawq.acting.actor import Actor
from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.acting.exploration import NoiseLadder
from clawq.acting.loop import RolloutLoop
from clawq.acting.outbox import Outbox
from clawq.acting.sender import Pauses, Sender
from clawq.core import Control, Explorer, Weights
from clawq.errors import ActorFailed, FragmentTooLarge, StoreUnavailable
from clawq.testing.scripted import SPEC, CountingEnv, FixedWeights, ScriptedSink
from clawq.types import FloatArray, Fragment, Obs

QUICK = Pauses(poll_s=0.01, eager_s=0.005, first_s=0.001, longest_s=0.01)


class Rig:
    """A whole actor over a scripted sink."""

    def __init__(self, pauses: Pauses = QUICK) -> None:
        self.env = CountingEnv(2, lengths=(4,))
        self.sink = ScriptedSink()
        self.weights = FixedWeights(Weights(1, {}, 0, {}))
        self.sent: list[Fragment] = []
        self.outbox = Outbox(4, "block")
        self.sender = Sender(self.outbox, self.sink, lambda: self.sink, self.encode, self.weights, pauses)
        self.phases: list[str] = []
        self.actor = Actor(NoiseLadder(0, 0, (2, 2), np.random.default_rng(0)), Half)
        limits = Limits(1e9, 3 * step_bytes(SPEC, 2))
        self.loop = RolloutLoop(
            self.env,
            self.actor,
            Adder(SPEC, 2, Origin("0" * 32, "w", "s", 0), limits),
            self.outbox,
            self.sender,
            lambda phase, steps: self.phases.append(phase),
            lambda: self.policy_ready,
        )
        self.policy_ready = True
        self.loop.reset([0, 0])
        self.sender.start()

    def encode(self, fragment: Fragment) -> bytes:
        self.sent.append(fragment)
        return b"x"

    def steps(self, count: int, reason: str = "lease_over") -> Callable[[], str | None]:
        """An `ended` that ends after so many vector steps."""
        goal = len(self.env.actions) + count
        return lambda: reason if len(self.env.actions) >= goal else None


class Half:
    def load(self, weights: object) -> None:
        pass

    def act(self, obs: Obs) -> FloatArray:
        return np.full((2, 2), 0.5, np.float32)

    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        return explorer.perturb(self.act(obs)), {}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.sender.close()


def test_a_lease_acts_reports_and_the_next_one_goes_on_where_it_ended(rig: Rig) -> None:
    first = rig.loop.run(rig.steps(7))
    second = rig.loop.run(rig.steps(4))
    assert rig.sender.drain(5.0)
    assert (first.reason, first.env_steps, first.fragments, first.episodes) == ("lease_over", 14, 3, 2)
    assert (second.env_steps, second.fragments, second.episodes) == (8, 2, 2)
    assert [f.meta.steps for f in rig.sent] == [3, 3, 1, 3, 1]
    # Envs were reset once; the rows follow one another over the leases.
    shown = np.concatenate([f.obs["policy"][:-1, 0, 2] for f in rig.sent])
    assert shown.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]


def test_C52_what_is_stored_is_the_policy_space_action_that_was_executed(rig: Rig) -> None:
    rig.weights.weights = Weights(2, {}, 10, {})
    rig.loop.run(rig.steps(3))
    assert rig.sender.drain(5.0)
    np.testing.assert_array_equal(rig.sent[0].action, 0.5)
    # [-0.2, 1.4] at 0.5 is 1.0; [-1, 1] at 0.5 is 0.5.
    np.testing.assert_allclose(rig.env.actions[0], [[1.0, 0.5]] * 2, atol=1e-6)
    assert rig.sent[0].meta.weights_version == 2


def test_weights_change_only_between_fragments(rig: Rig) -> None:
    rig.loop.run(rig.steps(3))
    rig.weights.weights = Weights(2, {}, 5, {})
    rig.sink.control = Control(head=2, stop=False, window_bytes=1_000_000, config_epoch=0)
    for _ in range(500):
        if (known := rig.sender.view.weights) and known.version == 2:
            break
        rig.sender.wait(0.01)
    rig.loop.run(rig.steps(6))
    assert rig.sender.drain(5.0)
    assert [f.meta.weights_version for f in rig.sent] == [1, 2, 2]


def test_new_weights_are_looked_for_beside_the_last_step_of_a_fragment() -> None:
    # Given an actor that looks at regular times only once a minute
    rig = Rig(Pauses(poll_s=60.0))
    try:
        rig.loop.run(rig.steps(3))
        assert rig.sender.drain(5.0)
        rig.weights.weights = Weights(2, {}, 5, {})
        rig.sink.control = Control(head=2, stop=False, window_bytes=1_000_000, config_epoch=0)
        # When it comes to the last step but one of a fragment of three
        rig.loop.run(rig.steps(2))
        # Then the weights come
        for _ in range(500):
            if (known := rig.sender.view.weights) and known.version == 2:
                break
            rig.sender.wait(0.01)
        rig.loop.run(rig.steps(1))
        assert rig.actor.version == 2
    finally:
        rig.sender.close()


def test_it_does_not_act_while_the_learner_has_more_unread_than_its_window(rig: Rig) -> None:
    rig.sink.unread = 1_000_000
    while not rig.sender.view.paced:
        rig.sender.wait(0.01)
    looks = iter(range(20))
    report = rig.loop.run(lambda: "ended" if next(looks, None) is None else None)
    assert report.env_steps == 0
    # When it has read, acting goes on
    rig.sink.unread = 0
    assert rig.loop.run(rig.steps(3)).env_steps == 6


def test_trained_weights_wait_until_the_policy_can_be_built(rig: Rig) -> None:
    rig.loop.run(rig.steps(1))
    rig.policy_ready = False
    rig.weights.weights = Weights(2, {}, 5, {})
    rig.sink.control = Control(head=2, stop=False, window_bytes=1_000_000, config_epoch=0)
    for _ in range(500):
        if (known := rig.sender.view.weights) and known.version == 2:
            break
        rig.sender.wait(0.01)
    rig.loop.run(rig.steps(3))
    assert rig.actor.version == 1
    rig.policy_ready = True
    rig.loop.run(rig.steps(3))
    assert rig.actor.version == 2


def test_without_a_control_record_the_actor_waits(rig: Rig) -> None:
    rig.sink.control = None
    for _ in range(500):
        if rig.sender.view.control is None:
            break
        rig.sender.wait(0.01)
    calls = iter(range(10_000))
    report = rig.loop.run(lambda: "lease_over" if next(calls) > 20 else None)
    assert report.env_steps == 0
    assert rig.env.actions == []
    assert "wait" in rig.phases


def test_a_full_outbox_blocks_the_envs_until_the_stop_flag(rig: Rig) -> None:
    rig.loop.run(rig.steps(1))
    assert rig.sender.drain(5.0)
    rig.sink.faults = [StoreUnavailable("away")] * 100_000

    def stop_after_blocking() -> str | None:
        if rig.phases.count("send") > 3:
            rig.sink.faults.clear()
            rig.sink.control = Control(head=1, stop=True, window_bytes=1_000_000, config_epoch=0)
        return None

    # `ended` is not asked while blocked, so the flag is set from the progress callback.
    rig.loop._progress = lambda phase, steps: (rig.phases.append(phase), stop_after_blocking())  # type: ignore[assignment, func-returns-value]
    report = rig.loop.run(lambda: None)
    assert report.reason == "run_stopped"
    # What waits: the outbox, one fragment in flight, and the one that found no room.
    assert report.fragments <= 4 + 1 + 1
    assert "send" in rig.phases


def test_an_env_that_breaks_is_restarted_within_the_fragment(rig: Rig) -> None:
    rig.env.break_at[1, 0, 2] = "obs"
    rig.loop.run(rig.steps(3))
    assert rig.sender.drain(5.0)
    assert rig.env.restarts == [1]
    assert rig.sent[0].valid[:, 1].tolist() == [False, False, True]
    assert np.isfinite(rig.sent[0].obs["policy"]).all()


def test_an_env_that_stays_broken_ends_the_actor_with_its_number(rig: Rig) -> None:
    rig.env.break_at[1, 0, 2] = "obs"
    rig.env.restart = lambda rows: {"policy": np.full((2, 3), np.nan, np.float32)}  # type: ignore[method-assign]
    with pytest.raises(ActorFailed, match=r"env [01] shows non-finite"):
        rig.loop.run(rig.steps(3))


def test_an_error_of_the_sender_is_raised_here(rig: Rig) -> None:
    rig.sink.faults = [FragmentTooLarge("5 MB in one step")]
    with pytest.raises(FragmentTooLarge):
        rig.loop.run(lambda: None)
