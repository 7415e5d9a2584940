from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from clawq_hands.autoreset import AutoresetAdapter
from clawq_hands.spaces import describe
from clawq_hands.vector import GymnasiumVector
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.core import VectorEnv
from clawq.errors import SpecMismatch, UserError
from clawq.types import Fragment

N = 3


class Toy(gymnasium.Env[Any, Any]):
    """Shows (env, episode, step). Terminates or truncates on a schedule; rewards 1 a step; succeeds on termination."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, index: int) -> None:
        self.index, self.episode, self.t = index, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = (0 if seed is not None else self.episode + 1), 0
        return self.show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        length = 2 + (self.index + self.episode) % 4
        terminated = self.t == length and self.episode % 2 == 0
        truncated = self.t == length and not terminated
        return self.show(), 1.0, terminated, truncated, {"is_success": float(terminated)}

    def show(self) -> Any:
        return np.array([self.index, self.episode, self.t], np.float64)


def factory(index: int) -> Callable[[], Toy]:
    return lambda: Toy(index)


def vector(mode: AutoresetMode | None) -> VectorEnv:
    if mode is None:
        envs = [Toy(i) for i in range(N)]
        return GymnasiumVector(envs, describe("toy", Toy.observation_space, Toy.action_space))
    return AutoresetAdapter(SyncVectorEnv([factory(i) for i in range(N)], autoreset_mode=mode), "toy")


def fragments_of(env: VectorEnv, steps: int) -> list[Fragment]:
    adder = Adder(env.spec, N, Origin("0" * 32, "w", "s", 0), Limits(1e9, 7 * step_bytes(env.spec, N)))
    adder.begin(env.reset([1, 2, 3]))
    made = []
    for _ in range(steps // 7):
        adder.open(1, 0.0)
        while not adder.full(0.0):
            action = np.zeros((N, 1), np.float32)
            assert adder.add(action, {}, env.step(action)) is None
        made.append(adder.close())
    env.close()
    return made


def transitions(fragments: list[Fragment], episodes: int) -> Counter[tuple[Any, ...]]:
    """The multiset of valid transitions (s, r, s', terminated, truncated) of the first episodes."""
    found: Counter[tuple[Any, ...]] = Counter()
    for fragment in fragments:
        finals = iter(fragment.final_obs["policy"])
        shown = fragment.obs["policy"]
        for t, i in np.ndindex(fragment.valid.shape):
            after = next(finals) if fragment.boundary[t, i] else shown[t + 1, i]
            ends = (bool(fragment.terminated[t, i]), bool(fragment.truncated[t, i]))
            if fragment.valid[t, i] and shown[t, i, 1] < episodes:
                found[tuple(shown[t, i]), float(fragment.reward[t, i]), tuple(after), *ends] += 1
    return found


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_C42_every_autoreset_mode_gives_the_same_valid_transitions(mode: AutoresetMode) -> None:
    expected = transitions(fragments_of(vector(None), 84), episodes=10)
    # NEXT_STEP spends a row on every reset; so compare whole episodes.
    found = transitions(fragments_of(vector(mode), 84), episodes=10)
    assert expected.total() == sum(2 + (i + episode) % 4 for i in range(N) for episode in range(10))
    assert found == expected


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_C41_a_time_limit_keeps_its_true_last_observation_and_is_no_termination(mode: AutoresetMode | None) -> None:
    for fragment in fragments_of(vector(mode), 42):
        rows = np.argwhere(fragment.boundary)
        assert len(rows) == len(fragment.final_obs["policy"])
        for (t, i), last in zip(rows, fragment.final_obs["policy"], strict=True):
            env, episode, step = fragment.obs["policy"][t, i]
            assert last.tolist() == [env, episode, step + 1]
            assert fragment.truncated[t, i] == (episode % 2 == 1)
            assert fragment.terminated[t, i] == (episode % 2 == 0)


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_episodes_report_length_return_and_success(mode: AutoresetMode | None) -> None:
    episodes = [e for fragment in fragments_of(vector(mode), 42) for e in fragment.meta.episodes]
    for i in range(N):
        for k, episode in enumerate([e for e in episodes if e.env == i]):
            assert episode.length == episode.episode_return == 2 + (i + k) % 4
            assert episode.success == (1.0 if k % 2 == 0 else 0.0)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_restarting_some_envs_leaves_the_others_alone(mode: AutoresetMode) -> None:
    env = vector(mode)
    env.reset([1, 2, 3])
    env.step(np.zeros((N, 1), np.float32))
    obs = env.restart(np.array([False, True, False]))
    assert obs["policy"].tolist() == [[0, 0, 1], [1, 1, 0], [2, 0, 1]]
    result = env.step(np.zeros((N, 1), np.float32))
    assert result.valid.all()
    assert result.obs["policy"][1].tolist() == [1, 1, 1]
    env.close()


def test_a_vector_env_that_hides_its_mode_is_refused() -> None:
    envs = SyncVectorEnv([factory(0)])
    envs.metadata = {}
    with pytest.raises(UserError, match="autoreset_mode"):
        AutoresetAdapter(envs, "toy")


def test_arrays_are_the_callers_to_keep() -> None:
    env = vector(AutoresetMode.SAME_STEP)
    first = env.reset([1, 2, 3])
    kept = first["policy"].copy()
    result = env.step(np.zeros((N, 1), np.float32))
    reward = result.reward.copy()
    env.step(np.zeros((N, 1), np.float32))
    np.testing.assert_array_equal(first["policy"], kept)
    np.testing.assert_array_equal(result.reward, reward)
    env.close()


class Shrinking(Toy):
    """Shows only so many numbers from its third step on."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size = size

    def show(self) -> Any:
        return super().show()[: self.size if self.t > 2 else 3]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ends", [False, True])
def test_an_observation_that_changes_its_shape_is_named_and_never_spread(size: int, ends: bool) -> None:
    toy = Shrinking(size)
    # Episodes of index 3 last 5 steps, those of index 1 three: then the changed one is the last of its episode.
    toy.index = 1 if ends else 3
    env = GymnasiumVector([toy], describe("toy", Toy.observation_space, Toy.action_space))
    env.reset([1])
    action = np.zeros((1, 1), np.float32)
    env.step(action)
    env.step(action)
    with pytest.raises(SpecMismatch, match=rf"obs\.policy: expected shape \[3\], got shape \[{size}\]"):
        env.step(action)


def test_a_vector_env_that_changes_its_shape_is_named() -> None:
    class Wrong(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            seen, *rest = super().step(actions)
            return seen[:, :1], *rest

    envs = Wrong([factory(i) for i in range(N)], autoreset_mode=AutoresetMode.NEXT_STEP)
    env = AutoresetAdapter(envs, "toy")
    env.reset([1, 2, 3])
    with pytest.raises(SpecMismatch, match=r"obs\.policy: expected shape \[3, 3\], got shape \[3, 1\]"):
        env.step(np.zeros((N, 1), np.float32))
