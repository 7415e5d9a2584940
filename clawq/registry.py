"""The processes that clawq started on this host, on disk: one small file for each, for the watchdog and for people.

    <state folder>/processes/<host>/
        <tag>.json        one process: identity, role, parent, run, limits (`Record`)
        <tag>.progress    what it shows of its work (`clawq.progress`)
        deaths.jsonl      who ended how; bounded
        unfit.json        places where nothing may be started for now, and why

A record is written before the program begins (its parent holds it back until then, see `clawq.spawning.launch`), and
removed when the process was reaped. Who is started by hand enrols itself (`enrol`). What a crash leaves behind is the
watchdog's to clean up. Files are readable by their user only, since a record names its Redis.

Nothing here is needed for running: a folder that cannot be written costs the watchdog's eyes and nothing else.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from clawq import progress
from clawq.procfs import Identity, boot_id, environ
from clawq.state import replace_private, state_dir

log = logging.getLogger(__name__)

#: Environment variable with the unique tag of a child; its descendants inherit it.
TAG_VARIABLE = "CLAWQ_CHILD"
#: Environment variable with the tag of the run for which a process works.
RUN_VARIABLE = "CLAWQ_RUN"
#: What is noted of a death that nobody need worry about.
ENDED_IN_ORDER = "ended in order"
#: Size at which the list of deaths is halved, bytes.
_DEATHS_BYTES = 200_000
#: A record that nobody can read is somebody's half-written one for so long, seconds.
_TORN_S = 60.0


@dataclass(frozen=True, slots=True)
class Record:
    """One process of ours.

    Attributes:
        tag: 128 bits, in its environment (CLAWQ_CHILD) and in that of all it starts; of one that enrolled itself, only
            its name.
        identity: who it is.
        role: `up`, `supervisor`, `worker`, `pool`, `actor`, `learner`, `coordinator`, `program`, `redis`, `watchdog`.
        place: what it fills, as a slot's name: its replacement has the same one.
        parent: who started it and answers for it; None = a user did.
        run: tag of its run, empty if it serves several.
        log: its log file, empty if it has none of its own.
        limits: phase -> seconds without progress after which it counts as hung; `leak_mb_per_h`; and `memory_mb`, above
            which it may be for `memory_s` (its parent acts first).
        urls: (broker, data): the Redis that it uses; empty texts if it needs none.
        facts: numbers and texts for a rule about its role, as a worker's `slots`.
        inherited: whether its environment has the tag (not if it enrolled itself, or hides its environment).
    """

    tag: str
    identity: Identity
    role: str
    place: str = ""
    parent: Identity | None = None
    run: str = ""
    log: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    urls: tuple[str, str] = ("", "")
    facts: Mapping[str, Any] = field(default_factory=dict)
    inherited: bool = True

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.identity.pid

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"{self.role} {self.place}".rstrip() + f" (pid {self.pid})"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Inverse of `asdict`; fields of newer versions are ignored."""
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        parent = known.get("parent")
        broker, data = known.get("urls", ("", ""))
        return cls(
            **{
                **known,
                "identity": Identity.from_json(known["identity"]),
                "parent": None if parent is None else Identity.from_json(parent),
                "urls": (str(broker), str(data)),
            }
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """What a parent says of a child before it starts it; see `Record` for the fields."""

    role: str = "program"
    place: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    urls: tuple[str, str] = ("", "")
    run: str = ""


@dataclass(frozen=True, slots=True)
class Death:
    """How somebody ended.

    Attributes:
        role: what it was.
        place: what it filled.
        at_s: monotonic time.
        boot: of that clock.
        how: in words, with the last words of its log if it ended badly.
        pid: that it had; 0 = not noted.
    """

    role: str
    place: str
    at_s: float
    boot: str
    how: str
    pid: int = 0


class Registry:
    """The folder of this host and user.

    Args:
        folder: default: in the state folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = registry_folder() if folder is None else folder
        self._told = False

    def progress_file(self, tag: str) -> Path:
        """Where that process shows its progress."""
        return self.folder / f"{tag}.progress"

    def prepare(self, tag: str) -> Path | None:
        """Make a progress file for a process that is about to start; None if the folder cannot be written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            progress.create(self.progress_file(tag))
        except OSError as error:
            self._complain(error)
            return None
        return self.progress_file(tag)

    def add(self, record: Record) -> None:
        """Write a record, or replace it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_private(self._file(record.tag), json.dumps(asdict(record)))
        except OSError as error:
            self._complain(error)

    def get(self, tag: str) -> Record | None:
        """That record; None if there is none that can be read."""
        return _read(self._file(tag))

    def records(self) -> list[Record]:
        """All records; what is no record any more is thrown away."""
        found = []
        for file in self.folder.glob("*.json") if self.folder.is_dir() else ():
            if len(file.stem) != 32:
                continue
            record = _read(file)
            if record is not None:
                found.append(record)
            else:
                _unlink_old(file, _TORN_S)
        return found

    def remove(self, tag: str) -> None:
        """Forget a process. Idempotent."""
        for file in (self._file(tag), self.progress_file(tag)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    def sweep(self, older_than_s: float = 86_400.0) -> None:
        """Remove what is of no use to anybody and has not been for a day, for where no watchdog cleans up."""
        known = {record.tag: record.identity for record in self.records()}
        for file in [*self.folder.glob("*.progress"), *self.folder.glob("*.tmp")] if self.folder.is_dir() else ():
            if file.stem not in known:
                _unlink_old(file, older_than_s)
        for tag, identity in known.items():
            # In another pid namespace of this boot it may well live.
            over = identity.boot != boot_id() or (identity.here and not identity.alive)
            if over and _unlink_old(self._file(tag), older_than_s):
                self.remove(tag)

    def bury(self, record: Record, how: str) -> None:
        """Forget a process that has ended, and note how."""
        self.remove(record.tag)
        death = Death(record.role, record.place, time.monotonic(), record.identity.boot, how[:2000], record.pid)
        file = self.folder / "deaths.jsonl"
        with contextlib.suppress(OSError):
            if file.exists() and file.stat().st_size > _DEATHS_BYTES:
                lines = file.read_text(errors="replace").splitlines(keepends=True)
                replace_private(file, "".join(lines[len(lines) // 2 :]))
            with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as out:
                out.write(json.dumps(asdict(death)) + "\n")

    def deaths(self) -> list[Death]:
        """The newest deaths, oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.folder / "deaths.jsonl").read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    found.append(Death(**json.loads(line)))
        return found

    def condemn(self, place: str, why: str) -> None:
        """Nothing more is started at that place, until `pardon`."""
        with contextlib.suppress(OSError):
            replace_private(self.folder / "unfit.json", json.dumps({**self.unfit(), place: why}))

    def pardon(self, place: str) -> None:
        """The place may be used again."""
        left = {other: why for other, why in self.unfit().items() if other != place}
        with contextlib.suppress(OSError):
            replace_private(self.folder / "unfit.json", json.dumps(left))

    def unfit(self) -> dict[str, str]:
        """Why nothing may be started there, by place."""
        try:
            raw = json.loads((self.folder / "unfit.json").read_text())
        except (OSError, ValueError):
            return {}
        return {str(place): str(why) for place, why in raw.items()} if isinstance(raw, dict) else {}

    def _file(self, tag: str) -> Path:
        return self.folder / f"{tag}.json"

    def _complain(self, error: OSError) -> None:
        if not self._told:
            log.warning("%s cannot be written (%s): the watchdog will not see this process", self.folder, error)
        self._told = True


def registry_folder(env: Mapping[str, str] | None = None) -> Path:
    """Where this host's records are; the name has the host in it, since a home may be shared by several."""
    host = "".join(char if char.isalnum() or char in "-." else "_" for char in socket.gethostname())
    return state_dir(env) / "processes" / host


def describe(
    pid: int, tag: str, registration: Registration, env: Mapping[str, str], log_file: str = ""
) -> Record | None:
    """The record of a child of ours that was just started with that environment; None if it is gone already."""
    identity = Identity.of(pid)
    if identity is None:
        return None
    named = env.get("CLAWQ_BROKER_URL", ""), env.get("CLAWQ_DATA_URL", "")
    return Record(
        tag=tag,
        identity=identity,
        role=registration.role,
        place=registration.place,
        parent=Identity.of(os.getpid()),
        run=registration.run or env.get(RUN_VARIABLE, ""),
        log=log_file,
        limits=registration.limits,
        urls=registration.urls if registration.urls[1] else named,
        facts=registration.facts,
    )


def enrol(registration: Registration, parent: int | None = None) -> Record | None:
    """Register this process itself, and show its progress from now on; taken back when it ends in order.

    For what a user starts, and for what was forked (`parent`: its pid). One that clawq started has a record: that one
    is completed.
    """
    registry = Registry()
    known = None if parent is not None else registry.get(os.environ.get(TAG_VARIABLE, "-"))
    me = Identity.of(os.getpid())
    if me is None:
        return None
    if known is not None and known.identity == me:
        merged = replace(
            known,
            role=registration.role,
            place=registration.place or known.place,
            limits={**known.limits, **registration.limits},
            facts={**known.facts, **registration.facts},
            urls=registration.urls if registration.urls[1] else known.urls,
            run=registration.run or known.run,
        )
        registry.add(merged)
        return merged
    tag = secrets.token_hex(16)
    registry.sweep()
    path = registry.prepare(tag)
    if path is None:
        return None
    record = Record(
        tag=tag,
        identity=me,
        role=registration.role,
        place=registration.place,
        parent=None if parent is None else Identity.of(parent),
        run=registration.run or os.environ.get(RUN_VARIABLE, ""),
        limits=registration.limits,
        urls=registration.urls,
        facts=registration.facts,
        inherited=False,
    )
    registry.add(record)
    with contextlib.suppress(OSError):
        progress.use(path)
    with contextlib.suppress(AttributeError, ValueError):
        # As in `clawq.spawning.launch`: whoever ends us can first see where we hang.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    atexit.register(_leave, registry, record)
    return record


def _leave(registry: Registry, record: Record) -> None:
    # A forked child has our list of things to do at the end.
    if os.getpid() == record.pid:
        registry.remove(record.tag)


def carriers(pids: Mapping[int, Mapping[str, str]], tag: str) -> list[int]:
    """Those of these processes (environments by pid) that carry that tag."""
    return [pid for pid, env in pids.items() if env.get(TAG_VARIABLE) == tag]


def environments(pids: Iterable[int]) -> dict[int, dict[str, str]]:
    """The environments that may be read, by pid."""
    found = ((pid, environ(pid)) for pid in pids)
    return {pid: env for pid, env in found if env is not None}


def _unlink_old(file: Path, older_than_s: float) -> bool:
    """Remove a file that was last written so long ago; whether it was."""
    with contextlib.suppress(OSError):
        if time.time() - file.stat().st_mtime > older_than_s:
            file.unlink()
            return True
    return False


def _read(file: Path) -> Record | None:
    try:
        return Record.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


__all__ = [
    "ENDED_IN_ORDER",
    "RUN_VARIABLE",
    "TAG_VARIABLE",
    "Death",
    "Record",
    "Registration",
    "Registry",
    "carriers",
    "describe",
    "enrol",
    "environments",
    "registry_folder",
]
