"""A learner whose log is there beforehand, killed with SIGKILL wherever one likes, and its uninterrupted twin.

    python lineage.py learn REQUEST      the real learner, over Redis; resumes if there is a checkpoint
    python lineage.py apply REQUEST      the schedule that the learners left, done again from the first record on

REQUEST is a JSON object (`Lineage.request`). Both write what they have become to a file, and every loss on the way. The
fragments come from `PointEnv` through the real adder and codec; a copy of each lies in a folder, for the twin.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clawq.acting.adder import Adder, Limits, Origin
from clawq.config import RunConfig
from clawq.core import Entry
from clawq.errors import StoreUnavailable
from clawq.programs import learner, learning
from clawq.programs.parts import Outside, Parts, make_examiner, make_parts
from clawq.programs.resume import ring_state
from clawq.programs.run import Run, create_run, open_run
from clawq.programs.schedule import SCHEDULE_FILE, read_schedule
from clawq.programs.session import Session
from clawq.programs.train import Trainer
from clawq.spawning.spawner import Spawner
from clawq.testing.point import PointEnv, PointOptions, point_spec
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.codec import encode
from clawq.transport.control import RunRecord
from clawq.transport.keys import RunKeys
from clawq.transport.stream import StreamWriter

ENVS = 4
#: A learner with everything that must come back: a ring that wraps, seams, goals, and progress that matters.
SMALL: dict[str, Any] = {
    "name": "lineage",
    "environment": {"name": "point", "num_envs": ENVS, "options": {"max_episode_steps": 11}},
    "algorithm": {"name": "td3", "options": {"hidden": [16], "lr_final_fraction": 0.1}},
    "replay": {"capacity": 700, "batch_size": 32},
    "rate_limit": {"samples_per_insert": 4, "min_size_to_sample": 100},
    "learner": {
        "device": "cpu",
        "publish_interval_s": 0.02,
        "checkpoint_interval_s": 0.05,
        "keep_checkpoints": 2,
        "snapshot": "never",
    },
    "evaluation": {"interval_s": None},
    "metrics": [],
}
PRIORITISED: dict[str, Any] = {"sampler": "prioritized", "n_step": 3, "hindsight": {"strategy": "future", "k": 4}}
LARGEST_STEPS = 9


class Lineage:
    """One run, and the processes that learn for it.

    Args:
        folder: for all files.
        urls: of broker and data server.
        replay: what the `replay` section has beside SMALL's.
        fragments: of the log.
    """

    def __init__(self, folder: Path, urls: tuple[str, str], replay: dict[str, Any], fragments: int) -> None:
        self.folder, self._urls = folder, urls
        budget = {"env_steps": fragments * ENVS * (LARGEST_STEPS + 1)}
        sections = {**SMALL, "folder": str(folder), "replay": {**SMALL["replay"], **replay}, "budget": budget}
        spec = point_spec(PointOptions.model_validate(SMALL["environment"]["options"]))
        self.run = create_run(RunConfig.model_validate(sections), "lineage", spec)
        self.keys = RunKeys(self.run.tag)
        self.data = connect(urls[1])
        self.steps = self._fill(fragments)

    def _fill(self, fragments: int) -> int:
        """Write the log, with steps in odd lots, episodes over seams and an env that breaks; valid env steps in all."""
        log, rng, steps = self.folder / "log", np.random.default_rng(0), 0
        log.mkdir()
        options = PointOptions.model_validate(SMALL["environment"]["options"])
        slots = [_Slot(self.data, self.keys, self.run.tag, k, options) for k in range(3)]
        for _ in range(fragments):
            slot = slots[rng.integers(len(slots))]
            seq, payload, valid = slot.send(int(rng.integers(2, LARGEST_STEPS + 1)), rng)
            steps += valid
            (log / f"{slot.writer.slot}_{slot.writer.epoch}_{seq}").write_bytes(payload)
        for slot in slots:
            slot.writer.close()
        return steps

    def start(self, mode: str, **request: Any) -> subprocess.Popen[str]:
        """Start a process; `updates`: where it ends, `kill`: by SIGKILL, and with or without the update made."""
        asked = {"folder": str(self.run.folder), "log": str(self.folder / "log"), "urls": self._urls, **request}
        return subprocess.Popen(
            [sys.executable, __file__, mode, json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, mode: str, timeout_s: float = 300.0, **request: Any) -> tuple[int, str]:
        """Run one to its end: status and what it said."""
        with self.start(mode, **request) as process:
            try:
                said, _ = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return process.returncode, said

    def losses(self, name: str) -> dict[int, tuple[str, ...]]:
        """Update -> its losses, as the last process told them that made it."""
        told: dict[int, tuple[str, ...]] = {}
        for line in (self.run.folder / name).read_text().splitlines():
            words = line.split()
            # A killed process may have torn its last line.
            if len(words) == 4 and words[-1] == ".":
                told[int(words[0])] = tuple(words[1:3])
        return told

    def close(self) -> None:
        """Let go of Redis."""
        self.data.close()


class _Slot:
    """A real actor's way from env to stream, without its policy."""

    def __init__(self, data: Any, keys: RunKeys, tag: str, number: int, options: PointOptions) -> None:
        name = f"w-{number}"
        self.writer = StreamWriter.open(data, keys, name, "test", 60.0)
        self._env = PointEnv(options, ENVS)
        self._adder = Adder(self._env.spec, ENVS, Origin(tag, "test", name, 1), Limits(1e9, 1_000_000))
        self._adder.begin(self._env.reset([10 * number + k for k in range(ENVS)]))

    def send(self, steps: int, rng: np.random.Generator) -> tuple[int, bytes, int]:
        spec = self._env.spec
        self._adder.open(1, 0.0)
        for _ in range(steps):
            action = rng.uniform(-1, 1, (ENVS, spec.action.size)).astype(np.float32)
            result = self._env.step(spec.action.to_env(action))
            if rng.random() < 0.02:
                # An env that goes non-finite condemns its episode from its start: notices for rows sent before.
                result.obs["observation"][rng.integers(ENVS)] = np.nan
            broken = self._adder.add(action, {}, result)
            if broken is not None:
                self._adder.restarted(self._env.restart(broken))
        made = self._adder.close()
        made = replace(made, meta=replace(made.meta, epoch=self.writer.epoch))
        payload = bytes(encode(made))
        # As the sender of an actor does: whatever is unclear is sent again.
        while True:
            with contextlib.suppress(StoreUnavailable):
                self.writer.send(made.meta.seq, payload)
                break
        return made.meta.seq, payload, int(np.count_nonzero(made.valid))


# --- in a process of its own ------------------------------------------------------------------------------------------


class Watch:
    """Writes the losses of each update, and ends the process in its midst if that was asked for."""

    def __init__(self, parts: Parts, file: Path, kill_at: int | None = None, before: bool = False) -> None:
        update = parts.updater.update

        def watched(batch: Any, progress: float) -> bool:
            kill = kill_at is not None and parts.updater.updates + 1 >= kill_at
            if kill and before:
                os.kill(os.getpid(), signal.SIGKILL)
            made = update(batch, progress)
            losses = parts.updater.metrics
            shown = losses["critic_loss"].hex(), losses["q_mean"].hex()
            with file.open("a") as out:
                out.write(f"{parts.updater.updates} {shown[0]} {shown[1]} .\n")
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        parts.updater.update = watched  # type: ignore[method-assign]


def become(parts: Parts) -> dict[str, Any]:
    """All that learning has made: state, and the rows of the ring that belong to a fragment."""
    parts.batches.rewind()
    ring = parts.ring
    placed = ring.layout().placed
    slots = np.arange(max(ring.oldest, placed[0].start), ring.head) % ring.capacity
    return {
        "algorithm": parts.updater.algorithm.state_dict(),
        "limiter": parts.limiter.state_dict(),
        "sampler": parts.sampler.state_dict(),
        "ring": ring_state(ring),
        "rows": [torch.from_numpy(column.numpy()[slots].copy()) for column in ring.columns],
        "updates": parts.updater.updates,
        "skipped": parts.updater.skipped,
        "env_steps": parts.intake.env_steps,
    }


def build(run: Run, urls: tuple[str, str], tell: Callable[[str], None]) -> tuple[Trainer, Any]:
    """The learner of a run, resumed if there is a checkpoint."""
    broker, data, keys = connect(urls[0]), connect(urls[1]), RunKeys(run.tag)
    # A killed one's claim would run out by itself, after a while.
    data.delete(keys.claim("learner"))
    claim = Claim.take(data, keys.claim("learner"), "test", 600.0)
    session = Session(run, *urls, broker, data, keys, claim, Spawner(), RunRecord(run.id, run.tag))
    return learner.build(session, "cpu", True, tell)


def twin(run: Run, log: Path) -> tuple[Parts, learning.Fetch]:
    """The parts of a learner that has done nothing, and where its fragments are."""
    nobody: Any = _NoLink()
    parts = make_parts(run, "cpu", Outside(nobody, nobody, lambda *letter: None, lambda: 0))

    def fetch(slot: str, epoch: int, seq: int) -> Entry | None:
        file = log / f"{slot}_{epoch}_{seq}"
        return Entry(slot, epoch, seq, file.read_bytes()) if file.exists() else None

    return parts, fetch


def learn(request: dict[str, Any]) -> None:
    """The learner: until `entries` are settled and nothing more can be learned, or until it is killed."""
    run = open_run(Path(request["folder"]), None)
    trainer, writers = build(run, request["urls"], say)
    parts = trainer.parts
    Watch(parts, run.folder / "losses.txt", request.get("kill_at"), request.get("before", False))
    parts.consumer.start()
    parts.link.start()
    trainer.publish()

    class Done(threading.Event):
        def is_set(self) -> bool:
            settled = parts.consumer.counts.entries >= request["entries"]
            return settled and not parts.limiter.can_sample(parts.config.replay.batch_size)

    trainer.train(Done())
    trainer.checkpoint(wait=True)
    torch.save(become(parts), run.folder / "learned.pt")
    parts.consumer.close()
    parts.link.stop(5.0)
    trainer.close()
    writers.close()


def say(line: str) -> None:
    """To whoever started this process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _NoLink:
    stream_budget_bytes = 10**12


def apply(request: dict[str, Any]) -> None:
    """The twin in a process of its own."""
    follow(open_run(Path(request["folder"]), None), Path(request["log"]))


def follow(run: Run, log: Path) -> None:
    """The twin: from nothing, by the schedule alone."""
    parts, fetch = twin(run, log)
    Watch(parts, run.folder / "losses_applied.txt")
    learning.apply(read_schedule(run.folder / SCHEDULE_FILE), fetch, parts, make_examiner(run))
    torch.save(become(parts), run.folder / "applied.pt")


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two states are not the same to the last bit."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}[{index}]")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.numpy().tobytes() != other.numpy().tobytes():
            yield path
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"[:200]


def main() -> None:
    torch.set_num_threads(1)
    request = json.loads(sys.argv[2])
    {"learn": learn, "apply": apply}[sys.argv[1]](request)


if __name__ == "__main__":
    main()
