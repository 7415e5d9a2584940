"""Env steps/s of one whole actor (policy, exploration, fragments, outbox, encoding) against bare env.step loops.

python ops/bench/collection.py [--quick] [--commit]

The bare loop steps `gymnasium.make` envs one after another in a for loop, resets included, with uniform random
actions. A second line replays the very actions of the actor on bare envs with the same seeds: the same physics step by
step, so that only our own work is the difference.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from clawq.acting.seeds import actor_seed, env_seeds
from clawq.core import Control, Weights
from clawq.specs import EnvSpec
from clawq.transport.codec import decode
from clawq.types import FloatArray
from ops.bench.common import Bench, median
from ops.bench.hands import Acting, hand_config, make_actor, make_env, untrained_weights


class Everything:
    """A sink that accepts all, and keeps the executed actions in env space."""

    epoch = 1

    def __init__(self, spec: EnvSpec) -> None:
        self._to_env = spec.action.to_env
        self.payloads: list[bytearray] = []

    def send(self, seq: int, payload: Any) -> Control:
        """Take it."""
        self.payloads.append(payload)
        return self.poll()

    def poll(self) -> Control:
        """There are weights."""
        return Control(head=1, stop=False, window_bytes=1 << 40, config_epoch=1)

    def unread_bytes(self) -> int:
        """All is read."""
        return 0

    def close(self, all_sent: bool = False) -> None:
        """Nothing to give back."""

    def take_actions(self) -> FloatArray:
        """Env-space actions [steps, N, A] of all that came since the last call."""
        taken, self.payloads = self.payloads, []
        return self._to_env(np.concatenate([decode(one).action for one in taken]))


class OneVersion:
    """A source of one version of weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def fetch_newer(self, than: int) -> Weights | None:
        """The version, once."""
        return self._weights if than < self._weights.version else None

    def fetch(self, version: int) -> Weights:
        """The version."""
        return self._weights


class Bare:
    """gymnasium envs in a for loop."""

    def __init__(self, env_id: str, seeds: list[int]) -> None:
        import gymnasium

        self._envs = [gymnasium.make(env_id, disable_env_checker=True) for _ in seeds]
        for env, seed in zip(self._envs, seeds, strict=True):
            env.reset(seed=seed)

    def steps(self, actions: Iterator[FloatArray] | FloatArray) -> int:
        """One batched step for each row [N, A] of actions; returns the env steps taken."""
        taken = 0
        for action in actions:
            for env, one in zip(self._envs, action, strict=True):
                _, _, terminated, truncated, _ = env.step(one)
                if terminated or truncated:
                    env.reset()
            taken += len(self._envs)
        return taken


class Rate:
    """Env steps by wall time and by CPU time of the process, of one turn."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def stop(self, env_steps: int) -> tuple[float, float]:
        """Env steps per second of wall, and of CPU time."""
        return env_steps / (time.perf_counter() - self._wall_s), env_steps / (time.process_time() - self._cpu_s)


def wait_until_trained(acting: Acting) -> None:
    """Act until the policy is used."""
    acting.loader.get()
    while acting.sender.view.weights is None:
        acting.sender.wait(0.1)
    acting.steps(4)
    acting.sender.drain(10.0)


def main() -> None:
    bench = Bench("collection", __doc__)
    torch.set_num_threads(1)
    config = hand_config()
    env = make_env(config)
    spec, n, env_id = env.spec, env.num_envs, str(config.environment.options["id"])
    sink = Everything(spec)
    acting = make_actor(config, env, (sink, OneVersion(untrained_weights(config, spec))))
    wait_until_trained(acting)
    random_bare = Bare(env_id, env_seeds(1, n))
    same_bare = Bare(env_id, env_seeds(actor_seed(config.seed, "bench", 0), n))
    same_bare.steps(sink.take_actions())
    rng = np.random.default_rng(0)
    low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
    batched = bench.pick(200, 30)
    turns: dict[str, list[tuple[float, float]]] = {"actor": [], "random": [], "same": []}
    for _ in range(bench.pick(9, 3)):
        rate = Rate()
        taken = acting.steps(batched)
        acting.sender.drain(10.0)
        turns["actor"].append(rate.stop(taken))
        rate = Rate()
        random = (rng.uniform(low, high, (n, low.size)).astype(np.float32) for _ in range(batched))
        turns["random"].append(rate.stop(random_bare.steps(random)))
        actions = sink.take_actions()
        rate = Rate()
        turns["same"].append(rate.stop(same_bare.steps(actions)))
    acting.close()
    for line, other in (("ratio", "random"), ("ratio_same_actions", "same")):
        pairs = list(zip(turns["actor"], turns[other], strict=True))
        bench.ratio(
            line,
            [(ours[0], bare[0]) for ours, bare in pairs],
            ">= 0.93",
            by_cpu_time=median([ours[1] / bare[1] for ours, bare in pairs]),
            actor_env_steps_per_s=median([ours[0] for ours, _ in pairs]),
            bare_env_steps_per_s=median([bare[0] for _, bare in pairs]),
            actor_env_steps_per_cpu_s=median([ours[1] for ours, _ in pairs]),
            bare_env_steps_per_cpu_s=median([bare[1] for _, bare in pairs]),
            env_steps_per_turn=batched * n,
        )


if __name__ == "__main__":
    main()
