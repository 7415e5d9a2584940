"""The host's state file: where the Redis that clawq started on this machine is.

`clawq up` and `clawq redis start` write it, so that workers, `clawq status` and a bare `celery worker` on the same
machine find Redis without being told a URL. It names its owner by boot, pid and start time of the process; when that
process is gone the file counts for nothing, so a crash leaves no lie behind, and a reused pid is not taken for it.

The file is readable by its user only, since a URL may hold a password. Its name has the host name in it: a home
directory shared by several machines works.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from clawq.errors import UserError
from clawq.json_text import parse_json
from clawq.procfs import boot_id, read_stat

if TYPE_CHECKING:
    from clawq.config import Redis

log = logging.getLogger(__name__)

#: What stands for a password in a URL that is shown.
HIDDEN = "***"


def state_dir(env: Mapping[str, str] | None = None) -> Path:
    """CLAWQ_STATE_DIR, else XDG_STATE_HOME/clawq, else ~/.local/state/clawq. It need not exist."""
    env = os.environ if env is None else env
    if chosen := env.get("CLAWQ_STATE_DIR"):
        return Path(chosen).expanduser()
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "clawq"


@dataclass(frozen=True, slots=True)
class ServerState:
    """The two servers of this host and the process that owns them.

    Attributes:
        broker_url: Celery and the run specs.
        data_url: streams, weights, control record.
        pid: process whose end ends the servers.
        started: start of that process, in a form that a reused pid cannot have (see `process_start`).
        written_s: wall clock, for people.
        owner: what that process is: `redis` for `clawq redis start`, else in words, as `run hand-reach-s0`.
    """

    broker_url: str
    data_url: str
    pid: int
    started: str
    written_s: float
    owner: str = "redis"

    @classmethod
    def of(cls, broker_url: str, data_url: str, pid: int | None = None, owner: str = "redis") -> Self:
        """The state of servers owned by `pid` (this process if None). Raises ProcessLookupError if it is gone."""
        pid = os.getpid() if pid is None else pid
        started = process_start(pid)
        if started is None:
            raise ProcessLookupError(pid)
        return cls(broker_url, data_url, pid, started, time.time(), owner)

    @property
    def alive(self) -> bool:
        """Whether the owner still runs."""
        return process_start(self.pid) == self.started

    def write(self, folder: Path | None = None) -> Path:
        """Announce these servers.

        Raises UserError while another live process has its servers announced; ours may be written again.
        """
        folder = state_dir() if folder is None else folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder):
            other = self.read(folder)
            if other is not None and (other.pid, other.started) != (self.pid, self.started):
                raise UserError(
                    f"clawq's Redis already runs on this machine (process {other.pid}, {other.owner}); "
                    "use it, or stop it with `clawq redis stop` or by ending that run"
                )
            return replace_private(_file(folder), json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path | None = None) -> Self | None:
        """What is announced on this host, or None if nothing is, or its owner is gone."""
        try:
            state = cls(**parse_json(_file(state_dir() if folder is None else folder).read_text()))
        except (OSError, ValueError, TypeError):
            # Missing, torn or of another version: then there is no server to find here.
            return None
        return state if state.alive else None

    @classmethod
    def forget(cls, folder: Path | None = None, pid: int | None = None) -> None:
        """Take the file away if `pid` (this process if None) owns it, or its owner is gone. Idempotent."""
        folder = state_dir() if folder is None else folder
        if not folder.is_dir():
            return
        with _locked(folder):
            state = cls.read(folder)
            if state is None or state.pid == (os.getpid() if pid is None else pid):
                _file(folder).unlink(missing_ok=True)


def named_urls(redis: "Redis | None" = None, env: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """(broker_url, data_url) from the configuration, else from CLAWQ_BROKER_URL and CLAWQ_DATA_URL.

    A place that names only one of the two means it for both. None: neither place names any. URLs from a run folder,
    where passwords are not kept, give way to the environment; UserError if that names none.
    """
    env = os.environ if env is None else env
    configured = (redis.broker_url, redis.data_url) if redis is not None else (None, None)
    if any(HIDDEN in url for url in configured if url):
        if not (env.get("CLAWQ_BROKER_URL") or env.get("CLAWQ_DATA_URL")):
            raise UserError(
                "this run's Redis has a password, which a run folder does not keep; set CLAWQ_BROKER_URL and "
                "CLAWQ_DATA_URL to the whole URLs"
            )
        configured = (None, None)
    for broker, data in (configured, (env.get("CLAWQ_BROKER_URL"), env.get("CLAWQ_DATA_URL"))):
        if broker or data:
            return broker or data or "", data or broker or ""
    return None


def resolve_urls(redis: "Redis | None" = None, env: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """`named_urls`, else what the host's state file announces; None: there is no Redis to be found."""
    named = named_urls(redis, env)
    if named is not None:
        return named
    state = ServerState.read(state_dir(env))
    return (state.broker_url, state.data_url) if state is not None else None


def process_start(pid: int) -> str | None:
    """When that process started, as an opaque text that no later process of the same pid has; None if it is gone.

    A zombie counts as gone: it holds its pid, but serves nothing.
    """
    stat = read_stat(pid)
    if stat is None:
        return None if Path("/proc/self/stat").exists() else _portable_start(pid)
    return None if stat.state in "ZX" else f"{boot_id()}:{stat.start_ticks}"


def _portable_start(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None


def _file(folder: Path) -> Path:
    host = "".join(char if char.isalnum() or char in "-." else "_" for char in socket.gethostname())
    return folder / f"redis-{host}.json"


def replace_private(file: Path, text: str) -> Path:
    """Write a file that its user alone may read, so that readers see the old one or the new one; returns it."""
    new = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    new.replace(file)
    return file


def hold(file: Path) -> IO[str] | None:
    """The file, open and held by this process until it is closed; None if another one holds it.

    A file system without locks holds nothing back: then it is ours, whoever else has it. Raises OSError if the file
    cannot be made.
    """
    # flock ends with its holder, so a crash cannot leave the file locked.
    import fcntl

    lock = file.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        log.warning("%s is on a file system without locks; make sure that nobody else uses what it guards", file)
    return lock


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # flock ends with its holder, so a crash cannot leave the file locked.
    import fcntl

    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


__all__ = ["ServerState", "hold", "named_urls", "process_start", "replace_private", "resolve_urls", "state_dir"]
