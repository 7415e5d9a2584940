"""A run: its name, its tag, its folder.

The folder holds everything that a run leaves behind:

    config.yaml       the resolved configuration
    run.json          id, tag, environment spec; what `--resume` and `clawq status` start from
    metrics.jsonl     one line a second;  tb/  the same for TensorBoard
    checkpoints/      newest K and the best one
    archive/          the experience on disk (with archive.enabled)
    weights/          the untrained and the final weights, as safetensors
    curve.png, hand.gif, report.json
    logs/             one log for each process

Identity is made once and kept over restarts: a resumed run has the same id, tag and folder.
"""

import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawq.config import RunConfig
from clawq.config_file import to_yaml
from clawq.config_removed import without_removed
from clawq.errors import CheckpointInvalid, ClawqError, UserError
from clawq.programs.damaged import damaged, read_object
from clawq.specs import EnvSpec
from clawq.state import hold
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.urls import redact

log = logging.getLogger(__name__)

RUN_ID = re.compile(r"^[a-z0-9][a-z0-9._-]{0,79}$")


@dataclass(frozen=True, slots=True)
class Run:
    """One run's identity and folder.

    Attributes:
        id: name for people, unique on a Redis; also the name of its Celery queue.
        tag: 32 hex digits, unique for ever; everything of the run in Redis is under it.
        folder: the run folder.
        config: the resolved configuration.
        spec: what the environment's arrays are.
        follows: tag of the run from whose experience it learns; empty = its own.
    """

    id: str
    tag: str
    folder: Path
    config: RunConfig
    spec: EnvSpec
    follows: str = ""

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the process logs."""
        return self.folder / "logs"

    @property
    def weights(self) -> Path:
        """Folder of exported weights."""
        return self.folder / "weights"

    @property
    def archive(self) -> Path:
        """Folder of the archive, whether there is one or not."""
        return archive_folder(self.folder, self.id, self.config.archive.folder)

    def save(self) -> None:
        """Write run.json (atomically: readers see the old one or the new one)."""
        write_json(
            self.folder / "run.json",
            {
                "id": self.id,
                "tag": self.tag,
                "follows": self.follows,
                "pid": os.getpid(),
                "config": without_secrets(self.config).model_dump(mode="json"),
                "spec": self.spec.to_json(),
            },
        )

    def save_config(self) -> None:
        """Write config.yaml, the resolved configuration."""
        write_text(self.folder / "config.yaml", to_yaml(without_secrets(self.config)))


def archive_folder(folder: Path, run_id: str, chosen: str | None) -> Path:
    """Where the archive of a run is: in the run folder, or where `archive.folder` says."""
    return folder / "archive" if chosen is None else Path(chosen).expanduser().absolute() / run_id


def without_secrets(config: RunConfig) -> RunConfig:
    """The configuration with the passwords in its Redis URLs as `***`: a run folder is shown around."""
    named = {"broker_url": config.redis.broker_url, "data_url": config.redis.data_url}
    hidden = {name: url and redact(url) for name, url in named.items()}
    return config.model_copy(update={"redis": config.redis.model_copy(update=hidden)})


def new_run_id(config: RunConfig, now_s: float) -> str:
    """`<name>-<seed>-<local time>`, as hand-reach-s0-1129-141502."""
    return f"{config.name}-s{config.seed}-{time.strftime('%m%d-%H%M%S', time.localtime(now_s))}"


def prepare_folder(config: RunConfig, run_id: str) -> Path:
    """The folder of a new run, with room for logs; UserError if it is a run's already or cannot be made."""
    check_run_id(run_id)
    folder = Path(config.folder).expanduser().absolute() / run_id
    if (folder / "run.json").exists():
        raise UserError(
            f"the run folder {folder} exists already. Choose another --run name, or go on with it: --resume {folder}"
        )
    with writing(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        # Rights of a folder say little (root, read-only mounts, quotas): what counts is whether a file can be made.
        trial = folder / f".trial-{os.getpid()}"
        trial.touch()
        trial.unlink()
    return folder


def prepare_new_folder(config: RunConfig, now_s: float) -> tuple[str, Path]:
    """(run id, folder) of a new run without a wanted name; two that begin in the same second get two folders."""
    named = new_run_id(config, now_s)
    base = Path(config.folder).expanduser().absolute()
    for attempt in range(1, 1000):
        run_id = named if attempt == 1 else f"{named}-{attempt}"
        with writing(base / run_id):
            base.mkdir(parents=True, exist_ok=True)
            try:
                (base / run_id).mkdir()
            except FileExistsError:
                continue
        return run_id, prepare_folder(config, run_id)
    raise UserError(f"{base} has no free folder for {named}")


def is_unborn(folder: Path) -> bool:
    """Whether no run began in that folder, so that nothing is lost with it."""
    return not (folder / "run.json").exists()


@contextmanager
def refusing(folder: Path, fresh: bool) -> Iterator[None]:
    """Leave no folder of a run that is refused before it began.

    Args:
        folder: of the run.
        fresh: it was made for this run.
    """
    try:
        yield
    except UserError:
        if fresh and is_unborn(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """UserError instead of OSError while the run folder is made or prepared."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be written: {error.strerror or error}. Choose another with folder=PATH."
        ) from None


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process: one learner writes to it, whatever Redis it uses.

    Raises:
        UserError: another living process has it.
    """
    with _only_one(folder, "lock", "learner"):
        yield


@contextmanager
def only_up(folder: Path) -> Iterator[None]:
    """Hold the run folder for this `clawq up`, which starts the learner that writes to it; UserError as above."""
    with _only_one(folder, "up.lock", "`clawq up`"):
        yield


@contextmanager
def _only_one(folder: Path, name: str, what: str) -> Iterator[None]:
    with writing(folder):
        lock = hold(folder / name)
    if lock is None:
        holder = (folder / name).read_text().strip()
        raise UserError(
            f"the run folder {folder} is in use by another {what} ({holder or 'just starting'}). "
            "Stop that first, or choose another --run name."
        )
    with lock:
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def create_run(config: RunConfig, run_id: str, spec: EnvSpec, tag: str | None = None, follows: str = "") -> Run:
    """Make a new run in its folder, with a tag of its own."""
    run = Run(run_id, tag or new_tag(), prepare_folder(config, run_id), config, spec, follows)
    make_folders(run)
    with writing(run.folder):
        run.save_config()
        run.save()
    return run


def check_run_folder(folder: Path) -> None:
    """UserError unless this is the folder of a run."""
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no run.json. Give the folder that `clawq up` printed.")


def open_run(folder: Path, config: RunConfig | None) -> Run:
    """The run of an existing folder, with its own configuration or (if given) a changed one."""
    check_run_folder(folder)
    with reading_run(folder, CheckpointInvalid):
        raw = read_object(folder / "run.json")
        spec = EnvSpec.from_json(raw["spec"])
        kept = RunConfig.model_validate(without_removed(raw["config"], str(folder / "run.json")))
        check_run_id(str(raw["id"]))
        keys = RunKeys(str(raw["tag"]))
        run = Run(str(raw["id"]), keys.tag, folder.absolute(), config or kept, spec, str(raw.get("follows", "")))
    make_folders(run)
    return run


def reading_run(folder: Path, kind: type[ClawqError] = UserError) -> AbstractContextManager[None]:
    """An error that says what to do, instead of what a damaged run.json raises."""
    return damaged(
        folder / "run.json",
        "It says which run this is, and what its arrays are: put a copy back if there is one. Its checkpoints, weights "
        "and archive are not touched by that; with the same configuration (config.yaml) a new run can be begun",
        kind,
    )


def make_folders(run: Run) -> None:
    """The folders inside a run folder."""
    with writing(run.folder):
        for folder in (run.checkpoints, run.logs, run.weights):
            folder.mkdir(exist_ok=True)


def check_run_id(run_id: str) -> None:
    """UserError unless the name can be a folder and a queue name."""
    if not RUN_ID.fullmatch(run_id):
        raise UserError(
            f"run name {run_id!r} cannot be used: lower-case letters, digits, '.', '_' and '-' only, at most 80, "
            "beginning with a letter or digit"
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half of it."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """The same for any text."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
