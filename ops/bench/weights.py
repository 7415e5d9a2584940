"""How long new weights take from the learner to an actor that acts under them: p50 and p99.

python ops/bench/weights.py [--quick] [--commit]

A real actor (HandReachDense-v3, 16 envs, a process of its own) on a real Redis; this process publishes the weights of
the hand configuration at random moments. Latency: from the call of `publish` to the actor's having loaded them (for a
version that was overtaken: to the first newer one). The actor takes over between fragments, so half a fragment is the
least that can be expected on average.
"""

import queue
import random
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.codec import peek_meta
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from clawq.transport.weights import WeightsPublisher
from ops.bench.common import Bench, clean_env, median, percentile, scratch
from ops.bench.hands import TAG, hand_config, make_env, untrained_weights

#: Between two versions, seconds: random, so that no phase of the actor is favoured.
INTERVALS_S = (0.5, 1.3)
START_S = 120.0


def listen(out: IO[bytes], found: "queue.Queue[tuple[int, float]]") -> None:
    """Pass the adopter's lines on."""
    for line in out:
        version, time_s = line.split()
        found.put((int(version), float(time_s)))


def fragment_length_ms(client: Any, keys: RunKeys) -> float:
    """How long the actor's fragments really last: `actors.fragment_s`, and up to one batched env step more."""
    entries = client.xrange(keys.stream("bench"))
    created_ms = [peek_meta(fields[b"f"]).created_ms for _, fields in entries]
    return median([after - before for before, after in pairwise(created_ms)])


def main() -> None:
    bench = Bench("weights", __doc__)
    torch.set_num_threads(1)
    config = hand_config()
    env = make_env(config)
    weights = untrained_weights(config, env.spec)
    env.close()
    found: queue.Queue[tuple[int, float]] = queue.Queue()
    pause, rng = threading.Event(), random.Random(0)
    asked: dict[int, float] = {}
    publish_s: list[float] = []
    with scratch() as folder, EmbeddedRedis.start(folder / "redis", 512) as servers:
        client, keys = connect(servers.data_url), RunKeys(TAG)
        claim = Claim.take(client, keys.claim("learner"), "ops/bench/weights.py", 60.0)
        ControlRecord(client, keys, claim).write(stop=False, window_bytes=1 << 40, config_epoch=1)
        publisher = WeightsPublisher(client, keys, claim)

        def publish(version: int) -> None:
            if claim.renewal_due:
                claim.renew()
            asked[version] = time.monotonic()
            publisher.publish(weights.arrays, version, 1)
            publish_s.append(time.monotonic() - asked[version])

        publish(1)
        words = [sys.executable, str(Path(__file__).with_name("adopter.py")), servers.data_url, TAG]
        environment = clean_env(folder, OMP_NUM_THREADS="1")
        adopter = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, cwd=folder)
        try:
            assert adopter.stdout is not None
            threading.Thread(target=listen, args=(adopter.stdout, found), daemon=True).start()
            adopted = [found.get(timeout=START_S)]
            versions = range(2, 2 + bench.pick(120, 20))
            for version in versions:
                pause.wait(rng.uniform(*INTERVALS_S))
                publish(version)
            while adopted[-1][0] < versions[-1]:
                adopted.append(found.get(timeout=30.0))
            fragment_ms = fragment_length_ms(client, keys)
        finally:
            adopter.terminate()
            adopter.wait()
        claim.release()
    latencies_s = [next(time_s for got, time_s in adopted if got >= one) - asked[one] for one in versions]
    facts = {
        "versions": len(latencies_s),
        "overtaken": len(versions) - (len(adopted) - 1),
        "publish_call_ms": 1e3 * median(publish_s),
        "fragment_ms": fragment_ms,
        "bytes": sum(array.nbytes for array in weights.arrays.values()),
    }
    limit_ms = fragment_ms + 50
    bench.result("p50", 1e3 * median(latencies_s), "ms", None, **facts)
    facts["max_ms"] = 1e3 * max(latencies_s)
    bench.result("p99", 1e3 * percentile(latencies_s, 0.99), "ms", f"<= {limit_ms:.0f}", **facts)


if __name__ == "__main__":
    main()
