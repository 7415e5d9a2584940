"""The end of a run: last weights, last evaluation, pictures and the report.

A run that spent its budget ends whole: actors stop, the final weights are published and kept as a file, the final
evaluation is a task like any other (where no worker takes it, the learner's host runs the same program), then the
learning curve and the animation are made by programs of their own, which may fail without harming the run.

Its streams are deleted only when all required readers have them (`clawq.programs.farewell`).

A run that is stopped early gets a checkpoint and a short report, and can be resumed.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from clawq.cores import thread_env
from clawq.errors import ActorFailed
from clawq.programs.farewell import Farewell
from clawq.programs.run import Run, write_json
from clawq.programs.train import Trainer
from clawq.spawning.logfile import LogFile
from clawq.spawning.program import run_program
from clawq.spawning.spawner import Spawner

log = logging.getLogger(__name__)

#: How long the final weights may take to reach Redis, seconds; then Redis counts as gone.
PUBLISH_S = 20.0
#: How long the pictures may take, seconds.
PICTURES_S = 180.0
#: How long a final evaluation waits for a worker to take it before the learner's host does it itself, seconds.
PICKUP_S = 20.0
#: How many workers may be gone in the midst of it until the learner's host does it itself.
TRIES = 3
#: Pause between two looks while something else is under way, seconds.
LOOK_S = 0.1


class Finish:
    """Ends one run.

    Args:
        run: which one.
        data_url: the data Redis, for the programs.
        spawner: starts them.
        trainer: what was trained.
        farewell: waits for the run's readers; None = it has none.
    """

    def __init__(
        self, run: Run, data_url: str, spawner: Spawner, trainer: Trainer, farewell: Farewell | None = None
    ) -> None:
        self._farewell = farewell
        self._run, self._data_url, self._spawner, self._trainer = run, data_url, spawner, trainer
        self._started_s = time.time()
        untrained = run.weights / "untrained.safetensors"
        if not untrained.exists() and trainer.parts.updater.updates == 0:
            self._keep_weights(untrained)

    def stopped_early(self, reason: str) -> dict[str, Any]:
        """Checkpoint and report of a run that was not finished."""
        self._stage("stopping")
        if self._trainer.parts.updater.updates > 0:
            self._trainer.checkpoint(wait=True)
        return self._write_report({"ended": reason, "resumable": True})

    def complete(self, stop: threading.Event, say: Callable[[str], None]) -> dict[str, Any]:
        """All of the end; `stop` cuts it short."""
        trainer, link = self._trainer, self._trainer.parts.link
        say(f"budget reached: {trainer.parts.budget.reached}")
        self._stage("evaluating")
        link.end_actors()
        # What is evaluated and drawn needs no more experience: no source waits for that.
        link.leave_source()
        version = trainer.publish("final")
        trainer.checkpoint(wait=True)
        self._wait(lambda: link.published_version >= version, PUBLISH_S, stop)
        kept = self._keep_weights(self._run.weights / "final.safetensors")
        evaluation = self._evaluate(version, stop)
        if evaluation is not None:
            trainer.appraisal.take(evaluation)
            say(describe_evaluation(evaluation))
        else:
            say("there is no final evaluation; --resume with this run folder tries again")
        self._stage("drawing")
        pictures = self._draw(stop)
        resumable = evaluation is None or not kept
        # The streams of a run that can be resumed are kept.
        lost = {} if resumable else self._wait_for_readers(stop)
        report = self._write_report(
            {
                "ended": trainer.parts.budget.reached,
                "final_evaluation": evaluation,
                "pictures": pictures,
                "resumable": resumable,
                **({"not_read": lost} if lost else {}),
                "incomplete": not kept or (evaluation is None and not stop.is_set()),
            }
        )
        self._stage("done")
        link.notify("run_done", version=version)
        return report

    def _keep_weights(self, path: Path) -> bool:
        """Write the current weights to a file, whole or not at all; a file system that refuses is told."""
        partial = path.with_suffix(".tmp")
        try:
            save_file(self._trainer.parts.updater.algorithm.weights(), partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            self._trainer.notices.tell(f"{path} was not written: {error}")
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True

    def _wait_for_readers(self, stop: threading.Event) -> dict[str, int]:
        if self._farewell is None:
            return {}

        def look() -> None:
            for event in self._trainer.parts.link.take_events():
                self._trainer.inbox.take(event, stop)
            self._trainer.parts.link.check()

        lost = self._farewell.wait(stop, self._stage, self._trainer.notices.tell, look)
        for reader, fragments in lost.items():
            self._trainer.parts.link.notify("reader_given_up", reader=reader, fragments=fragments)
        return lost

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, version: int, stop: threading.Event) -> dict[str, Any] | None:
        """The final evaluation of `version`, or None if it could not be had."""
        settings = self._run.config.evaluation
        self._trainer.appraisal.ask(version, "final", settings.final_episodes)
        found: dict[str, Any] = {}

        def arrived() -> bool:
            for event in self._trainer.parts.link.take_events():
                self._trainer.inbox.take(event, stop)
                if event.facts.get("label") != "final" or event.facts.get("version") != version:
                    continue
                if event.kind == "evaluation":
                    found.update(event.facts)
                elif event.kind == "evaluation_started":
                    found["started"] = True
                elif event.kind == "evaluation_failed" and event.facts.get("reason") == "gone":
                    # The coordinator sends it again.
                    found.pop("started", None)
                elif event.kind == "evaluation_failed":
                    found["failed"] = True
            return "mean_return" in found or "failed" in found

        for _ in range(TRIES):
            self._wait(lambda: arrived() or "started" in found, PICKUP_S, stop)
            if "started" not in found:
                break
            self._wait(lambda: arrived() or "started" not in found, settings.timeout_s, stop)
            if "started" in found:
                break
        if "mean_return" in found or stop.is_set():
            return found if "mean_return" in found else None
        log.warning("no worker could evaluate the final weights; this host does it")
        request = {
            **self._described(),
            "version": version,
            "episodes": settings.final_episodes,
            "seed": settings.seed,
        }
        answer = self._exec("clawq.programs.evaluate", request, settings.timeout_s, stop)
        return None if answer is None else {**answer, "label": "final"}

    # --- pictures ----------------------------------------------------------------------------------------------------

    def _draw(self, stop: threading.Event) -> dict[str, str]:
        """Learning curve and animation; name -> file of what could be made."""
        record = self._run.config.record
        pictures: dict[str, str] = {}
        curve = {"folder": str(self._run.folder), "out": str(self._run.folder / "curve.png")}
        animation = {
            **self._described(),
            "trained": str(self._run.weights / "final.safetensors"),
            "untrained": str(self._run.weights / "untrained.safetensors"),
            "out": str(self._run.folder / f"hand.{record.format}"),
            "episodes": record.episodes,
            "seed": self._run.config.evaluation.seed,
        }
        jobs: list[tuple[str, str, Mapping[str, Any]]] = [("curve", "clawq.programs.curve", curve)]
        if record.animation and Path(str(animation["untrained"])).exists():
            jobs.append(("animation", "clawq.programs.record", animation))
        for name, program, request in jobs:
            answer = self._exec(program, request, PICTURES_S, stop)
            if answer is not None:
                pictures[name] = str(answer.get("file", request["out"]))
        return pictures

    def _described(self) -> dict[str, Any]:
        run = self._run
        config, spec = run.config.model_dump(mode="json"), run.spec.to_json()
        return {"run": {"id": run.id, "tag": run.tag, "config": config, "spec": spec}, "data_url": self._data_url}

    def _exec(
        self, program: str, request: Mapping[str, Any], timeout_s: float, stop: threading.Event
    ) -> dict[str, Any] | None:
        """Run a program beside the gauges; None (and a warning) if it failed or `stop` was set."""
        log_file = LogFile(self._run.logs / f"{program.rpartition('.')[2]}.log")
        ending = threading.Event()

        def stopped() -> bool:
            return stop.is_set() or ending.is_set()

        def done() -> bool:
            for event in self._trainer.parts.link.take_events():
                self._trainer.inbox.take(event, stop)
            return future.done()

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(
                run_program, self._spawner, program, request, log_file, timeout_s, thread_env(1), stopped
            )
            try:
                self._wait(done, timeout_s + 10.0, threading.Event())
            finally:
                # Whatever ended the wait must not then wait for the program.
                ending.set()
        try:
            return future.result()
        except ActorFailed as error:
            if not stop.is_set():
                self._trainer.notices.tell(f"{program.rpartition('.')[2]}: {error}")
            return None
        except OSError as error:
            self._trainer.notices.tell(f"{program.rpartition('.')[2]} could not be started: {error}")
            return None

    # --- reports -----------------------------------------------------------------------------------------------------

    def _write_report(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        report = {
            "run": self._run.id,
            "folder": str(self._run.folder),
            **facts,
            "seconds": round(trainer.parts.budget.used_s(time.monotonic()), 2),
            "numbers": trainer.numbers(),
        }
        try:
            write_json(self._run.folder / "report.json", report)
        except OSError as error:
            self._trainer.notices.tell(f"{self._run.folder / 'report.json'} was not written: {error}")
        return report

    def _stage(self, stage: str) -> None:
        self._trainer.stage = stage
        self._trainer.gauge()

    def _wait(self, done: Callable[[], bool], timeout_s: float, stop: threading.Event) -> bool:
        """Wait until `done`, the gauges going on; False after `timeout_s` or when stopped."""
        deadline, gauge_at = time.monotonic() + timeout_s, 0.0
        while not done():
            now_s = time.monotonic()
            if now_s >= deadline or stop.is_set():
                return False
            if now_s >= gauge_at:
                gauge_at = now_s + 1.0
                self._trainer.parts.link.check()
                self._trainer.gauge()
            time.sleep(LOOK_S)
        return True


def describe_evaluation(evaluation: Mapping[str, Any]) -> str:
    """One line for people."""
    success = evaluation.get("success")
    shown = "" if success is None else f", success {float(success):.2f}"
    return (
        f"final evaluation of weights {evaluation['version']} over {evaluation['episodes']} episodes: "
        f"mean return {float(evaluation['mean_return']):.3f}{shown}"
    )
