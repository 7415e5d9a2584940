"""Where a run is: its folder, its keys, its Redis, as far as each can be found from here. For commands that look back.

RUN may be the name of a run that is alive on this Redis, the path of a run folder, or a folder's name below `runs/`. A
run that has ended is known by its folder alone; one on another machine by its Redis alone. Nothing is changed.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawq.config_removed import without_removed
from clawq.errors import TransportError, UserError
from clawq.programs.damaged import read_object
from clawq.programs.endings import folder_of
from clawq.programs.run import reading_run
from clawq.state import resolve_urls
from clawq.transport.client import connect, translated
from clawq.transport.control import RunRegistry
from clawq.transport.keys import RunKeys


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A run that was found.

    Attributes:
        run_id: its name.
        keys: on its data server.
        folder: the run folder, None if it is not on this machine.
        data: client of a data server that answers, None if there is none (it need not know the run).
        config: the run's configuration, as JSON.
        spec: of its environment, as JSON.
    """

    run_id: str
    keys: RunKeys
    folder: Path | None
    data: Any
    config: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)

    def need_folder(self) -> Path:
        """The run folder; UserError if it is elsewhere."""
        if self.folder is None:
            raise UserError(f"the folder of run {self.run_id} is not on this machine; do this on its learner's host")
        return self.folder


def find_run(word: str) -> Whereabouts:
    """The run that a user means.

    Raises:
        UserError: there is none, or its run.json cannot be read.
    """
    broker, data = _servers()
    folder = folder_of(word)
    if folder is not None:
        return _of_folder(folder.absolute(), data)
    if "/" in word:
        # No name of a run has one.
        lacks = "it has no run.json" if Path(word).is_dir() else "there is no such folder"
        raise UserError(f"{word} is no run folder: {lacks}. Give the folder that `clawq up` printed")
    known: list[str] = []
    if broker is not None:
        registry = RunRegistry(broker)
        record = registry.get(word)
        if record is not None:
            kept = Path(str(record.learner.get("folder", "")))
            here = kept if (kept / "run.json").is_file() else None
            return Whereabouts(record.run_id, record.keys, here, data, record.config, record.spec)
        known = [run.run_id for run in registry.list()]
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "give the path of a run folder, or the name of a run that is alive"
    alive = f" (alive: {', '.join(known)})" if known else ""
    raise UserError(f"there is no run {word!r}{alive}; {hint}")


def _of_folder(folder: Path, data: Any) -> Whereabouts:
    with reading_run(folder):
        facts = read_object(folder / "run.json")
        keys, config = RunKeys(str(facts["tag"])), dict(without_removed(facts["config"], str(folder / "run.json")))
        return Whereabouts(str(facts["id"]), keys, folder, data, config, dict(facts["spec"]))


def _servers() -> tuple[Any, Any]:
    """(broker, data) of the Redis that is named or runs here, each None if it does not answer."""
    urls = resolve_urls()
    if urls is None:
        return None, None
    found: list[Any] = []
    for url in urls:
        try:
            client = connect(url)
            with translated(client):
                client.ping()
            found.append(client)
        except TransportError:
            found.append(None)
    return found[0], found[1]


__all__ = ["Whereabouts", "find_run"]
