"""A real actor that tells on stdout when it takes which weights over. Started by `ops/bench/weights.py`.

python ops/bench/adopter.py DATA_URL TAG

Lines: `<version> <monotonic seconds>`. The monotonic clock is the same in all processes of a machine.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from clawq.transport.client import connect
from clawq.transport.keys import RunKeys
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsReader
from ops.bench.hands import hand_config, make_actor, make_env


def main() -> None:
    url, tag, parent = sys.argv[1], sys.argv[2], os.getppid()
    torch.set_num_threads(1)
    config = hand_config()
    env = make_env(config)
    client, keys = connect(url), RunKeys(tag)
    ends = StreamWriter.open(client, keys, "bench", "bench"), WeightsReader(client, keys)
    acting = make_actor(
        config, env, ends, adopted=lambda version, time_s: print(version, repr(time_s), flush=True), tag=tag
    )
    acting.loader.get()
    acting.loop.run(lambda: None if os.getppid() == parent else "orphaned")
    acting.close()


if __name__ == "__main__":
    main()
