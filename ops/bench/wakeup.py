"""What it costs the reader to be woken up by one fragment, with 1, 64 and 256 slot streams.

python ops/bench/wakeup.py [--quick] [--commit]

One StreamReader over a real server, with XREAD over all streams; a writer in a process of its own adds small fragments
(what is measured is the wake-up, not the copying), one at a time and to one stream after another, each after the one
before it was taken. Latency: XADD sent to `read` returning the entry, both by the machine's monotonic clock. CPU: of
the reading thread, for each read. Rounds per second: how many fragments go to and fro in a second, one at a time.
"""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import json

from clawq.transport.client import connect
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from ops.bench.common import Bench, median, percentile, scratch

PAYLOAD_BYTES = 4096
#: Pause of the writer before it sends, seconds: the reader is asleep by then.
ASLEEP_S = 0.002
TIMEOUT_S = 10.0


def write(url: str, tag: str, slots: int) -> None:
    """The writer: one entry for each byte on stdin; its time is the first thing in it. `fast`: without a pause."""
    client, keys, sent = connect(url), RunKeys(tag), 0
    while order := os.read(0, 1):
        if order == b"s":
            time.sleep(ASLEEP_S)
        stream, seq = keys.stream(f"slot-{sent % slots}"), sent // slots + 2
        payload = struct.pack("<d", time.monotonic()).ljust(PAYLOAD_BYTES, b"\0")
        client.xadd(stream, {"f": payload}, id=f"1-{seq}")
        sent += 1


def measure(bench: Bench, servers: EmbeddedRedis, slots: int, times: int) -> None:
    """All figures for so many streams."""
    client, keys = connect(servers.data_url), RunKeys(new_tag())
    for slot in range(slots):
        client.hset(keys.slots, f"slot-{slot}", json.dumps({"worker": "bench", "epoch": 1}))
        client.xadd(keys.stream(f"slot-{slot}"), {"f": b"\0" * PAYLOAD_BYTES}, id="1-1")
    reader = StreamReader(client, keys)
    missing = slots
    while missing:
        missing -= len(reader.read(TIMEOUT_S))
    words = [sys.executable, __file__, "--writer", servers.data_url, keys.tag, str(slots)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None

        def rounds(order: bytes, count: int) -> tuple[list[float], list[float], float]:
            """(latencies, CPU of each read, seconds in all)."""
            assert writer.stdin is not None
            latency, cpu, began = [], [], time.monotonic()
            for _ in range(count):
                writer.stdin.write(order)
                writer.stdin.flush()
                cpu_before = time.thread_time()
                [entry] = reader.read(TIMEOUT_S)
                latency.append(time.monotonic() - struct.unpack_from("<d", entry.payload)[0])
                cpu.append(time.thread_time() - cpu_before)
            return latency, cpu, time.monotonic() - began

        rounds(b"s", 20)
        latency, cpu, _ = rounds(b"s", times)
        _, _, seconds = rounds(b"f", times)
        writer.stdin.close()
        writer.wait(TIMEOUT_S)
    facts = {"streams": slots, "times": times}
    bench.result(f"latency_{slots}", 1e6 * median(latency), "us", None, p99_us=1e6 * percentile(latency, 0.99), **facts)
    bench.result(f"cpu_{slots}", 1e6 * median(cpu), "us per wake-up", None, mean_us=1e6 * sum(cpu) / len(cpu), **facts)
    bench.result(f"rounds_{slots}", times / seconds, "rounds/s", None, **facts)
    client.close()


def main() -> None:
    """Measure, or write."""
    if sys.argv[1:2] == ["--writer"]:
        write(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    bench = Bench("wakeup", __doc__)
    with scratch() as folder, EmbeddedRedis.start(folder / "redis", 256) as servers:
        for slots in (1, 64, 256):
            measure(bench, servers, slots, bench.pick(2000, 200))


if __name__ == "__main__":
    main()
