"""What a checkpoint costs the learner, and how long it takes until a killed one goes on: 1e6 HandReach transitions.

python ops/bench/checkpoint.py [--quick] [--commit]

A real learner (TD3, 2 x 256, one torch thread) with snapshots of its ring, over a real Redis that holds all of it; 8
slots send real rollouts (8 steps x 16 envs in a fragment). Stall: the largest gap between the ends of two updates while
a checkpoint with its snapshot is written, beside the median gap and the largest one while none is. Resume: the ring
from its snapshot (files in the page cache), and from the streams.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from clawq.core import Batch, Entry
from clawq.programs.learner import build
from clawq.programs.parts import make_examiner
from clawq.programs.resume import archived, bring_back_ring, copier, find_state
from clawq.programs.session import Session, close_session
from clawq.programs.train import Trainer
from clawq.replay.ring import ReplayRing
from clawq.transport.client import connect
from clawq.transport.codec import encode
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from ops.bench.common import Bench, median, percentile, scratch
from ops.bench.hands import hand_config, make_env, rollouts
from ops.bench.learner import open_session

SLOTS, STEPS, ENVS = 8, 8, 16
ENDS_S = 5.0
#: Between two checkpoints, and fragments sent meanwhile, seconds.
INTERVAL_S, PACE_S = 3.0, 0.05


class Feed:
    """Sends rollouts over and over, slot by slot, until it is told to stop; at a pace once there are enough."""

    def __init__(self, url: str, tag: str, plenty: int) -> None:
        config = hand_config()
        env = make_env(config)
        self._made = rollouts(config, env, 48, STEPS, tag)
        env.close()
        self._writers = [StreamWriter.open(connect(url), RunKeys(tag), f"bench-{k}", "bench") for k in range(SLOTS)]
        self._plenty, self._stop = plenty, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(ENDS_S)

    def _run(self) -> None:
        sent = 0
        while not self._stop.is_set():
            seq, writer = sent // SLOTS + 1, self._writers[sent % SLOTS]
            one = self._made[(seq + 5 * (sent % SLOTS)) % len(self._made)]
            meta = replace(
                one.meta,
                slot=f"bench-{sent % SLOTS}",
                epoch=writer.epoch,
                seq=seq,
                produced=seq * STEPS * ENVS,
                weights_version=1,
                created_ms=int(time.time() * 1000),
            )
            writer.send(seq, encode(replace(one, meta=meta)))
            sent += 1
            if sent * STEPS * ENVS >= self._plenty:
                self._stop.wait(PACE_S)


class Watch:
    """Ends of updates, and when a checkpoint was being written."""

    def __init__(self, trainer: Trainer) -> None:
        self.ends_s: list[float] = []
        self.calls_ms: list[float] = []
        self.calls_cpu_ms: list[float] = []
        self.spans_s: list[list[float]] = []
        self._trainer, self._update, self._checkpoint = trainer, trainer.parts.updater.update, trainer.checkpoint
        trainer.parts.updater.update = self.update  # type: ignore[method-assign]
        trainer.checkpoint = self.checkpoint  # type: ignore[method-assign]

    def update(self, batch: Batch, progress: float) -> bool:
        """As the updater."""
        done = self._update(batch, progress)
        self.ends_s.append(time.perf_counter())
        if self.spans_s and len(self.spans_s[-1]) == 1 and not self._trainer.safekeeping.saver.busy:
            self.spans_s[-1].append(self.ends_s[-1])
        return done

    def checkpoint(self, wait: bool = False) -> None:
        """As the trainer, timed."""
        began, began_cpu = time.perf_counter(), time.thread_time()
        self._checkpoint(wait)
        self.calls_ms.append(1e3 * (time.perf_counter() - began))
        self.calls_cpu_ms.append(1e3 * (time.thread_time() - began_cpu))
        if not self.spans_s or len(self.spans_s[-1]) == 2:
            self.spans_s.append([began])

    def gaps_ms(self) -> tuple[list[list[float]], list[float]]:
        """Gaps while each checkpoint was written, and all other gaps."""
        spans = [(span[0], span[1]) for span in self.spans_s if len(span) == 2]
        within: list[list[float]] = [[] for _ in spans]
        outside = []
        for before, after in zip(self.ends_s, self.ends_s[1:], strict=False):
            hit = [i for i, (begin, end) in enumerate(spans) if before < end and after > begin]
            for index in hit:
                within[index].append(1e3 * (after - before))
            if not hit:
                outside.append(1e3 * (after - before))
        return within, outside


class Until(threading.Event):
    """A stop that is set when something has come about."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__()
        self._ready = ready

    def is_set(self) -> bool:
        """Now?"""
        return super().is_set() or self._ready()


def stall(bench: Bench, trainer: Trainer, checkpoints: int) -> None:
    """Train through so many checkpoints; the first one writes the whole ring."""
    watch = Watch(trainer)
    trainer.train(Until(lambda: sum(len(span) == 2 for span in watch.spans_s) >= checkpoints))
    within, outside = watch.gaps_ms()
    figures = {
        "median_gap_ms": median(outside),
        "p99_gap_ms": percentile(outside, 0.99),
        "largest_gap_without_ms": max(outside),
    }
    rest = slice(1, None)
    bench.result(
        "stall",
        median([max(gaps) for gaps in within[rest]]),
        "ms",
        "< 100",
        samples=[max(gaps) for gaps in within[rest]],
        call_ms=median(watch.calls_ms[rest]),
        call_cpu_ms=median(watch.calls_cpu_ms[rest]),
        written_in_ms=median([1e3 * (end - begin) for begin, end in watch.spans_s[1:checkpoints]]),
        median_gap_within_ms=median([gap for gaps in within[rest] for gap in gaps]),
        ring_rows=trainer.parts.ring.size,
        **figures,
    )
    first = watch.spans_s[0]
    bench.result(
        "stall_first",
        max(within[0]),
        "ms",
        "< 100",
        call_ms=watch.calls_ms[0],
        call_cpu_ms=watch.calls_cpu_ms[0],
        written_in_ms=1e3 * (first[1] - first[0]),
        **figures,
    )


def resume(bench: Bench, session: Session, trainer: Trainer, repeats: int) -> None:
    """The ring again, from its snapshot and from the streams, taking turns."""
    run, parts = session.run, trainer.parts
    state = find_state(parts.checkpoints, run, bench.say)
    assert state is not None
    seconds: dict[str, list[float]] = {"snapshot": [], "streams": []}
    for turn in range(2 * repeats):
        ring = ReplayRing(run.spec, parts.ring.capacity)
        empty = replace(parts, ring=ring, snapshots=None)
        entries: Iterator[Entry] = iter(())
        copy = copier(run, empty, state, bench.say)
        source = ("snapshot", "streams")[turn % 2]
        if source == "streams":
            reader = StreamReader(session.data, session.keys)
            entries, copy = reader.read_back(state["consumer"]["cursors"]), None
        began = time.perf_counter()
        missing = bring_back_ring(empty, state["ring"], entries, archived(run), make_examiner(run), copy)
        seconds[source].append(time.perf_counter() - began)
        if missing or ring.size != int(state["ring"]["layout"]["size"]):
            raise RuntimeError(f"{len(missing)} fragments did not come back from the {source}")
    for source, took in seconds.items():
        bench.result(f"resume_from_{source}", median(took), "s", samples=took, transitions=parts.ring.size)


def main() -> None:
    bench = Bench("checkpoint", __doc__)
    torch.set_num_threads(1)
    wanted = bench.pick(1_000_000, 100_000)
    capacity = wanted * 5 // 4
    with (
        scratch() as folder,
        EmbeddedRedis.start(folder / "redis", bench.pick(1600, 400)) as servers,
        ExitStack() as stack,
    ):
        overrides = (
            f"replay.capacity={capacity}",
            f"rate_limit={{min_size_to_sample: {wanted}}}",
            "redis.window_bytes=8000000",
            f"learner.checkpoint_interval_s={INTERVAL_S}",
            "learner.snapshot=always",
        )
        session = open_session(folder, servers, *overrides)
        stack.callback(close_session, session)
        trainer, writers = build(session, "cpu", False, bench.say)
        stack.callback(writers.close)
        stack.callback(trainer.close)
        stack.callback(trainer.parts.link.stop, ENDS_S)
        stack.callback(trainer.parts.consumer.close, ENDS_S)
        feed = Feed(servers.data_url, session.run.tag, wanted + wanted // 50)
        stack.callback(feed.close)
        trainer.parts.consumer.start()
        trainer.parts.link.start()
        trainer.publish()
        # No checkpoint before the ring is full.
        fill = partial(setattr, trainer, "checkpoint")
        checkpoint = trainer.checkpoint
        fill(lambda wait=False: None)
        feed.start()
        trainer.train(Until(lambda: trainer.parts.ring.size >= wanted))
        fill(checkpoint)
        stall(bench, trainer, bench.pick(9, 4))
        feed.close()
        trainer.checkpoint(wait=True)
        resume(bench, session, trainer, bench.pick(3, 1))


if __name__ == "__main__":
    main()
