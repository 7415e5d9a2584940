"""How fast the replay ring is on one CPU thread: insert of a 64x16 HandReach fragment; sample + gather of B = 256.

python ops/bench/replay.py [--quick] [--commit]

Microseconds: median wall time, and median CPU time of the thread (what counts on a busy machine). Two slots take turns,
so that fragments do not lie back to back; the ring holds 200 000 rows, more than any cache.

Bytes: of live rows for each transition that can be sampled, against obs + action + 8; real rollouts of 16 envs, from 8
slots in turn. An actor of `configs/hand_reach.yaml` that has one core sends about 28 steps (0.3 s); 8 steps is a bad
case, since each fragment has its tail rows.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from clawq.core import Entry
from clawq.replay.batches import Batches
from clawq.replay.fifo import FifoSampler
from clawq.replay.mixed import Mixed
from clawq.replay.nstep import Gatherer
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.replay.sequences import SequenceGatherer, Sequences
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.types import Fragment, FragmentMeta
from ops.bench.common import Bench
from ops.bench.hands import hand_config, make_env, rollouts

STEPS, ENVS, CAPACITY, BATCH, SLOTS = 64, 16, 200_000, 256, 8
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


def report(bench: Bench, line: str, call: Callable[[], object], times: int, target: str | None = None) -> None:
    """Time `call`."""
    wall, cpu = [], []
    for _ in range(times):
        start, start_cpu = time.perf_counter(), time.thread_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - start_cpu)
    bench.result(line, 1e6 * float(np.median(wall)), "us", target, cpu_us=1e6 * float(np.median(cpu)), times=times)


def report_bytes(bench: Bench, steps: int) -> None:
    """Bytes for each transition in a full ring, where fragments have so many steps."""
    config = hand_config()
    env = make_env(config)
    try:
        made = rollouts(config, env, 1024 // steps, steps, "0" * 32)
        ring = ReplayRing(env.spec, bench.pick(200_000, 20_000))
    finally:
        env.close()
    sent = 0
    while ring.oldest == 0:
        slot, seq = sent % SLOTS, sent // SLOTS + 1
        one = made[(seq + 5 * slot) % len(made)]
        ring.insert(replace(one, meta=replace(one.meta, slot=f"bench-{slot}", epoch=1, seq=seq)))
        sent += 1
    least = sum(one.nbytes for one in ring.spec.obs.values()) + 4 * ring.spec.action.size + 8
    rows = (ring.head - ring.oldest) / ring.size
    bench.result(
        f"bytes_{steps}x{ENVS}",
        rows * ring.bytes_per_row,
        "bytes per transition",
        "<= 1.1 x least" if steps > 8 else None,
        ratio=rows * ring.bytes_per_row / least,
        least=least,
        row_bytes=ring.bytes_per_row,
        rows_per_transition=rows,
        slots=SLOTS,
    )


def main() -> None:
    """Measure."""
    bench = Bench("replay", __doc__)
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
    report(bench, "insert_64x16", insert, bench.pick(500, 100))
    examiner = Examiner(lambda payload: fragments[0], FragmentCheck(SPEC, "0" * 32))
    report(bench, "check_64x16", lambda: examiner.examine(Entry("a", 1, 1, b"")), bench.pick(500, 100))
    report(bench, "sample_256", lambda: sampler.positions(BATCH), bench.pick(2000, 400))
    for n in (1, 3, 5):
        gatherer = Gatherer(ring, BATCH, Returns(n, 0.98))

        def draw(gatherer: Gatherer = gatherer) -> object:
            return gatherer.gather(sampler.positions(BATCH))

        report(bench, f"sample_and_gather_n{n}", draw, bench.pick(2000, 400), "< 600" if n == 1 else None)
    sequences = SequenceGatherer(ring, Sequences(32, 0, 0.98))
    report(bench, "sequences_16x32", lambda: sequences.gather(sampler.positions(16)), bench.pick(1000, 200))
    lanes = [Batches(ring, sampler, BATCH // 2, partial(Gatherer, ring, BATCH // 2, Returns(1, 0.98))) for _ in "ab"]
    report(bench, "two_lanes_256", Mixed(*lanes).next, bench.pick(1000, 200))
    once = ReplayRing(SPEC, CAPACITY)
    fifo = FifoSampler(once, torch.Generator().manual_seed(0))
    for number in range(1, 150):
        once.insert(replace(fragments[0], meta=replace(fragments[0].meta, seq=number, produced=number * STEPS * ENVS)))
    report(bench, "fifo_256", lambda: fifo.draw(BATCH), bench.pick(500, 100))
    for steps in (8, 28, 64):
        report_bytes(bench, steps)


if __name__ == "__main__":
    main()
