"""The archive on real fragments (HandReachDense-v3): MB/s of payload written and read, bytes kept, ms to open and find.

python ops/bench/archive.py [--quick] [--commit]
"""

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clawq.core import Entry
from clawq.transport.archive import Archive
from clawq.transport.archive_writer import ArchiveLimits, ArchiveWriter
from clawq.transport.codec import encode
from clawq.transport.log import RunLog
from ops.bench.common import Bench, median, scratch
from ops.bench.hands import hand_config, make_env, rollouts

TAG = "0" * 32


def entries(count: int, made: int) -> list[Entry]:
    """That many fragments of eight slots, of which so many are different."""
    config = hand_config()
    env = make_env(config)
    fragments = rollouts(config, env, made)
    env.close()
    found = []
    for index, fragment in zip(range(count), itertools.cycle(fragments)):
        slot, seq = f"bench-{index % 8}", index // 8 + 1
        meta = replace(fragment.meta, slot=slot, epoch=1, seq=seq, created_ms=index)
        found.append(Entry(slot, 1, seq, bytes(encode(replace(fragment, meta=meta)))))
    return found


def main() -> None:
    bench = Bench("archive", __doc__)
    sent = entries(bench.pick(1600, 160), bench.pick(16, 4))
    size = sum(len(entry.payload) for entry in sent)
    for compress in (True, False):
        line = "zstd" if compress else "raw"
        with scratch() as folder:
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            writer = ArchiveWriter(folder / "archive", TAG, ArchiveLimits(compress=compress))
            for entry in sent:
                writer.append(entry)
                writer.sync_if_due()
            writer.close()
            wrote_s, wrote_cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
            bench.result(
                f"write {line}", size / wrote_s / 1e6, "MB/s", by_cpu_time=size / wrote_cpu_s / 1e6,
                us_per_fragment=1e6 * wrote_s / len(sent), share_kept=writer.file_bytes / size,
            )  # fmt: skip
            opened_s = []
            for _ in range(5):
                began_s = time.perf_counter()
                archive = Archive(folder / "archive", TAG)
                opened_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            read = sum(len(entry.payload) for entry in RunLog(None, archive).entries())
            took_s = time.perf_counter() - began_s
            assert read == size
            found_s = []
            for entry in sent[:: max(1, len(sent) // 50)]:
                began_s = time.perf_counter()
                assert archive.find(entry.slot, entry.epoch, entry.seq) is not None
                found_s.append(time.perf_counter() - began_s)
            bench.result(
                f"read {line}", size / took_s / 1e6, "MB/s", open_ms=1e3 * median(opened_s),
                find_ms=1e3 * median(found_s), segments=len(archive.segments), fragments=archive.entries,
            )  # fmt: skip
            archive.close()


if __name__ == "__main__":
    main()
