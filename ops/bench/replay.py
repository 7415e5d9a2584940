"""How fast the replay ring is on one CPU thread: insert of a 64x16 HandReach fragment; sample + gather of B = 256.

    python ops/bench/replay.py

Prints microseconds: median wall time, and median CPU time of the thread (what counts on a busy machine). Two slots take turns, so that fragments do not lie back to back;
the ring holds 200 000 rows, more than any cache.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from clawq.core import Entry
from clawq.replay.nstep import gather
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.types import Fragment, FragmentMeta

STEPS, ENVS, CAPACITY, BATCH = 64, 16, 200_000, 256
SPEC = EnvSpec(
    "hands:HandReachDense-v3",
    {"observation": ArraySpec((63,)), "achieved_goal": ArraySpec((15,)), "desired_goal": ArraySpec((15,))},
    ActionSpec((-1.0,) * 20, (1.0,) * 20),
    ("observation", "desired_goal"),
    ("observation", "desired_goal"),
)


def make_fragment(slot: str, rng: np.random.Generator) -> Fragment:
    """Random numbers; a time limit ends the episodes of four envs."""
    meta = FragmentMeta("0" * 32, "h/w", slot, 1, 1, SPEC.fingerprint, 0, 1, STEPS, ENVS, STEPS * ENVS)
    truncated = np.zeros((STEPS, ENVS), np.bool_)
    truncated[20, :4] = True
    return Fragment(
        meta,
        {key: rng.normal(size=(STEPS + 1, ENVS, *one.shape)).astype(np.float32) for key, one in SPEC.obs.items()},
        rng.uniform(-1, 1, (STEPS, ENVS, 20)).astype(np.float32),
        rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        np.zeros((STEPS, ENVS), np.bool_),
        truncated,
        np.ones((STEPS, ENVS), np.bool_),
        {key: rng.normal(size=(4, *one.shape)).astype(np.float32) for key, one in SPEC.obs.items()},
    )


def report(name: str, call: Callable[[], object], times: int) -> None:
    """Time `call` and print."""
    wall, cpu = [], []
    for _ in range(times):
        start, start_cpu = time.perf_counter(), time.thread_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - start_cpu)
    print(f"{name:42} wall {1e6 * np.median(wall):6.0f} us   cpu {1e6 * np.median(cpu):6.0f} us")


def main() -> None:
    """Measure."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    ring = ReplayRing(SPEC, CAPACITY)
    fragments = [make_fragment(slot, rng) for slot in "ab"]
    turn = 0

    def insert() -> None:
        nonlocal turn
        turn += 1
        one = fragments[turn % 2]
        ring.insert(replace(one, meta=replace(one.meta, seq=turn, produced=turn * STEPS * ENVS)))

    while ring.head < 2 * CAPACITY:
        insert()
    sampler = UniformSampler(ring, torch.Generator().manual_seed(0))
    report("insert 64x16", insert, 500)
    examiner = Examiner(lambda payload: fragments[0], FragmentCheck(SPEC, "0" * 32))
    report("check 64x16", lambda: examiner.examine(Entry("a", 1, 1, b"")), 500)
    report("sample 256", lambda: sampler.rows(BATCH), 2000)
    for n in (1, 3, 5):
        report(f"sample + gather 256, n = {n}", lambda n=n: gather(ring, sampler.rows(BATCH), n, 0.98), 2000)  # type: ignore[misc]
    print(f"{ring.bytes_per_row} bytes per row")


if __name__ == "__main__":
    main()
