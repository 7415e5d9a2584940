"""The hand that the benchmarks use, and an actor put together as `clawq.programs.acting` does, but with chosen ends.

`make_actor` is the real rollout loop with the real outbox, sender, adder and exploration; only where fragments go and
where weights come from is the caller's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clawq import plugins
from clawq.acting.actor import Actor
from clawq.acting.adder import Adder, Limits, Origin, step_bytes
from clawq.acting.exploration import NoiseLadder
from clawq.acting.loop import RolloutLoop
from clawq.acting.outbox import Outbox
from clawq.acting.seeds import actor_seed, env_seeds, noise_generator
from clawq.acting.sender import OpenSink, Sender
from clawq.config import RunConfig
from clawq.config_file import load_config
from clawq.core import Policy, VectorEnv, Weights, WeightsSource
from clawq.programs.policy_loader import PolicyLoader
from clawq.specs import EnvSpec
from clawq.transport.codec import encode
from clawq.types import Fragment
from ops.bench.common import ROOT

HAND = ROOT / "configs" / "hand_reach.yaml"
STEPS = 64
TAG = "b" * 32


def hand_config(*overrides: str, path: Path = HAND) -> RunConfig:
    """The configuration of the hand runs."""
    return load_config(str(path), overrides)


def make_env(config: RunConfig) -> VectorEnv:
    """The envs of one actor."""
    plugin = plugins.load("environments", config.environment.name)
    env: VectorEnv = plugin.make(plugin.Options.model_validate(config.environment.options), config.environment.num_envs)
    return env


def make_algorithm(config: RunConfig, spec: EnvSpec) -> Any:
    """The learner's side of the configured algorithm, on the CPU."""
    plugin = plugins.load("algorithms", config.algorithm.name)
    options = plugin.Options.model_validate(config.algorithm.options)
    return plugin.make_algorithm(spec, options, "cpu", config.seed)


def untrained_weights(config: RunConfig, spec: EnvSpec, version: int = 1) -> Weights:
    """Weights of a fresh policy that pass for trained ones, so that the actor acts by its policy."""
    arrays = {name: tensor.numpy() for name, tensor in make_algorithm(config, spec).weights().items()}
    return Weights(version, arrays, 1, {})


def rollouts(config: RunConfig, env: VectorEnv, count: int, steps: int = STEPS, tag: str = TAG) -> list[Fragment]:
    """Real fragments of `steps` x N env steps under uniform random actions, one after another (seq 1, 2 ...)."""
    n, spec = env.num_envs, env.spec
    noise = NoiseLadder(0.0, 1.0, (n, spec.action.size), np.random.default_rng(0))
    adder = Adder(spec, n, Origin(tag, "bench", "bench", 0), Limits(1e9, steps * step_bytes(spec, n)))
    adder.begin(env.reset(env_seeds(config.seed, n)))
    fragments = []
    for _ in range(count):
        adder.open(1, 0.0)
        while not adder.full(0.0):
            action = noise.uniform()
            adder.add(action, {}, env.step(spec.action.to_env(action)))
        fragments.append(adder.close())
    return fragments


class TimedActor(Actor):
    """An actor that tells when it takes weights over."""

    def __init__(
        self, exploration: NoiseLadder, make_policy: Callable[[], Policy], adopted: Callable[[int, float], None]
    ) -> None:
        super().__init__(exploration, make_policy)
        self._adopted = adopted

    def adopt(self, weights: Weights) -> None:
        """As Actor, and tell."""
        super().adopt(weights)
        self._adopted(weights.version, time.monotonic())


@dataclass(slots=True)
class Acting:
    """A built actor: run `loop`, then `close`."""

    env: VectorEnv
    loop: RolloutLoop
    sender: Sender
    loader: PolicyLoader

    def steps(self, batched_steps: int) -> int:
        """Act for that many batched steps; returns the env steps taken."""
        left = [batched_steps + 1]

        def ended() -> str | None:
            left[0] -= 1
            return "enough" if left[0] <= 0 else None

        return self.loop.run(ended).env_steps

    def close(self) -> None:
        """End the sender and the envs."""
        self.sender.close()
        self.env.close()


def make_actor(
    config: RunConfig,
    env: VectorEnv,
    ends: tuple[OpenSink, WeightsSource],
    slot: str = "bench",
    adopted: Callable[[int, float], None] = lambda version, time_s: None,
    tag: str = TAG,
) -> Acting:
    """One actor over these ends, its envs reset.

    Args:
        config: of the run.
        env: its envs.
        ends: where fragments go, and where weights come from.
        slot: its name.
        adopted: called when weights are taken over, with version and monotonic seconds.
        tag: of the run.
    """
    sink, weights = ends
    spec, n, actors = env.spec, env.num_envs, config.actors
    outbox = Outbox(actors.outbox_fragments, actors.on_full)
    sender = Sender(outbox, sink, lambda: sink, encode, weights)
    sender.start()
    seed = actor_seed(config.seed, slot, 0)
    exploration = config.exploration
    noise = NoiseLadder(exploration.noise_min, exploration.noise_max, (n, spec.action.size), noise_generator(seed))
    loader = PolicyLoader(config, spec)
    loader.start()
    adder = Adder(spec, n, Origin(tag, "bench", slot, seed), Limits(actors.fragment_s, actors.fragment_bytes))
    loop = RolloutLoop(env, TimedActor(noise, loader.get, adopted), adder, outbox, sender, policy_ready=loader.ready)
    loop.reset(env_seeds(seed, n))
    return Acting(env, loop, sender, loader)
