"""A run that was really recorded: a learner's parts over a real Redis, known experience, a schedule, checkpoints."""

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from clawq.config_file import parse_config
from clawq.programs import learner
from clawq.programs.recording import Recording, open_recording
from clawq.programs.run import Run, make_folders
from clawq.programs.session import Session
from clawq.programs.whereabouts import Whereabouts
from clawq.spawning.spawner import Spawner
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot
from clawq.transport.claims import Claim
from clawq.transport.codec import encode
from clawq.transport.control import Event, RunRecord, delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter

STEPS, ENVS = 5, 4


class Until(threading.Event):
    """A stop flag that is set as soon as something holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    def is_set(self) -> bool:
        return self._condition()


class Recorded:
    """Records a run; its streams stay in Redis until `close`.

    Attributes:
        sent: (slot, epoch, seq) of all fragments, in the order in which they were sent.
    """

    def __init__(self, folder: Path, servers: EmbeddedRedis, data: Any, broker: Any, **sections: Any) -> None:
        raw = {
            "name": "test",
            "environment": {"name": "point", "num_envs": ENVS},
            "algorithm": {"name": "td3", "options": {"hidden": [8]}},
            "replay": {"capacity": 5000, "batch_size": 16},
            "rate_limit": {"samples_per_insert": 2, "min_size_to_sample": 40, "error_buffer": 260},
            "learner": {"device": "cpu", "publish_interval_s": 0.05, "checkpoint_interval_s": 3600},
            "evaluation": {"interval_s": None},
            "metrics": ["jsonl"],
        }
        self.run = Run("r1", RUN, folder / "r1", parse_config(raw | sections, "test"), SPEC)
        self.run.folder.mkdir()
        make_folders(self.run)
        self.run.save()
        self.run.save_config()
        self.data, self.keys = data, RunKeys(RUN)
        delete_run(data, self.keys)
        claim = Claim.take(data, self.keys.claim("learner"), "test", 600.0)
        urls = servers.broker_url, servers.data_url
        self._session = Session(self.run, *urls, broker, data, self.keys, claim, Spawner(), RunRecord("r1", RUN))
        self._begin(resume=False)
        self._slots: dict[str, tuple[TrueSlot, StreamWriter]] = {}
        self.sent: list[tuple[str, int, int]] = []

    def _begin(self, resume: bool) -> None:
        self.trainer, self._writers = learner.build(self._session, "cpu", resume, lambda line: None)
        self.trainer.parts.consumer.start()
        self.trainer.parts.link.start()
        self.trainer.publish()

    def resume(self) -> None:
        """The learner ends after a checkpoint, and another one goes on under the configuration that was in force."""
        self.trainer.checkpoint(wait=True)
        self._session.run = replace(self.run, config=self.trainer.parts.config)
        self._stop()
        self._begin(resume=True)

    def tune(self, *words: str) -> None:
        """Change settings live."""
        self.trainer.inbox.take(Event("1-1", "tune_wanted", {"set": list(words)}), threading.Event())

    def send(self, slot: str, fragments: int = 1, reward: float | None = None) -> None:
        """Let an actor send; with other rewards than it saw, if `reward` is given. Waits until all is committed."""
        if slot not in self._slots:
            writer = StreamWriter.open(self.data, self.keys, slot, f"host/{slot}", 600.0)
            true = TrueSlot(slot, ENVS, np.random.default_rng(len(self._slots)), count(1), chances=Chances(0.1, 0.1))
            true.epoch = writer.epoch
            self._slots[slot] = true, writer
        true, writer = self._slots[slot]
        for _ in range(fragments):
            made = true.fragment(STEPS)[0]
            if reward is not None:
                made = replace(made, reward=np.full_like(made.reward, reward))
            writer.send(made.meta.seq, encode(made))
            self.sent.append((slot, made.meta.epoch, made.meta.seq))
        parts = self.trainer.parts
        self.train(lambda: parts.consumer.counts.entries >= len(self.sent))

    def train(self, until: Callable[[], bool]) -> None:
        """As the live learner does, until something holds."""
        self.trainer.train(Until(until))

    def learn(self, updates: int) -> None:
        """So many more updates; the limiter must allow them."""
        wanted = self.trainer.parts.updater.updates + updates
        self.train(lambda: self.trainer.parts.updater.updates >= wanted)

    def end(self, whole: bool = True) -> Recording:
        """The learner ends; with final weights if the run is `whole`. Returns what can be replayed."""
        if whole:
            save_file(self.trainer.parts.updater.algorithm.weights(), self.run.weights / "final.safetensors")
        self._stop()
        return self.recording()

    def recording(self) -> Recording:
        """As `clawq replay` opens it."""
        return open_recording(Whereabouts(self.run.id, self.keys, self.run.folder, self.data))

    def _stop(self) -> None:
        self.trainer.parts.consumer.close()
        self.trainer.parts.link.stop(5.0)
        self.trainer.close()
        self._writers.close()

    def close(self) -> None:
        """Take the streams away too. Idempotent."""
        self._stop()
        delete_run(self.data, self.keys)
