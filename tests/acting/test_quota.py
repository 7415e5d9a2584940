"""Rounds on the actor's side: the same fragments whatever the leases, then waiting for the next version."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from clawq.acting.actor import Actor
from clawq.acting.adder import Adder, Limits, Origin
from clawq.acting.exploration import NoiseLadder
from clawq.acting.loop import Report, RolloutLoop
from clawq.acting.outbox import Outbox
from clawq.acting.quota import Endless, Quota
from clawq.acting.sender import Pauses, Sender
from clawq.core import Control, Weights
from clawq.testing.scripted import SPEC, CountingEnv, FixedWeights, ScriptedSink
from clawq.types import Fragment

#: An actor that looks at regular times once a minute, and at eager ones at once.
PAUSES = Pauses(poll_s=60.0, eager_s=0.005)


class Rig:
    """An actor with a quota of 7 steps in fragments of 3, over a scripted sink."""

    def __init__(self, quota: int = 7, fragment: int = 3) -> None:
        self.env, self.sink = CountingEnv(2, lengths=(4,)), ScriptedSink()
        self.weights = FixedWeights(Weights(1, {}, 0, {}))
        self.sent: list[Fragment] = []
        self.after_step: Callable[[], None] = lambda: None
        outbox = Outbox(4, "block")
        self.sender = Sender(outbox, self.sink, lambda: self.sink, self.encode, self.weights, PAUSES)
        actor = Actor(NoiseLadder(0, 0, (2, 2), np.random.default_rng(0)), lambda: pytest.fail("never trained"))
        adder = Adder(SPEC, 2, Origin("0" * 32, "w", "s", 0), Limits(float("inf"), 10**6))
        self.loop = RolloutLoop(
            self.env, actor, adder, outbox, self.sender, self.progress, share=Quota(quota, fragment)
        )
        self.loop.reset([0, 0])
        self.sender.start()
        while self.sender.view.weights is None:
            self.sender.wait(0.01)

    def progress(self, phase: str, env_steps: int) -> None:
        if phase == "step":
            self.after_step()

    def encode(self, fragment: Fragment) -> bytes:
        self.sent.append(fragment)
        return b"x"

    def publish(self, version: int, stop: bool = False) -> None:
        self.weights.weights = Weights(version, {}, 0, {})
        self.sink.control = Control(head=version, stop=stop, window_bytes=1_000_000, config_epoch=0)

    def lease(self, steps: int) -> Report:
        """A lease that ends after so many steps, or once the actor has waited for a while."""
        goal, looks = len(self.env.actions) + steps, iter(range(30))
        return self.loop.run(
            lambda: "lease_over" if len(self.env.actions) >= goal or next(looks, None) is None else None
        )

    def shapes(self) -> list[tuple[int, int]]:
        assert self.sender.drain(5.0)
        return [(f.meta.weights_version, f.meta.steps) for f in self.sent]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.sender.close()


def test_a_quota_is_counted_for_each_version_by_itself() -> None:
    quota = Quota(7, 3)
    rooms = []
    for _ in range(3):
        room = quota.room(1)
        rooms.append(room)
        quota.collected(1, room or 0)
    assert rooms == [3, 3, 1]
    assert quota.room(1) == 0
    assert quota.room(2) == 3
    # A newer version begins its own, wherever the old one stood
    quota.collected(2, 3)
    assert (quota.room(2), quota.room(3)) == (3, 3)
    quota.collected(3, 2)
    assert quota.room(3) == 3
    assert Endless().room(5) is None


@pytest.mark.parametrize("leases", [[100], [1] * 20, [2, 5, 1, 6], [3, 3, 1]])
def test_the_fragments_of_a_quota_do_not_depend_on_leases(rig: Rig, leases: list[int]) -> None:
    for steps in leases:
        rig.lease(steps)
    assert rig.shapes() == [(1, 3), (1, 3), (1, 1)]
    # Not a step more was taken, and the rows follow one another
    assert len(rig.env.actions) == 7
    shown = np.concatenate([f.obs["policy"][:-1, 0, 2] for f in rig.sent])
    assert shown.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_an_actor_that_waits_goes_on_as_soon_as_the_next_version_is_there(rig: Rig) -> None:
    assert rig.lease(100).env_steps == 14
    # When the next version comes, it is seen though the next regular look is a minute away
    rig.publish(2)
    while len(rig.env.actions) < 14:
        rig.lease(100)
    assert rig.shapes() == [(1, 3), (1, 3), (1, 1), (2, 3), (2, 3), (2, 1)]


def test_a_newer_version_in_the_midst_begins_a_new_quota_with_the_next_fragment(rig: Rig) -> None:
    rig.lease(4)
    rig.publish(2)
    rig.sender.look()
    while (known := rig.sender.view.weights) is None or known.version < 2:
        rig.sender.wait(0.01)
    rig.lease(100)
    assert rig.shapes() == [(1, 3), (1, 3), (2, 3), (2, 3), (2, 1)]


def test_the_stop_flag_ends_a_fragment_in_its_midst() -> None:
    rig = Rig(quota=1000, fragment=1000)

    def stop_after_three() -> None:
        if len(rig.env.actions) == 3:
            rig.publish(1, stop=True)
            rig.sender.look()
            while (known := rig.sender.view.control) is None or not known.stop:
                rig.sender.wait(0.01)

    rig.after_step = stop_after_three
    try:
        # No lease would ever end this
        assert rig.loop.run(lambda: None).reason == "run_stopped"
        assert len(rig.env.actions) == 3
    finally:
        rig.sender.close()


def test_the_stop_flag_ends_the_waiting(rig: Rig) -> None:
    rig.lease(7)
    rig.publish(1, stop=True)
    assert rig.loop.run(lambda: None).reason == "run_stopped"
    assert len(rig.env.actions) == 7


def test_an_actor_that_goes_away_sends_what_it_has(rig: Rig) -> None:
    rig.lease(5)
    report = Report()
    assert rig.loop.flush(report)
    assert not rig.loop.flush(report)
    assert rig.shapes() == [(1, 3), (1, 2)]
    assert (report.fragments, len(rig.env.actions)) == (1, 5)
