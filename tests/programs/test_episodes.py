"""Episodes out of fragments are what really happened: every valid transition once, and none that did not happen."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from stitched import stitch
from true_episodes import assert_true

from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.programs.episodes import Stitcher
from clawq.testing import scripted
from clawq.testing.experience import Chances, TrueSlot, Truth
from clawq.types import EpisodeSummary, Fragment, Voided


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_valid_transition_comes_out_once_whatever_is_lost_and_sent_twice(seed: int, next_step: bool) -> None:
    rng, ids, truth = np.random.default_rng(seed), itertools.count(1), Truth()
    slots = [TrueSlot(f"s{i}", 3, rng, ids, next_step, Chances(0.1, 0.03)) for i in range(3)]
    sent: list[Fragment] = []
    for version in range(120):
        slot = slots[int(rng.integers(3))]
        if rng.random() < 0.03:
            slot.begin_epoch()
        if rng.random() < 0.05:
            # An env that was reset between two fragments
            slot.restart([int(rng.integers(3))])
        fragment, told = slot.fragment(int(rng.integers(1, 9)), version)
        if rng.random() < 0.1:
            continue  # lost
        truth.insert(fragment, told)
        sent.append(fragment)
        if rng.random() < 0.05:
            sent.append(fragment)
    episodes = list(stitch(sent))
    assert_true(episodes, truth)
    # And episodes were stitched over fragments: some are longer than any fragment
    assert max(episode.steps for episode in episodes) > 8
    assert any(episode.complete for episode in episodes)


def test_rows_that_were_taken_back_are_left_out() -> None:
    rng, ids, truth = np.random.default_rng(0), itertools.count(1), Truth()
    slot = TrueSlot("s", 2, rng, ids, chances=Chances(0.0, 0.0))
    first, told = slot.fragment(5)
    truth.insert(first, told)
    slot.restart([1])
    second, told = slot.fragment(5, voided=(Voided(1, 1, 0),))
    truth.insert(second, told)
    episodes = list(stitch([first, second]))
    assert_true(episodes, truth)
    assert sorted((episode.env, episode.steps) for episode in episodes) == [(0, 10), (1, 5)]


def real(fragments: int, steps: int = 7, break_at: tuple[int, int, int] | None = None) -> list[Fragment]:
    """What the real adder makes of an env whose episodes have 3, 5 and 4 steps."""
    env = scripted.CountingEnv(2)
    if break_at is not None:
        env.break_at[break_at] = "obs"
    adder = Adder(scripted.SPEC, 2, Origin("0" * 32, "w", "s", 0), Limits(1e9, steps * step_bytes(scripted.SPEC, 2)))
    adder.begin(env.reset([0, 1]))
    made = []
    for _ in range(fragments):
        adder.open(1, 0.0)
        while not adder.full(0.0):
            action = np.zeros((2, scripted.SPEC.action.size), np.float32)
            broken = adder.add(action, {}, env.step(action))
            if broken is not None:
                adder.restarted(env.restart(broken))
        fragment = adder.close()
        made.append(replace(fragment, meta=replace(fragment.meta, epoch=1)))
    return made


def test_episodes_of_a_real_adder_are_whole_and_have_their_lengths() -> None:
    episodes = list(stitch(real(6)))
    complete = [episode for episode in episodes if episode.complete]
    assert [episode.steps for episode in complete if episode.env == 0][:6] == [3, 5, 4, 3, 5, 4]
    assert all(episode.success == 1.0 for episode in complete)
    # obs shows (env, episode, step)
    for episode in complete:
        assert episode.obs["policy"][:, 2].tolist() == list(range(episode.steps + 1))
    # What the log breaks off is given, and marked
    assert [(episode.env, episode.whole, episode.ended) for episode in episodes if not episode.complete] == [
        (env, True, False) for env in (0, 1) if any(not e.complete and e.env == env for e in episodes)
    ]


def test_a_lost_fragment_breaks_the_episode_and_the_rest_is_marked_as_a_part() -> None:
    fragments = real(6, steps=2)
    episodes = [episode for episode in stitch([fragments[0], *fragments[2:]]) if episode.env == 0]
    assert [(e.steps, e.whole, e.ended) for e in episodes] == [(2, True, False), (4, False, True), (4, True, True)]


def test_a_lost_fragment_breaks_the_episode_even_where_all_observations_look_alike() -> None:
    slot = TrueSlot("s", 1, np.random.default_rng(0), itertools.count(1), chances=Chances(0.0, 0.0))
    alike = [slot.fragment(4)[0] for _ in range(3)]
    alike = [replace(one, obs={key: np.zeros_like(column) for key, column in one.obs.items()}) for one in alike]
    assert [e.steps for e in stitch(alike)] == [12]
    assert [e.steps for e in stitch([alike[0], alike[2]])] == [4, 4]


def test_an_actor_that_took_a_new_epoch_goes_on_with_its_episodes() -> None:
    fragments = real(6, steps=2)
    later = [replace(one, meta=replace(one.meta, epoch=9, seq=seq, life=1)) for seq, one in enumerate(fragments[2:], 1)]
    steps = [(e.steps, e.complete) for e in stitch([*fragments[:2], *later]) if e.env == 0]
    assert steps == [(e.steps, e.complete) for e in stitch(fragments) if e.env == 0]


def test_an_env_that_went_non_finite_leaves_no_trace_of_that_episode() -> None:
    episodes = [e for e in stitch(real(8, steps=2, break_at=(0, 1, 3))) if e.env == 0]
    assert all(np.isfinite(e.obs["policy"]).all() for e in episodes)
    assert 1.0 not in {float(e.obs["policy"][0, 1]) for e in episodes if not e.complete}
    assert [e.steps for e in episodes if e.complete][:3] == [3, 4, 3]


def test_memory_is_bounded_by_giving_what_is_open() -> None:
    rng, ids, truth = np.random.default_rng(0), itertools.count(1), Truth()
    slots = [TrueSlot(f"s{i}", 2, rng, ids, chances=Chances(0.0, 0.0)) for i in range(4)]
    stitcher, episodes = Stitcher(most_open_bytes=20_000), []
    for index in range(200):
        fragment, told = slots[0 if index % 2 else index // 2 % 4].fragment(5)
        truth.insert(fragment, told)
        episodes += list(stitcher.add(fragment))
        assert stitcher._bytes <= 20_000
    episodes += list(stitcher.close())
    assert_true(episodes, truth)
    assert len(episodes) > 8
    cut = [
        e.steps for e in Stitcher(most_steps=10).add(TrueSlot("x", 1, rng, ids, chances=Chances(0, 0)).fragment(25)[0])
    ]
    assert cut == [25]


def test_the_length_that_the_actor_counted_says_whether_an_episode_is_whole() -> None:
    fragments = real(2, steps=2)
    meta = fragments[1].meta
    short = tuple(EpisodeSummary(e.env, e.length + 1, e.episode_return, e.success) for e in meta.episodes)
    fragments[1] = replace(fragments[1], meta=replace(meta, episodes=short))
    assert [e.whole for e in stitch(fragments) if e.ended] == [False]
