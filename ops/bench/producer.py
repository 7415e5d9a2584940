"""Feeds real HandReach fragments to a run as fast as its learner takes them. Started by `ops/bench/learner.py`.

python ops/bench/producer.py DATA_URL TAG FRAGMENTS

FRAGMENTS of 8 steps x 16 envs (what one actor of this simulator sends every 0.3 s) are made once and sent over and
over, each time stamped and encoded anew. Held back like an actor: by the window of unread bytes.
"""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clawq.transport.client import connect
from clawq.transport.codec import encode
from clawq.transport.keys import RunKeys
from clawq.transport.stream import StreamWriter
from ops.bench.hands import hand_config, make_env, rollouts

#: Steps of each env in one fragment.
STEPS = 8
#: Pause while too much is unread, seconds.
HELD_BACK_S = 0.01


def main() -> None:
    url, tag, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config = hand_config()
    env = make_env(config)
    fragments = rollouts(config, env, count, STEPS, tag)
    env.close()
    writer = StreamWriter.open(connect(url), RunKeys(tag), "bench", "bench")
    pause, seq, parent = threading.Event(), 0, os.getppid()
    while os.getppid() == parent:
        control = writer.poll()
        if control is None or control.head == 0 or writer.unread_bytes() >= control.window_bytes:
            pause.wait(HELD_BACK_S)
            continue
        one, seq = fragments[seq % len(fragments)], seq + 1
        produced = seq * one.meta.steps * one.meta.envs
        meta = replace(one.meta, slot="bench", epoch=writer.epoch, seq=seq, produced=produced, weights_version=1)
        writer.send(seq, encode(replace(one, meta=meta)))


if __name__ == "__main__":
    main()
