"""The replay ring beside TorchRL's TensorDict replay buffers and SB3's, in one run: transitions/s on one thread.

python ops/bench/peers.py [--quick] [--commit]          (needs the extra `peers`: pip install -e '.[peers]')

HandReach transitions, a million of them in each buffer (goal observations of 63 + 15 + 15 numbers, 20 actions). Lines:

    insert               64 steps of 16 envs
    uniform_B            a batch, ready for an update (float32 tensors, obs and next obs)
    prioritized_B        a batch by priority, and new priorities for it (SB3 has no such buffer)

The buffers take turns. The value of a line is ours over the best of the others.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# One thread for everybody; numpy's threads are chosen when it is imported.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import numpy as np
import torch

from clawq.replay.batches import Batches
from clawq.replay.nstep import Gatherer
from clawq.replay.prioritized import PrioritizedSampler
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from ops.bench.common import Bench, median
from ops.bench.replay import ENVS, SPEC, STEPS, make_fragment

BATCHES = (256, 8192)
ACTIONS = SPEC.action.size
Call = Callable[[], object]


class Ours:
    """Two rings, since a sampler belongs to one."""

    def __init__(self, capacity: int) -> None:
        rng = np.random.default_rng(0)
        self._fragments, self._turn = [make_fragment(slot, rng) for slot in "ab"], 0
        self.uniform_ring, self.ring = ReplayRing(SPEC, capacity), ReplayRing(SPEC, capacity)
        self._uniform = UniformSampler(self.uniform_ring, torch.Generator().manual_seed(0))
        self._prioritized = PrioritizedSampler(self.ring, torch.Generator().manual_seed(0))
        for ring in (self.uniform_ring, self.ring):
            while ring.head < capacity:
                self._put(ring)

    def _put(self, ring: ReplayRing) -> None:
        self._turn += 1
        one = self._fragments[self._turn % 2]
        ring.insert(replace(one, meta=replace(one.meta, seq=self._turn, produced=self._turn * STEPS * ENVS)))

    def insert(self) -> Call:
        return lambda: self._put(self.uniform_ring)

    def uniform(self, size: int) -> Call:
        return Batches(self.uniform_ring, self._uniform, size, gatherer(self.uniform_ring, size)).next

    def prioritized(self, size: int) -> Call:
        batches = Batches(self.ring, self._prioritized, size, gatherer(self.ring, size))
        error = torch.rand(size)

        def draw() -> None:
            batches.learned(batches.next(), error)

        return draw


class TorchRl:
    """TensorDictReplayBuffer over a LazyTensorStorage; obs and next obs are both stored, as its collectors do."""

    def __init__(self, capacity: int) -> None:
        # Its C++ part may be made for a newer torch; what is missing then is not used here, if it is looked up late.
        sys.setdlopenflags(os.RTLD_LAZY)
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
        from torchrl.data.replay_buffers.samplers import RandomSampler

        count = STEPS * ENVS
        obs = {key: torch.randn(count, *one.shape) for key, one in SPEC.obs.items()}
        scalars = {"reward": torch.randn(count, 1), "terminated": torch.zeros(count, 1, dtype=torch.bool)}
        self._chunk = TensorDict(
            {**obs, "action": torch.rand(count, ACTIONS), "next": TensorDict({**obs, **scalars}, [count])}, [count]
        )

        def buffer(sampler: Any) -> Any:
            made = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, priority_key="td_error")
            for _ in range(capacity // count + 1):
                made.extend(self._chunk)
            return made

        self._uniform = buffer(RandomSampler())
        self._prioritized = buffer(PrioritizedSampler(capacity, alpha=0.6, beta=0.4))

    def insert(self) -> Call:
        return lambda: self._uniform.extend(self._chunk)

    def uniform(self, size: int) -> Call:
        return lambda: self._uniform.sample(size)

    def prioritized(self, size: int) -> Call:
        error = torch.rand(size)

        def draw() -> None:
            found = self._prioritized.sample(size)
            self._prioritized.update_priority(found["index"], error)

        return draw


class Sb3:
    """DictReplayBuffer, one step of all envs at a time, as its algorithms use it."""

    def __init__(self, capacity: int) -> None:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import DictReplayBuffer

        boxes: dict[str, spaces.Space[Any]] = {
            key: spaces.Box(-np.inf, np.inf, one.shape, np.float32) for key, one in SPEC.obs.items()
        }
        action = spaces.Box(-1, 1, (ACTIONS,), np.float32)
        self._buffer = DictReplayBuffer(capacity, spaces.Dict(boxes), action, device="cpu", n_envs=ENVS)
        rng = np.random.default_rng(0)
        self._obs = {key: rng.normal(size=(ENVS, *one.shape)).astype(np.float32) for key, one in SPEC.obs.items()}
        self._action = rng.uniform(-1, 1, (ENVS, ACTIONS)).astype(np.float32)
        self._infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]
        for _ in range(capacity // ENVS + 1):
            self._step()

    def _step(self) -> None:
        zeros = np.zeros(ENVS, np.float32)
        self._buffer.add(self._obs, self._obs, self._action, zeros, zeros, self._infos)

    def insert(self) -> Call:
        def steps() -> None:
            for _ in range(STEPS):
                self._step()

        return steps

    def uniform(self, size: int) -> Call:
        return lambda: self._buffer.sample(size)

    def prioritized(self, size: int) -> Call | None:
        return None


def gatherer(ring: ReplayRing, size: int) -> Callable[[], Gatherer]:
    """Makes one-step batches of a ring."""
    return lambda: Gatherer(ring, size, Returns(1, 0.98))


def rates(calls: Mapping[str, Call], transitions: int, turns: int, seconds: float) -> dict[str, float]:
    """Transitions/s of each: median over the turns, in which all take theirs."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()
            times, began_s = 0, time.thread_time()
            while (spent_s := time.thread_time() - began_s) < seconds:
                call()
                times += 1
            found[name].append(times * transitions / spent_s)
    return {name: median(each) for name, each in found.items()}


def main() -> None:
    bench = Bench("peers", __doc__)
    torch.set_num_threads(1)
    capacity = bench.pick(1_000_000, 100_000)
    turns, seconds = bench.pick(7, 3), 0.5
    try:
        buffers: dict[str, Any] = {"clawq": Ours(capacity), "torchrl": TorchRl(capacity), "sb3": Sb3(capacity)}
    except ImportError as error:
        sys.exit(f"peers: {error}; install the other libraries with: pip install -e '.[peers]'")

    def line(name: str, target: str, transitions: int, kind: str, *words: int) -> None:
        calls = {who: made for who, buffer in buffers.items() if (made := getattr(buffer, kind)(*words)) is not None}
        found = rates(calls, transitions, turns, seconds)
        best = max(rate for who, rate in found.items() if who != "clawq")
        bench.result(
            name, found["clawq"] / best, "ratio", target, **{f"{who}_per_s": each for who, each in found.items()}
        )

    line("insert", "> 1", STEPS * ENVS, "insert")
    for size in BATCHES:
        line(f"uniform_{size}", "> 1", size, "uniform", size)
        line(f"prioritized_{size}", ">= 3", size, "prioritized", size)


if __name__ == "__main__":
    main()
