"""A learner's desk: one run over a real Redis, slots that send known experience, and trainers that take it."""

import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import redis
from waiting import Until, wait_for

from clawq.config import RunConfig
from clawq.config_file import parse_config
from clawq.programs import learner
from clawq.programs.run import Run, make_folders
from clawq.programs.session import Session
from clawq.programs.train import Trainer
from clawq.replay.consumer import STAGED_BYTES
from clawq.spawning.spawner import Spawner
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot
from clawq.transport.claims import Claim
from clawq.transport.codec import encode
from clawq.transport.control import Events, Orders, RunRecord, delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from clawq.types import Fragment

STEPS, ENVS = 5, 4
#: A small learner; every test adds its own.
SMALL: dict[str, Any] = {
    "name": "test",
    "environment": {"name": "point", "num_envs": ENVS},
    "algorithm": {"name": "td3", "options": {"hidden": [8]}},
    "replay": {"capacity": 5000, "batch_size": 16},
    "rate_limit": {"samples_per_insert": 2, "min_size_to_sample": 40, "error_buffer": 260},
    "learner": {"device": "cpu", "publish_interval_s": 0.05, "checkpoint_interval_s": 3600},
    "evaluation": {"interval_s": None},
    "metrics": ["jsonl"],
}


class Slot:
    """An actor's slot that sends what the test wants, and keeps what it sent.

    Attributes:
        version: of the weights under which it acts.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, name: str, seed: int) -> None:
        self.writer = StreamWriter.open(client, keys, name, "test", 600.0)
        self._true = TrueSlot(name, ENVS, np.random.default_rng(seed), count(1), chances=Chances(0.1, 0.1))
        self._true.epoch = self.writer.epoch
        self.sent: list[Fragment] = []
        self.version = 0
        self._dropped: dict[str, int] = {}

    def send(self, fragments: int, reward: float | None = None) -> None:
        """Send some; with other rewards than were given, if `reward` is."""
        for _ in range(fragments):
            made = self._made()
            made = replace(made, meta=replace(made.meta, dropped=dict(self._dropped)))
            if reward is not None:
                made = replace(made, reward=np.full_like(made.reward, reward))
            self.writer.send(made.meta.seq, encode(made))
            self.sent.append(made)

    def lose(self) -> None:
        """A fragment that never comes, and that nobody speaks of."""
        self._made()

    def drop(self) -> None:
        """A fragment that the outbox drops and the headers report."""
        self._made()
        self._dropped["outbox_full"] = self._dropped.get("outbox_full", 0) + STEPS * ENVS

    def spoil(self) -> None:
        """A fragment that arrives with a flipped bit."""
        made = self._made()
        payload = encode(made)
        payload[-1] ^= 1
        self.writer.send(made.meta.seq, payload)

    def shift(self, by: int) -> None:
        """Let its ids be larger by so much from now on, to be told from another slot's."""
        self._true.ids = count(by)
        self._true.restart(range(ENVS))

    def _made(self) -> Fragment:
        return self._true.fragment(STEPS, self.version)[0]


class Desk:
    """One run, its learner's session, and trainers that are made and abandoned; `sections` replace those of SMALL."""

    def __init__(
        self, folder: Path, servers: EmbeddedRedis, data: redis.Redis, broker: redis.Redis, **sections: Any
    ) -> None:
        run = Run("r1", RUN, folder, parse_config(SMALL | sections, "test"), SPEC)
        folder.mkdir(exist_ok=True)
        make_folders(run)
        self.data, self.keys = data, RunKeys(RUN)
        delete_run(data, self.keys)
        claim = Claim.take(data, self.keys.claim("learner"), "test", 600.0)
        record = RunRecord("r1", RUN)
        urls = servers.broker_url, servers.data_url
        self.session = Session(run, *urls, broker, data, self.keys, claim, Spawner(), record)
        self._open: list[tuple[Trainer, Any]] = []
        self.said: list[str] = []

    def configure(self, **replay: Any) -> None:
        """Change the run's `replay` section."""
        config = self.session.run.config
        changed = config.replay.model_copy(update=replay)
        self.session.run = replace(self.session.run, config=config.model_copy(update={"replay": changed}))

    def change(self, **sections: Any) -> None:
        """Change whole sections of the run's configuration."""
        raw = self.session.run.config.model_dump()
        self.session.run = replace(self.session.run, config=RunConfig.model_validate({**raw, **sections}))

    def trainer(self, resume: bool = False) -> Trainer:
        trainer, writers = learner.build(self.session, "cpu", resume, self.said.append)
        self._open.append((trainer, writers))
        trainer.parts.consumer.start()
        trainer.parts.link.start()
        trainer.publish()
        return trainer

    def slot(self, name: str, seed: int) -> Slot:
        return Slot(self.data, self.keys, name, seed)

    def train(self, trainer: Trainer, entries: int, updates: int = 0) -> None:
        """Until so many entries are settled and so many updates made."""
        parts = trainer.parts
        trainer.train(Until(lambda: parts.consumer.counts.entries >= entries and parts.updater.updates >= updates))
        assert parts.consumer.counts.entries == entries

    def read(self, trainer: Trainer, fragments: int) -> None:
        """Until so many are read and wait for the learner; it takes none meanwhile, so they must have room.

        (How much a trainer lets the consumer read ahead depends on how fast it was, and so on how busy the machine is.)
        """
        consumer = trainer.parts.consumer
        consumer.hold(STAGED_BYTES)
        wait_for(lambda: consumer.staged[0] == fragments, f"{fragments} fragments to be read")

    def train_on(self, trainer: Trainer, quiet_s: float = 0.3, most: int = 200) -> None:
        """As far as the rate limiter allows: until no update was made for `quiet_s` (or far too many were)."""
        updater, last = trainer.parts.updater, [-1.0, time.monotonic()]

        def is_quiet() -> bool:
            if updater.updates != last[0]:
                last[:] = updater.updates, time.monotonic()
            return updater.updates > most or time.monotonic() > last[1] + quiet_s

        trainer.train(Until(is_quiet))

    def abandon(self, trainer: Trainer) -> None:
        """What is left in Redis and on disk when a learner is killed; the next session heeds later events only."""
        self.session.after = (Events(self.data, self.keys).newest_id(), Orders(self.data, self.keys).newest_id())
        trainer.parts.consumer.close()
        assert trainer.parts.link.stop(5.0)

    def in_streams(self) -> int:
        return sum(int(self.data.xlen(self.keys.stream(slot))) for slot in ("a", "b"))

    def end(self) -> None:
        """End all trainers in order; what was learned stays. Idempotent."""
        for trainer, writers in self._open:
            trainer.parts.consumer.close()
            trainer.parts.link.stop(5.0)
            trainer.close()
            writers.close()

    def close(self) -> None:
        """Take the streams away too."""
        self.end()
        delete_run(self.data, self.keys)
