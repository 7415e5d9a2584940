"""Updates/s of the whole learner on live data against the same update on one fixed batch (TD3, 256x256, batch 256).

python ops/bench/learner.py [--quick] [--commit]

The live side is the learner of `clawq learner start`, built by its own `build` and run by its own `Trainer.train`
(consumer, intake, limiter, sampler, publishing, gauges, checkpoints), with one torch thread; a producer in a process of
its own feeds it through a real Redis at the samples_per_insert of the hand runs. The two sides take turns on the main
thread, a second each: the machine's speed drifts within a few.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from clawq.core import Batch
from clawq.programs.learner import build
from clawq.programs.parts import returns_of
from clawq.programs.run import create_run
from clawq.programs.session import CLAIM_TTL_S, Session, close_session
from clawq.programs.train import Trainer
from clawq.replay.nstep import gather
from clawq.spawning.spawner import Spawner
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.control import RunRecord
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from ops.bench.common import Bench, clean_env, median, scratch
from ops.bench.hands import hand_config, make_env

ENDS_S = 5.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one side; seconds for each update."""

    wall_s: float
    thread_s: float
    process_s: float
    updates: int


def measure(trainer: Trainer, run: Callable[[], None]) -> Turn:
    """Time `run`, in updates that the trainer's updater counts."""
    updater = trainer.parts.updater
    updates, wall_s, thread_s, process_s = updater.updates, time.perf_counter(), time.thread_time(), time.process_time()
    run()
    made = updater.updates - updates
    return Turn(
        (time.perf_counter() - wall_s) / made,
        (time.thread_time() - thread_s) / made,
        (time.process_time() - process_s) / made,
        made,
    )


def train_for(trainer: Trainer, seconds: float) -> None:
    """The real loop, for so long."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    trainer.train(stop)


def repeat_for(trainer: Trainer, batch: Batch, seconds: float) -> None:
    """The update alone, on one batch."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        trainer.parts.updater.update(batch, 0.0)


def open_session(folder: Path, servers: EmbeddedRedis, *more: str) -> Session:
    """A claimed run without a coordinator: nobody shall start actors."""
    overrides = (f"folder={folder}", "evaluation.interval_s=null", "budget.seconds=null", "metrics=[jsonl]")
    config = hand_config(*overrides, *more)
    env = make_env(config)
    run = create_run(config, "bench-learner", env.spec)
    env.close()
    broker, data, keys = connect(servers.broker_url), connect(servers.data_url), RunKeys(run.tag)
    claim = Claim.take(data, keys.claim("learner"), "ops/bench/learner.py", CLAIM_TTL_S)
    shown = config.model_dump(mode="json")
    record = RunRecord(run.id, run.tag, shown, run.spec.to_json(), "running", int(time.time() * 1000))
    return Session(run, servers.broker_url, servers.data_url, broker, data, keys, claim, Spawner(), record)


def main() -> None:
    bench = Bench("learner", __doc__)
    torch.set_num_threads(1)
    turn_s, turns = 1.0, bench.pick(80, 20)
    with scratch() as folder, EmbeddedRedis.start(folder / "redis", 256) as servers, ExitStack() as stack:
        session = open_session(folder, servers)
        stack.callback(close_session, session)
        trainer, writers = build(session, "cpu", False, bench.say)
        stack.callback(writers.close)
        stack.callback(trainer.close)
        stack.callback(trainer.parts.link.stop, ENDS_S)
        stack.callback(trainer.parts.consumer.close, ENDS_S)
        trainer.parts.consumer.start()
        trainer.parts.link.start()
        trainer.publish()
        words = [sys.executable, str(Path(__file__).with_name("producer.py")), servers.data_url, session.run.tag]
        producer = subprocess.Popen([*words, str(bench.pick(60, 16))], env=clean_env(folder, OMP_NUM_THREADS="1"))
        stack.callback(producer.wait, ENDS_S)
        stack.callback(producer.terminate)
        while trainer.parts.updater.updates < bench.pick(300, 50):
            train_for(trainer, 1.0)
            if producer.poll() is not None:
                raise RuntimeError("the producer ended by itself")
        parts, replay = trainer.parts, trainer.parts.config.replay
        rows = torch.from_numpy(parts.sampler.draw(replay.batch_size, 0.0).rows)
        batch = gather(parts.ring, rows, returns_of(replay))
        pairs: list[tuple[Turn, Turn]] = []
        committed = 0
        for number in range(turns):
            before = parts.intake.env_steps

            def live() -> Turn:
                return measure(trainer, lambda: train_for(trainer, turn_s))

            def fixed() -> Turn:
                return measure(trainer, lambda: repeat_for(trainer, batch, turn_s))

            if number % 2:
                alone, whole = fixed(), live()
            else:
                whole, alone = live(), fixed()
            pairs.append((whole, alone))
            committed += parts.intake.env_steps - before
        made = sum(whole.updates for whole, _ in pairs)
        bench.ratio(
            "ratio",
            [(alone.wall_s, whole.wall_s) for whole, alone in pairs],
            ">= 0.95",
            by_thread_cpu=median([alone.thread_s / whole.thread_s for whole, alone in pairs]),
            live_updates_per_s=median([1 / whole.wall_s for whole, _ in pairs]),
            fixed_updates_per_s=median([1 / alone.wall_s for _, alone in pairs]),
            live_thread_cpu_ms=1e3 * median([whole.thread_s for whole, _ in pairs]),
            fixed_thread_cpu_ms=1e3 * median([alone.thread_s for _, alone in pairs]),
            live_process_cpu_ms=1e3 * median([whole.process_s for whole, _ in pairs]),
            samples_per_insert=made * replay.batch_size / max(1, committed),
            ring_rows=parts.ring.size,
            turn_s=turn_s,
        )


if __name__ == "__main__":
    main()
