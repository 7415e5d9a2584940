"""The wire codec on real fragments (HandReachDense-v3, 64 steps x 16 envs): GB/s packed and unpacked, and bytes.

python ops/bench/codec.py [--quick] [--commit]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import Callable

from clawq.transport.codec import decode, encode
from ops.bench.common import Bench, median
from ops.bench.hands import hand_config, make_env, rollouts


def timed(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """Wall and CPU seconds of all calls together."""
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    for call in calls:
        call()
    return time.perf_counter() - wall_s, time.thread_time() - cpu_s


def main() -> None:
    bench = Bench("codec", __doc__)
    config = hand_config()
    env = make_env(config)
    fragments = rollouts(config, env, bench.pick(16, 4))
    env.close()
    payloads = [bytes(encode(one)) for one in fragments]
    size = sum(map(len, payloads))
    transitions = sum(one.meta.steps * one.meta.envs for one in fragments)
    pack: list[tuple[float, float]] = []
    unpack: list[tuple[float, float]] = []
    for _ in range(bench.pick(400, 100)):
        pack.append(timed([lambda one=one: encode(one) for one in fragments]))  # type: ignore[misc]
        unpack.append(timed([lambda one=one: decode(one) for one in payloads]))  # type: ignore[misc]
    for line, times in (("pack", pack), ("unpack", unpack)):
        bench.result(
            line,
            size / median([wall_s for wall_s, _ in times]) / 1e9,
            "GB/s",
            ">= 4",
            by_cpu_time=size / median([cpu_s for _, cpu_s in times]) / 1e9,
            best=size / min(wall_s for wall_s, _ in times) / 1e9,
            us_per_fragment=1e6 * median([wall_s for wall_s, _ in times]) / len(fragments),
            fragment_bytes=size // len(fragments),
            turns=len(times),
        )
    bench.result("bytes", size / transitions, "bytes per transition", "<= 480", transitions=transitions)


if __name__ == "__main__":
    main()
