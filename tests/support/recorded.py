"""A run that was really recorded: a learner's parts over a real Redis, known experience, a schedule, checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from desk import Desk, Slot
from safetensors.torch import save_file
from waiting import Until, wait_for

from clawq.config_file import change_config
from clawq.programs.recording import Recording, open_recording
from clawq.programs.whereabouts import Whereabouts
from clawq.replay.consumer import STAGED_BYTES
from clawq.transport.control import Event
from clawq.transport.server import EmbeddedRedis


class Recorded:
    """Records a run; its streams stay in Redis until `close`.

    Attributes:
        sent: (slot, epoch, seq) of all fragments, in the order in which they were sent.
    """

    def __init__(self, folder: Path, servers: EmbeddedRedis, data: Any, broker: Any, **sections: Any) -> None:
        self._desk = Desk(folder / "r1", servers, data, broker, **sections)
        self.run, self.data, self.keys = self._desk.session.run, data, self._desk.keys
        self.run.save()
        self.run.save_config()
        self.trainer = self._desk.trainer()
        self._slots: dict[str, Slot] = {}
        self.sent: list[tuple[str, int, int]] = []

    def resume(self, *overrides: str) -> None:
        """The learner ends after a checkpoint, and another one goes on under the configuration that was in force."""
        self.trainer.checkpoint(wait=True)
        config = change_config(self.trainer.parts.config.model_dump(mode="json"), overrides, "resume")
        self._desk.session.run = replace(self.run, config=config)
        self._desk.end()
        self.trainer = self._desk.trainer(resume=True)

    def tune(self, *words: str) -> None:
        """Change settings live."""
        self.trainer.inbox.take(Event("1-1", "tune_wanted", {"set": list(words)}), Until(lambda: False))

    def send(self, name: str, fragments: int = 1, reward: float | None = None) -> None:
        """Let an actor send; with other rewards than it saw, if `reward` is given. Waits until all is committed.

        All of it is read before the learner goes on: how many updates it makes on the way, and so how many the limiter
        allows after it, must not depend on how busy this machine is.
        """
        slot = self._slots.get(name) or self._slots.setdefault(name, self._desk.slot(name, len(self._slots)))
        slot.send(fragments, reward)
        self.sent += [(name, made.meta.epoch, made.meta.seq) for made in slot.sent[-fragments:]]
        consumer = self.trainer.parts.consumer
        # (The learner takes none meanwhile: what waits for it must have room, however slow it was before.)
        consumer.hold(STAGED_BYTES)
        wait_for(lambda: self._read >= len(self.sent), "the consumer reads", 50.0)
        self.train(lambda: consumer.counts.entries >= len(self.sent))

    @property
    def _read(self) -> int:
        """Fragments that the consumer has read in this and earlier sessions."""
        parts = self.trainer.parts
        return parts.consumer.counts.entries + parts.intake.pending + parts.consumer.staged[0]

    def train(self, until: Callable[[], bool]) -> None:
        """As the live learner does, until something holds."""
        self.trainer.train(Until(until, describe=self._describe))

    def _describe(self) -> str:
        parts = self.trainer.parts
        limiter = parts.limiter
        return f"at update {parts.updater.updates}, limiter at {limiter.error} within {limiter.bounds}"

    def learn(self, updates: int) -> None:
        """So many more updates; the limiter must allow them."""
        wanted = self.trainer.parts.updater.updates + updates
        self.train(lambda: self.trainer.parts.updater.updates >= wanted)

    def end(self, whole: bool = True) -> Recording:
        """The learner ends; with final weights if the run is `whole`. Returns what can be replayed."""
        if whole:
            save_file(self.trainer.parts.updater.algorithm.weights(), self.run.weights / "final.safetensors")
        self._desk.end()
        return self.recording()

    def recording(self) -> Recording:
        """As `clawq replay` opens it."""
        return open_recording(Whereabouts(self.run.id, self.keys, self.run.folder, self.data))

    def close(self) -> None:
        """Take the streams away too. Idempotent."""
        self._desk.close()
