"""A run of two processes without Redis and Celery: the twin of `clawq up`, for `ops/bench/plumbing.py`.

python ops/bench/twin.py CONFIG [KEY=VALUE]...

The learner process uses the real `Trainer` with its `Consumer`, `Intake`, `Updater`, ring, limiter, checkpoints and
metric writers; the actor process the real rollout loop, outbox and sender. Between them is one socket pair
(`ops/bench/pipe.py`). Writes `metrics.jsonl` into the run folder, as a run does; ends with SIGTERM.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from clawq.config import RunConfig
from clawq.config_file import load_config
from clawq.core import Entry
from clawq.cores import available_cores, plan_cores, thread_env
from clawq.metrics import open_writers
from clawq.programs.link import Link, Outgoing
from clawq.programs.parts import Outside, make_parts
from clawq.programs.run import Run, create_run
from clawq.programs.train import Trainer
from clawq.transport.memory import MemoryTransport
from ops.bench.hands import make_actor, make_env
from ops.bench.pipe import connect_line, serve

SLOT = "twin"
STREAM_BYTES = 500_000_000


class DirectLink:
    """Stands in for `Link`: publishing is a copy within the process, and there is nothing else to send."""

    note: str | None = None
    restores = lost_lives = 0

    def __init__(self, transport: MemoryTransport, source: Any) -> None:
        self._publisher, self._source = transport.publisher(), source
        self._checkpointed: Mapping[str, str] = {}
        self.pressed, self.source_ended = False, None
        self.published_version, self.stream_budget_bytes = 0, STREAM_BYTES

    def publish(self, outgoing: Outgoing) -> None:
        """At once."""
        self._publisher.publish(outgoing.arrays, outgoing.version, outgoing.updates, outgoing.metadata)
        self.published_version = outgoing.version
        self._source.trim(self._checkpointed, STREAM_BYTES)

    def checkpointed(self, cursors: Mapping[str, str]) -> None:
        """What may be trimmed."""
        self._checkpointed = cursors

    def show(self, metrics: Mapping[str, float | str]) -> None:
        """There is no board."""

    def notify(self, kind: str, **facts: Any) -> None:
        """Nobody listens."""

    window_bytes = STREAM_BYTES

    def take_events(self) -> list[Any]:
        """Nothing happens."""
        return []

    def figures(self) -> dict[str, float]:
        """As the real one."""
        return {"unread_fragments": float(sum(self._source.unread_entries().values()))}

    def check(self) -> None:
        """Nothing can fail."""


def make_trainer(run: Run, transport: MemoryTransport) -> tuple[Trainer, Any]:
    """As `clawq.programs.learner.build`, over the in-memory transport."""
    source = transport.source()
    outside = Outside(source, cast(Link, DirectLink(transport, source)), refused, lambda: 0)
    writers = open_writers(run.config.metrics, run.folder)
    return Trainer(make_parts(run, "cpu", outside), {"tag": run.tag}, writers.write), writers


def refused(entry: Entry, reason: str, detail: str) -> None:
    """Nothing should be."""
    print(f"refused: {reason} {detail}", file=sys.stderr)


def learn(words: list[str]) -> None:
    """The learner process."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    config = load_config(words[0], words[1:])
    cores = plan_cores(available_cores(), config.cores.learner_threads, 1, config.cores.actor_threads)
    torch.set_num_threads(cores.learner_threads)
    env = make_env(config)
    run = create_run(config, "twin", env.spec)
    env.close()
    transport = MemoryTransport()
    transport.control.write(stop=False, window_bytes=config.redis.window_bytes, config_epoch=1)
    ours, theirs = socket.socketpair()
    serve(ours, transport, SLOT)
    actor = subprocess.Popen(
        [sys.executable, __file__, "--actor", str(theirs.fileno()), run.tag, *words],
        pass_fds=[theirs.fileno()],
        env={**os.environ, **thread_env(cores.actor_threads)},
    )
    theirs.close()
    trainer, writers = make_trainer(run, transport)
    trainer.state.begin_session({"device": "cpu", "threads": torch.get_num_threads()})
    trainer.parts.consumer.start()
    trainer.publish()
    try:
        trainer.train(stop)
    finally:
        actor.terminate()
        actor.wait()
        trainer.parts.consumer.close()
        trainer.close()
        writers.close()


def act(descriptor: int, tag: str, config: RunConfig) -> None:
    """The actor process."""
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    line = connect_line(socket.socket(fileno=descriptor))
    acting = make_actor(config, make_env(config), (line, line), slot=SLOT, tag=tag)
    acting.loop.run(lambda: "ended" if stop.is_set() or os.getppid() != parent else None)
    os._exit(0)


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "--actor":
        act(int(words[1]), words[2], load_config(words[3], words[4:]))
    else:
        learn(words)


if __name__ == "__main__":
    main()
