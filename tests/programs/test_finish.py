"""The end of a run: whom it waits for when it wants the final evaluation."""

import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clawq.config import RunConfig
from clawq.programs import finish
from clawq.programs.finish import Finish
from clawq.programs.run import create_run
from clawq.spawning.spawner import Spawner
from clawq.testing.point import PointOptions, point_spec
from clawq.transport.control import Event

VERSION = 7


class FakeTrainer:
    """Answers a request for an evaluation with pages of events, one for each look."""

    def __init__(self, *pages: list[tuple[str, dict[str, Any]]]) -> None:
        self._pages = deque(pages)
        self.seen: list[str] = []
        link = SimpleNamespace(take_events=self._take_events, check=lambda: None)
        self.parts: Any = SimpleNamespace(link=link, updater=SimpleNamespace(updates=1))
        self.appraisal, self.inbox = SimpleNamespace(ask=self._ask), SimpleNamespace(take=self._take)

    def _take_events(self) -> list[Event]:
        page = self._pages.popleft() if self._pages else []
        return [Event("1-0", kind, {"label": "final", "version": VERSION, **facts}) for kind, facts in page]

    def _ask(self, version: int, label: str, episodes: int) -> None:
        assert (version, label) == (VERSION, "final")

    def _take(self, event: Event, stop: threading.Event) -> None:
        self.seen.append(event.kind)

    def gauge(self) -> None:
        pass


def evaluate(folder: Path, trainer: Any, monkeypatch: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """(what was found, programs that the host ran itself)."""
    raw = {"name": "test", "folder": str(folder), "environment": {"name": "point"}}
    run = create_run(RunConfig.model_validate(raw), "f1", point_spec(PointOptions()))
    programs: list[str] = []
    ending = Finish(run, "", Spawner(), trainer)

    def run_here(program: str, *_: Any) -> dict[str, Any]:
        programs.append(program)
        return {"mean_return": 0.5}

    monkeypatch.setattr(ending, "_exec", run_here)
    monkeypatch.setattr(finish, "PICKUP_S", 0.3)
    monkeypatch.setattr(finish, "LOOK_S", 0.01)
    return ending._evaluate(VERSION, threading.Event()), programs


STARTED: tuple[str, dict[str, Any]] = ("evaluation_started", {"worker": "a"})
GONE: tuple[str, dict[str, Any]] = ("evaluation_failed", {"reason": "gone"})


def test_the_evaluation_of_a_worker_that_is_gone_is_awaited_from_another(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = FakeTrainer([STARTED], [], [GONE], [], [STARTED], [], [("evaluation", {"mean_return": 1.0})])
    found, programs = evaluate(tmp_path, trainer, monkeypatch)
    assert found is not None
    assert found["mean_return"] == 1.0
    assert programs == []


def test_when_no_other_worker_takes_it_the_host_does_it_without_waiting_for_the_time_limit(
    tmp_path: Path, monkeypatch: Any
) -> None:
    for pages in ([[STARTED], [GONE]], [[STARTED], [GONE], [STARTED], [GONE], [STARTED], [GONE], [STARTED]]):
        found, programs = evaluate(tmp_path / str(len(pages)), FakeTrainer(*pages), monkeypatch)
        assert found is not None
        assert found["mean_return"] == 0.5
        assert programs == ["clawq.programs.evaluate"]
