from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.errors import SpecMismatch
from clawq.replay.ring import ReplayRing
from clawq.testing.scripted import SPEC, CountingEnv
from clawq.types import Fragment, Provenance, Voided

ORIGIN = Origin(run="0" * 32, worker="host/w", slot="host-w-0", seed=7)


def make_adder(num_envs: int, steps: int) -> Adder:
    return Adder(SPEC, num_envs, ORIGIN, Limits(seconds=1e9, size_bytes=steps * step_bytes(SPEC, num_envs)))


def collect(env: CountingEnv, adder: Adder, fragments: int) -> list[Fragment]:
    adder.begin(env.reset([0] * env.num_envs))
    made = []
    rng = np.random.default_rng(0)
    for _ in range(fragments):
        adder.open(3, 0.0)
        while not adder.full(0.0):
            action = rng.uniform(-1, 1, (env.num_envs, 2)).astype(np.float32)
            broken = adder.add(action, {}, env.step(SPEC.action.to_env(action)))
            if broken is not None:
                adder.restarted(env.restart(broken))
        made.append(adder.close())
    return made


def rows_of(fragments: list[Fragment]) -> list[tuple[int, ...]]:
    """Valid transitions as (env, episode, step before, step after, truncated), voided ones left out."""
    rows: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for fragment in fragments:
        for notice in fragment.meta.voided:
            for key in [k for k in rows if k[2] == notice.env and (k[0], k[1]) >= (notice.seq, notice.t)]:
                del rows[key]
        finals = iter(fragment.final_obs["policy"])
        shown = fragment.obs["policy"]
        for t, i in np.ndindex(fragment.valid.shape):
            last = next(finals) if fragment.boundary[t, i] else shown[t + 1, i]
            if fragment.valid[t, i]:
                env, episode, step = shown[t, i].astype(int)
                assert last[0] == env
                assert last[1] == episode
                rows[fragment.meta.seq, t, i] = (env, episode, step, int(last[2]), int(fragment.truncated[t, i]))
    return sorted(rows.values())


def test_C44_obs_after_a_step_is_the_obs_before_the_next_one_inside_an_episode() -> None:
    env = CountingEnv(4, lengths=(3, 7, 2))
    fragments = collect(env, make_adder(4, 5), 210)
    episodes = sum(len(fragment.meta.episodes) for fragment in fragments)
    assert episodes >= 1000
    for fragment, following in pairwise(fragments):
        np.testing.assert_array_equal(fragment.obs["policy"][-1], following.obs["policy"][0])
    for env_index, _episode, before, after, _ in rows_of(fragments):
        assert after == before + 1, env_index


@pytest.mark.parametrize(("num_envs", "capacity"), [(1, 6), (3, 18), (4, 100), (8, 1000)])
def test_a_fragment_always_fits_into_half_of_the_smallest_ring_that_is_allowed_whatever_ends_in_it(
    num_envs: int, capacity: int
) -> None:
    adder = Adder(SPEC, num_envs, ORIGIN, Limits(seconds=1e9, size_bytes=10**7, rows=capacity // 2))
    ring = ReplayRing(SPEC, capacity)
    fragments = collect(CountingEnv(num_envs, lengths=(1,)), adder, 5)
    for fragment in fragments:
        assert ring.insert(fragment) == fragment.meta.steps * num_envs
    # And no smaller than that needs.
    more = 2 * num_envs * (fragments[0].meta.steps + 1) + num_envs
    assert more > capacity // 2


def test_every_transition_is_there_once_and_boundaries_have_the_true_last_observation() -> None:
    env = CountingEnv(3, lengths=(3, 5, 4))
    fragments = collect(env, make_adder(3, 4), 6)
    rows = rows_of(fragments)
    assert len(rows) == len(set(rows)) == 6 * 4 * 3
    for env_index, episode, _, after, truncated in rows:
        length = env.lengths[(env_index + episode) % 3]
        assert (after == length) == bool(truncated)


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (2, 2), (3,)])
def test_an_observation_that_changes_its_shape_is_named_and_never_spread(shape: tuple[int, ...]) -> None:
    env, adder = CountingEnv(2, lengths=(9,)), make_adder(2, 5)
    adder.begin(env.reset([0, 0]))
    adder.open(3, 0.0)
    action = np.zeros((2, 2), np.float32)
    for _ in range(3):
        adder.add(action, {}, env.step(action))
    result = env.step(action)
    changed = replace(result, obs={"policy": np.zeros(shape, np.float32)})
    with pytest.raises(SpecMismatch, match=r"obs\.policy: expected shape \[2, 3\], got shape") as caught:
        adder.add(action, {}, changed)
    assert caught.value.leaf == "obs.policy"


def test_a_last_observation_of_another_shape_is_named() -> None:
    env, adder = CountingEnv(2, lengths=(1,)), make_adder(2, 5)
    adder.begin(env.reset([0, 0]))
    adder.open(3, 0.0)
    action = np.zeros((2, 2), np.float32)
    changed = replace(env.step(action), final_obs={"policy": np.zeros((2, 1), np.float32)})
    with pytest.raises(SpecMismatch, match=r"final_obs\.policy: expected shape \[2, 3\], got shape \[2, 1\]"):
        adder.add(action, {}, changed)


def test_the_first_observation_after_a_boundary_belongs_to_the_next_episode() -> None:
    [fragment] = collect(CountingEnv(1, lengths=(2,)), make_adder(1, 5), 1)
    assert fragment.obs["policy"][:, 0, 1:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert fragment.final_obs["policy"].tolist() == [[0, 0, 2], [0, 1, 2]]


def test_meta_counts_steps_and_episodes_exactly() -> None:
    fragments = collect(CountingEnv(2, lengths=(3,)), make_adder(2, 4), 3)
    assert [f.meta.seq for f in fragments] == [1, 2, 3]
    assert [f.meta.produced for f in fragments] == [8, 16, 24]
    assert all((f.meta.steps, f.meta.envs, f.meta.weights_version, f.meta.seed) == (4, 2, 3, 7) for f in fragments)
    episodes = [e for f in fragments for e in f.meta.episodes]
    assert [(e.env, e.length) for e in episodes] == [(0, 3), (1, 3)] * 4
    assert episodes[0].episode_return == 1 + 2 + 3
    assert episodes[2].episode_return == 303 + 1 + 2
    assert all(e.success == 1.0 for e in episodes)


def test_a_fragment_ends_by_time_with_at_least_one_step_and_by_size() -> None:
    env, adder = CountingEnv(2), Adder(SPEC, 2, ORIGIN, Limits(0.3, 10 * step_bytes(SPEC, 2)))
    adder.begin(env.reset([0, 0]))
    adder.open(1, 100.0)
    assert not adder.full(200.0)
    action = np.zeros((2, 2), np.float32)
    adder.add(action, {}, env.step(action))
    assert not adder.full(100.29)
    assert adder.full(100.3)
    for _ in range(9):
        adder.add(action, {}, env.step(action))
    assert adder.full(100.0)
    assert adder.close().meta.steps == 10


def test_fragments_own_their_memory() -> None:
    first, second = collect(CountingEnv(2), make_adder(2, 3), 2)
    kept = first.obs["policy"].copy()
    second.obs["policy"][:] = -1
    np.testing.assert_array_equal(first.obs["policy"], kept)


def test_extras_are_stacked_over_time() -> None:
    env, adder = CountingEnv(2), make_adder(2, 3)
    adder.begin(env.reset([0, 0]))
    adder.open(1, 0.0)
    action = np.zeros((2, 2), np.float32)
    for t in range(3):
        adder.add(action, {"log_prob": np.full(2, t, np.float32)}, env.step(action))
    assert adder.close().extras["log_prob"].tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("what", ["obs", "reward"])
@pytest.mark.parametrize("at", [(1, 0, 2), (1, 2, 1), (1, 1, 4)])
def test_C48_an_env_that_goes_non_finite_is_no_experience_from_its_episodes_start(
    what: str, at: tuple[int, int, int]
) -> None:
    # Given four envs with episodes of 5 steps (the one at (1, 1, 4) lies over a fragment's seam)
    def run(break_it: bool) -> tuple[CountingEnv, list[Fragment]]:
        env = CountingEnv(4, lengths=(5,))
        if break_it:
            env.break_at[at] = what
        return env, collect(env, make_adder(4, 4), 8)

    _, whole = run(False)
    env, fragments = run(True)
    # Then nothing non-finite leaves, the broken episode is gone from its start, and all else is as before
    for fragment in fragments:
        for array in (fragment.reward, fragment.obs["policy"], fragment.final_obs["policy"]):
            assert np.isfinite(array).all()
    if what == "obs":
        assert env.restarts == [1]
    broken = [row for row in rows_of(fragments) if row[0] == 1 and row[1] == at[1]]
    if what == "obs":
        assert broken == []
    else:  # the env goes on in the same episode; what comes after the bad reward counts again
        assert all(row[2] >= at[2] for row in broken)
    others = [row for row in rows_of(whole) if row[0] != 1]
    assert [row for row in rows_of(fragments) if row[0] != 1] == others
    assert all(e.env != 1 or e.length <= 5 for f in fragments for e in f.meta.episodes)


def test_rows_that_were_sent_before_an_env_broke_are_named() -> None:
    env = CountingEnv(2, lengths=(100,))
    env.break_at[1, 0, 7] = "obs"
    fragments = collect(env, make_adder(2, 3), 3)
    assert [f.meta.voided for f in fragments] == [(), (), (Voided(1, 1, 0),)]
    assert fragments[2].valid[:, 1].tolist() == [False, True, True]
    assert fragments[2].valid[:, 0].all()


def test_an_episode_that_begins_with_a_fragment_is_named_from_that_fragment() -> None:
    env = CountingEnv(1, lengths=(3, 50))
    env.lengths = (3, 50)
    env.break_at[0, 1, 4] = "obs"
    fragments = collect(env, make_adder(1, 3), 3)
    assert fragments[2].meta.voided == (Voided(0, 2, 0),)


def test_a_last_observation_that_is_not_finite_takes_its_episode_with_it() -> None:
    env = CountingEnv(2, lengths=(3,))
    env.break_at[0, 1, 3] = "obs"
    [fragment] = collect(env, make_adder(2, 9), 1)
    assert fragment.valid[:, 0].tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert not fragment.boundary[5, 0]
    assert len(fragment.final_obs["policy"]) == int(fragment.boundary.sum()) == 5
    assert env.restarts == []
    assert [e.length for e in fragment.meta.episodes if e.env == 0] == [3, 3]


def test_adding_without_an_open_fragment_is_refused() -> None:
    env, adder = CountingEnv(1), make_adder(1, 2)
    adder.begin(env.reset([0]))
    action = np.zeros((1, 2), np.float32)
    refused: Callable[[], object] = lambda: adder.add(action, {}, env.step(action))  # noqa: E731
    with pytest.raises(RuntimeError, match="open"):
        refused()


def test_fragments_say_where_they_come_from() -> None:
    made_by = Provenance("host", "test:count", "0.1", "abc")
    adder = Adder(SPEC, 2, replace(ORIGIN, made_by=made_by), Limits(1e9, 10_000))
    env = CountingEnv(2)
    adder.begin(env.reset([0, 1]))
    adder.open(1, 0.0)
    action = np.zeros((2, SPEC.action.size), np.float32)
    adder.add(action, {}, env.step(action))
    assert adder.close().meta.made_by == made_by
