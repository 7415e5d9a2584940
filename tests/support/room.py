"""A whole run in one room: a learner and its actors as threads of this process, over a real Redis.

Everything is real but the processes: the learner is built by `clawq.programs.learner.build`, an actor is an
`ActingSession` that is driven by leases. Actors may be as slow as one likes, and their leases as short.
"""

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import redis
import torch

from clawq.config import RunConfig
from clawq.errors import NoSeat
from clawq.programs import learner
from clawq.programs.acting import ActingSession
from clawq.programs.parent import LeaseOrder
from clawq.programs.run import Run, make_folders
from clawq.programs.session import Session
from clawq.programs.train import Trainer
from clawq.spawning.spawner import Spawner
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.archiver import Archiver
from clawq.transport.claims import Claim
from clawq.transport.control import ControlRecord, RunRecord, delete_run
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.server import EmbeddedRedis

#: A small learner of `point`; every test adds its own.
SMALL: dict[str, Any] = {
    "name": "test",
    "seed": 7,
    "environment": {"name": "point", "num_envs": 4},
    "algorithm": {"name": "td3", "options": {"hidden": [8]}},
    "actors": {"fragment_bytes": 8192},
    "replay": {"capacity": 5000, "batch_size": 16},
    "rate_limit": {"samples_per_insert": 2, "min_size_to_sample": 40},
    "learner": {"device": "cpu", "publish_interval_s": 0.05, "checkpoint_interval_s": 3600},
    "evaluation": {"interval_s": None},
    "metrics": [],
}


class ActorThread:
    """One actor and its leases.

    Args:
        order: what each lease is for.
        pauses_s: how long it pauses after each step, in turn: as irregular as a busy machine.
    """

    def __init__(self, order: LeaseOrder, pauses_s: tuple[float, ...] = ()) -> None:
        self._order, self._pauses_s, self._steps = order, pauses_s, 0
        self._ended, self._drain_s = threading.Event(), 5.0
        self.failure: BaseException | None = None
        self.reasons: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """In order, as when its worker ends."""
        self._ended.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def let_go(self) -> None:
        """Ask it to end without waiting until what it made is taken: nobody will take it."""
        self._drain_s = 0.0
        self._ended.set()

    def _progress(self, phase: str, env_steps: int) -> None:
        if phase == "step" and self._pauses_s:
            self._steps += 1
            time.sleep(self._pauses_s[self._steps % len(self._pauses_s)])

    def _run(self) -> None:
        session: ActingSession | None = None
        try:
            while not self._ended.is_set():
                try:
                    session = session or ActingSession(self._order, self._progress, self._ended.is_set)
                except NoSeat:
                    self.reasons.append("no_seat")
                    continue
                reason = session.run(self._order.seconds, self._ended.is_set).reason
                self.reasons.append(reason)
                if reason in ("ended", "run_stopped", "claim_lost"):
                    break
        except BaseException as error:
            self.failure = error
        finally:
            if session is not None:
                session.drain(self._drain_s)
                session.close()


class Room:
    """One run. `sections` replace those of SMALL, key by key."""

    def __init__(
        self, folder: Path, servers: EmbeddedRedis, data: redis.Redis, broker: redis.Redis, **sections: Any
    ) -> None:
        # The policies of the actors hold torch to one thread; the learner shall not change in its midst.
        torch.set_num_threads(1)
        merged = {
            name: {**SMALL.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in {**SMALL, **sections}.items()
        }
        config = RunConfig.model_validate(merged)
        self.data, self.data_url, self.keys = data, servers.data_url, RunKeys(new_tag())
        options = PointOptions.model_validate(config.environment.options)
        self.run = Run("room", self.keys.tag, folder, config, point_spec(options))
        folder.mkdir()
        make_folders(self.run)
        claim = Claim.take(data, self.keys.claim("learner"), "test", 600.0)
        record = RunRecord("room", self.keys.tag)
        urls = servers.broker_url, servers.data_url
        self.session = Session(self.run, *urls, broker, data, self.keys, claim, Spawner(), record)
        self._open: list[tuple[Trainer, Any]] = []
        self.actors: list[ActorThread] = []

    def trainer(self, resume: bool = False, archiver: Archiver | None = None) -> Trainer:
        """A learner that has published its first weights."""
        trainer, writers = learner.build(self.session, "cpu", resume, lambda line: None, archiver)
        self._open.append((trainer, writers))
        trainer.parts.consumer.start()
        trainer.parts.link.start()
        trainer.publish()
        return trainer

    def actor(self, slot: str, lease_s: float = 0.2, pauses_s: tuple[float, ...] = ()) -> ActorThread:
        """An actor in that slot, at work."""
        described = {"config": self.run.config.model_dump(mode="json"), "spec": self.run.spec.to_json()}
        run = {"id": "room", "tag": self.keys.tag, **described}
        actor = ActorThread(LeaseOrder(run, slot, "test", self.data_url, lease_s), pauses_s)
        self.actors.append(actor)
        return actor

    def abandon(self, trainer: Trainer) -> None:
        """End a learner's threads; what it holds is lost."""
        trainer.parts.consumer.close()
        trainer.parts.link.stop(5.0)
        for index, (known, writers) in enumerate(self._open):
            if known is trainer:
                writers.close()
                trainer.close()
                del self._open[index]
                break

    def close_learners(self) -> None:
        """End the threads of all learners."""
        for trainer, _ in list(self._open):
            self.abandon(trainer)

    def close(self) -> None:
        """End everything; an actor's failure is the test's."""
        failures = []
        for actor in self.actors:
            actor.let_go()
        self.close_learners()
        # Nobody takes any more what an actor that was held back would give before it ends.
        ControlRecord(self.data, self.keys).request_stop()
        for actor in self.actors:
            try:
                actor.end()
            except BaseException as error:
                failures.append(error)
        delete_run(self.data, self.keys)
        if failures:
            raise failures[0]


def digest(trainer: Trainer) -> str:
    """Of all weights that actors would get."""
    found = hashlib.sha256()
    for name, tensor in sorted(trainer.parts.updater.algorithm.weights().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()
