"""Queue and rates of a real run while its learner is slowed down and sped up, at two speeds; draws regulation*.png.

python ops/bench/regulation.py [--quick] [--commit] [--slots N]

Real Redis, real worker with N slots of the point environment, real coordinator; the learner is the real one (`build`
and `Trainer.train`) with an update that takes a throttled time. What is shown is what is made and not yet inserted
(asked of Redis and of the intake ten times a second) against its set point, and what actors make against what the
learner takes. Settled: within 20 % of the set point (or one fragment for each slot) for good; overshoot: how far the
mean over a second goes past the new set point once it has reached it.
"""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from clawq.config_file import load_config
from clawq.control.regulator import QUEUE_S
from clawq.programs.learner import build
from clawq.programs.run import create_run
from clawq.programs.session import invite_actors, open_session
from clawq.programs.train import Trainer
from clawq.spawning.spawner import Spawner
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from ops.bench.common import ROOT, Bench, clean_env, scratch

PICTURES = ROOT / "ops" / "bench"
SAMPLE_S, ENDS_S = 0.1, 5.0
#: Name of the lines and of the picture -> updates a second, one phase after another: steps by 4 and 1/4.
COURSES = {"regulation": (12.5, 50.0, 12.5), "regulation_slow": (5.0, 20.0, 5.0)}


@dataclass
class Watch:
    """What was seen, ten times a second: time, queue, bytes made, bytes taken, window, actors, updates."""

    trainer: Trainer
    data: Any
    keys: RunKeys
    rows: list[tuple[float, ...]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look until `stop`."""
        while not self.stop.wait(SAMPLE_S):
            self.rows.append(self.look())

    def look(self) -> tuple[float, ...]:
        """One row; the stream's part is counted in entries of the mean size."""
        parts, made, unread = self.trainer.parts, 0, 0
        size = parts.intake.payload_bytes / max(1, parts.intake.fragments)
        cursors = {slot: last.decode() for slot, last in self.data.hgetall(self.keys.cursors()).items()}
        for slot in self.data.hkeys(self.keys.slots):
            stream = self.keys.stream(slot.decode())
            newest = self.data.xrevrange(stream, count=1)
            made += int(self.data.xinfo_stream(stream)["entries-added"]) if newest else 0
            unread += len(self.data.xrange(stream, min="(" + cursors.get(slot, "0-0"))) if newest else 0
        queue = unread * size + parts.intake.held_bytes
        pace = {name: float(value) for name, value in self._pace().items()}
        return (
            *(time.monotonic(), queue, made * size, float(parts.intake.payload_bytes)),
            *(pace.get("window_bytes", np.nan), pace.get("actors", np.nan), float(parts.updater.updates)),
        )

    def _pace(self) -> dict[str, Any]:
        names = ("window_bytes", "actors")
        found = self.data.hmget(self.keys.metrics, [f"pace/{name}" for name in names])
        return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def smoothed(values: np.ndarray, over: int = 10) -> np.ndarray:
    """Mean over the last second."""
    sums = np.cumsum(np.concatenate((np.zeros(1), values)))
    starts = np.maximum(np.arange(len(values)) + 1 - over, 0)
    means: np.ndarray = (sums[1:] - sums[starts]) / (np.arange(len(values)) + 1 - starts)
    return means


def rates(times: np.ndarray, counter: np.ndarray, over: int = 10) -> np.ndarray:
    """Growth per second over the last second."""
    back = np.maximum(np.arange(len(times)) - over, 0)
    grown: np.ndarray = (counter - counter[back]) / np.maximum(times - times[back], 1e-6)
    return grown


def judge(times: np.ndarray, queue: np.ndarray, goal: float, grain: float) -> tuple[float, float]:
    """Seconds until the queue stays within its band, and how far it goes past the goal, as a share of it."""
    band = max(0.2 * goal, grain)
    outside = np.flatnonzero(np.abs(queue - goal) > band)
    settled_s = float(times[outside[-1]] - times[0]) if len(outside) else 0.0
    rising = queue[0] < goal
    reached = np.flatnonzero(queue >= goal if rising else queue <= goal)
    if not len(reached):
        return settled_s, 0.0
    past = queue[reached[0] :] - goal if rising else goal - queue[reached[0] :]
    return settled_s, float(max(0.0, past.max()) / goal)


def draw(path: Path, table: np.ndarray, steps: list[float], goals: list[float], text: str) -> None:
    """The picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = table[:, 0] - table[0, 0]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 6.5), sharex=True, layout="constrained")
    top.plot(times, smoothed(table[:, 1]) / 1e3, label="made and not yet inserted (mean over 1 s)")
    ends = [*steps[1:], times[-1]]
    for number, (start_s, end_s, goal) in enumerate(zip(steps, ends, goals, strict=True)):
        top.hlines(
            goal / 1e3, start_s, end_s, "black", "--", label="set point: 1 s of the learner" if not number else None
        )
        top.fill_between([start_s, end_s], 0.8 * goal / 1e3, 1.2 * goal / 1e3, color="black", alpha=0.08)
        for axes in (top, bottom):
            axes.axvline(start_s, color="grey", linewidth=0.8)
    top.set_ylabel("kB")
    top.set_ylim(bottom=0)
    top.legend()
    bottom.plot(times, rates(table[:, 0], table[:, 2]) / 1e3, label="made by actors")
    bottom.plot(times, rates(table[:, 0], table[:, 3]) / 1e3, label="taken by the learner")
    bottom.set_ylabel("kB/s")
    bottom.set_xlabel("seconds; the learner's speed steps at the grey lines")
    bottom.set_ylim(bottom=0)
    bottom.legend()
    figure.suptitle(text, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    bench = Bench("regulation", __doc__, {"slots": "4"})
    torch.set_num_threads(1)
    for name, speeds in COURSES.items():
        follow(bench, name, speeds)


def follow(bench: Bench, name: str, speeds: tuple[float, ...]) -> None:
    """A run of its own whose learner takes one speed after another."""
    slots, phase_s = int(bench.options.slots), bench.pick(30, 15)
    with scratch() as folder, EmbeddedRedis.start(folder / "redis", 256) as servers, ExitStack() as stack:
        overrides = (
            *(f"folder={folder}", "evaluation.interval_s=null", "budget={}", "metrics=[jsonl]"),
            *("environment.num_envs=8", "environment.options.step_s=0.004", "actors.fragment_s=0.05"),
            *("rate_limit.samples_per_insert=4", "rate_limit.min_size_to_sample=2000", "replay.batch_size=256"),
        )
        config = load_config(ROOT / "configs" / "point.yaml", overrides)
        spec = point_spec(PointOptions.model_validate(config.environment.options))
        run = create_run(config, "bench-regulation", spec)
        urls = servers.broker_url, servers.data_url
        session = stack.enter_context(open_session(run, *urls, Spawner()))
        invite_actors(session)
        trainer, writers = build(session, "cpu", False, bench.say)
        for end in (writers.close, trainer.close):
            stack.callback(end)
        stack.callback(trainer.parts.link.stop, ENDS_S)
        stack.callback(trainer.parts.consumer.close, ENDS_S)
        trainer.parts.consumer.start()
        session.take_over_claim()
        trainer.parts.link.start()
        trainer.publish()
        named = {"CLAWQ_BROKER_URL": urls[0], "CLAWQ_DATA_URL": urls[1], "CLAWQ_LOG_DIR": str(folder / "logs")}
        words = [sys.executable, "-m", "clawq.cli.main", "worker", "start", "--slots", str(slots)]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        worker = subprocess.Popen(words, env=clean_env(folder, OMP_NUM_THREADS="1", **named), **quiet)
        stack.callback(worker.wait, 20.0)
        stack.callback(worker.terminate)
        table, begun_s = run_phases(trainer, session.data, session.keys, speeds, phase_s)
        tell(bench, name, speeds, table, begun_s, trainer, slots)


def run_phases(
    trainer: Trainer, data: Any, keys: RunKeys, speeds: tuple[float, ...], phase_s: int
) -> tuple[np.ndarray, list[float]]:
    """Step the learner's speed; what was seen, and when each phase began."""
    algorithm: Any = trainer.parts.updater.algorithm
    step, pause = algorithm.step, [1 / speeds[0]]

    def throttled(*arguments: Any) -> Any:
        ends_s = time.monotonic() + pause[0]
        metrics = step(*arguments)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return metrics

    algorithm.step = throttled
    watch = Watch(trainer, data, keys)
    train_for(trainer, lambda: trainer.parts.updater.updates > 0, 60.0)
    thread = threading.Thread(target=watch.run)
    thread.start()
    begun_s: list[float] = []
    try:
        # The ring was filled as fast as actors could: let that be forgotten first.
        train_for(trainer, lambda: False, 15.0)
        for speed in speeds:
            pause[0] = 1 / speed
            begun_s.append(time.monotonic())
            train_for(trainer, lambda: False, float(phase_s))
    finally:
        watch.stop.set()
        thread.join()
    return np.array(watch.rows), begun_s


def tell(
    bench: Bench,
    name: str,
    speeds: tuple[float, ...],
    table: np.ndarray,
    begun_s: list[float],
    trainer: Trainer,
    slots: int,
) -> None:
    """The lines, and the picture."""
    size = trainer.parts.intake.payload_bytes / trainer.parts.intake.fragments
    times, queue = table[:, 0], smoothed(table[:, 1])
    goals = []
    ends = [*begun_s[1:], times[-1] + 1]
    for number, (start_s, end_s) in enumerate(zip(begun_s, ends, strict=True)):
        here = (times >= start_s) & (times < end_s)
        late = here & (times >= (start_s + end_s) / 2)
        taken = float(np.ptp(table[late, 3]) / np.ptp(times[late]))
        made = float(np.ptp(table[late, 2]) / np.ptp(times[late]))
        updates = float(np.ptp(table[late, 6]) / np.ptp(times[late]))
        goals.append(QUEUE_S * taken)
        settled_s, overshoot = judge(times[here], queue[here], goals[-1], slots * size)
        facts = {
            "overshoot": overshoot,
            "set_point_bytes": goals[-1],
            "queue_bytes": float(queue[late].mean()),
            "made_to_taken": made / taken,
            "updates_per_s": updates,
            "updates_per_s_wanted": speeds[number],
            "actors": float(np.nanmedian(table[late, 5])),
            "fragment_bytes": size,
            "slots": slots,
        }
        bench.result(f"{name}_{number}", settled_s, "s", "<= 10, overshoot < 0.2", **facts)
    text = f"{slots} actors, learner at {', '.join(f'{one:g}' for one in speeds)} updates/s"
    draw(PICTURES / f"{name}.png", table, [one - times[0] for one in begun_s], goals, text)


def train_for(trainer: Trainer, enough: Any, seconds: float) -> None:
    """The real loop, for so long or until `enough`."""
    ends_s = time.monotonic() + seconds

    class Until(threading.Event):
        def is_set(self) -> bool:
            return bool(enough()) or time.monotonic() > ends_s

    trainer.train(Until())


if __name__ == "__main__":
    main()
