import numpy as np

from clawq.acting.actor import Actor
from clawq.acting.exploration import NoiseLadder
from clawq.acting.seeds import actor_seed, env_seeds, noise_generator
from clawq.core import Explorer, Weights
from clawq.specs import ActionSpec
from clawq.types import FloatArray, Obs


class ConstantPolicy:
    def __init__(self, value: float) -> None:
        self.value = value
        self.loaded: list[object] = []

    def load(self, weights: object) -> None:
        self.loaded.append(weights)

    def act(self, obs: Obs) -> FloatArray:
        return np.full((3, 2), self.value, np.float32)

    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        return explorer.perturb(self.act(obs)), {}


def ladder(low: float, high: float, n: int = 3) -> NoiseLadder:
    return NoiseLadder(low, high, (n, 2), np.random.default_rng(0))


def test_noise_grows_evenly_from_env_to_env() -> None:
    noisy = ladder(0.1, 0.3)
    drawn = np.stack([noisy.perturb(np.zeros((3, 2), np.float32)) for _ in range(4000)])
    np.testing.assert_allclose(drawn.std(axis=(0, 2)), [0.1, 0.2, 0.3], rtol=0.05)
    np.testing.assert_allclose(drawn.mean(axis=(0, 2)), 0, atol=0.02)


def test_a_lone_env_takes_the_middle_of_the_ladder() -> None:
    noisy = ladder(0.1, 0.3, n=1)
    drawn = np.stack([noisy.perturb(np.zeros((1, 2), np.float32)) for _ in range(4000)])
    np.testing.assert_allclose(drawn.std(), 0.2, rtol=0.05)


def test_perturbed_actions_stay_in_policy_space() -> None:
    noisy = ladder(2.0, 2.0)
    drawn = np.stack([noisy.perturb(np.ones((3, 2), np.float32)) for _ in range(100)])
    assert drawn.max() == 1.0
    assert drawn.min() == -1.0
    assert drawn.dtype == np.float32


def test_a_share_of_the_actions_is_uniform_env_by_env() -> None:
    noisy = NoiseLadder(0, 0, (4, 2), np.random.default_rng(0), random_share=0.3)
    drawn = np.stack([noisy.perturb(np.full((4, 2), 0.5, np.float32)) for _ in range(3000)])
    uniform = drawn != 0.5
    np.testing.assert_array_equal(uniform[..., 0], uniform[..., 1])  # a whole action or nothing of it
    np.testing.assert_allclose(uniform[..., 0].mean(0), 0.3, atol=0.04)
    np.testing.assert_allclose([drawn[uniform].min(), drawn[uniform].max()], [-1, 1], atol=0.01)
    assert drawn.dtype == np.float32


def test_a_random_action_is_held_for_some_steps_and_the_share_stays() -> None:
    noisy = NoiseLadder(0, 0, (40, 2), np.random.default_rng(0), random_share=0.3, random_steps=5)
    drawn = np.stack([noisy.perturb(np.full((40, 2), 0.5, np.float32)) for _ in range(4000)])[..., 0]
    np.testing.assert_allclose((drawn != 0.5).mean(), 0.3, atol=0.01)
    begins = (drawn[1:] != drawn[:-1]) & (drawn[1:] != 0.5)
    np.testing.assert_allclose((drawn[1:] != 0.5).sum() / begins.sum(), 5, rtol=0.03)


def test_uniform_actions_fill_policy_space() -> None:
    drawn = np.stack([ladder(0, 0).uniform()] + [x for x in [ladder(0, 0).uniform()]])
    many = NoiseLadder(0, 0, (4000, 2), np.random.default_rng(1)).uniform()
    assert drawn.dtype == np.float32
    np.testing.assert_allclose([many.min(), many.max(), many.mean()], [-1, 1, 0], atol=0.03)


def test_untrained_weights_explore_at_random_and_build_no_policy() -> None:
    def never() -> ConstantPolicy:
        raise AssertionError("a policy was built")

    actor = Actor(ladder(0, 0), never)
    actor.adopt(Weights(1, {}, updates=0, metadata={}))
    action, extras = actor.act({})
    assert actor.version == 1
    assert len(np.unique(action)) == action.size
    assert extras == {}


def test_trained_weights_are_loaded_and_followed() -> None:
    policy = ConstantPolicy(0.25)
    actor = Actor(ladder(0, 0), lambda: policy)
    actor.adopt(Weights(4, {"a": np.ones(1)}, updates=10, metadata={}))
    assert actor.version == 4
    np.testing.assert_array_equal(actor.act({})[0], 0.25)
    actor.adopt(Weights(5, {"a": np.zeros(1)}, updates=20, metadata={}))
    assert len(policy.loaded) == 2


def test_C52_policy_space_is_scaled_to_lopsided_bounds_in_one_place() -> None:
    spec = ActionSpec((-0.2,), (1.4,))
    shown = spec.to_env(np.array([[0.0], [-1.0], [1.0], [7.0], [-7.0]], np.float32))
    np.testing.assert_allclose(shown[:, 0], [0.6, -0.2, 1.4, 1.4, -0.2], atol=1e-6)
    assert (shown >= -np.float32(0.2)).all()
    assert (shown <= np.float32(1.4)).all()


def test_C54_every_env_of_every_worker_has_its_own_stream_and_a_rerun_has_the_same() -> None:
    def all_seeds(run_seed: int, incarnation: int = 0) -> list[int]:
        return [s for w in range(8) for s in env_seeds(actor_seed(run_seed, f"host-w{w}-0", incarnation), 4)]

    assert len(set(all_seeds(7))) == 32
    assert all_seeds(7) == all_seeds(7)
    assert not set(all_seeds(7)) & set(all_seeds(8))
    # A restarted actor gets new ones.
    assert not set(all_seeds(7)) & set(all_seeds(7, incarnation=1_700_000_000_000))


def test_exploration_noise_is_not_the_envs_randomness() -> None:
    seed = actor_seed(7, "host-w-0", 0)
    assert noise_generator(seed).random() == noise_generator(seed).random()
    assert noise_generator(seed).random() not in [np.random.default_rng(s).random() for s in env_seeds(seed, 64)]
