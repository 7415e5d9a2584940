"""What a worker knows from its own host: where Redis is, which runs it serves, where logs go.

Nothing here comes over the wire. The environment variables are

    CLAWQ_BROKER_URL, CLAWQ_DATA_URL   the two servers; else the host's state file (clawq.state)
    CLAWQ_RUNS                         comma-separated run ids to serve; default: all runs
    CLAWQ_LOG_DIR                      logs of actors; default: `logs` in the state folder
    CLAWQ_ACTOR_THREADS                torch and BLAS threads of one actor; default: what the run says, else 1
    CLAWQ_REMOTE_CONTROL               `1` switches Celery's remote control and events on (Flower)
    CLAWQ_REDIS_SECURITY, CLAWQ_REDIS_CA, CLAWQ_SIGNING_KEY_FILE   see clawq.transport.urls and clawq.transport.signing
    CLAWQ_LOG_LEVEL                    how much its actors and programs log; default: INFO and WARNING
    CLAWQ_STALL_TIMEOUT_S              seconds without an env step after which an actor counts as hung; default: what
                                       the run says (watchdog.step_s)
    CLAWQ_WORKER_STALL_S               seconds in which a worker's own loop does not turn; default: 60
    CLAWQ_TASK_GRACE_S                 how long a worker that ends waits for a task of a plugin, seconds; default: 60
    CLAWQ_ACTOR_MEMORY_MB              private memory of an actor above which it is recycled; default: as the run says
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clawq.errors import StoreUnavailable, UserError
from clawq.spawning.logfile import log_level
from clawq.state import named_urls, resolve_urls, state_dir
from clawq.transport.client import check_server, connect
from clawq.transport.rights import ROLES
from clawq.transport.signing import host_seal
from clawq.transport.urls import user_of

#: How long a server has to say that it can be used, seconds.
CHECK_S = 2.0
#: A name in a Redis key may have 128 characters; a claim's has a word before the slot's.
_LONGEST_SLOT = 120

#: A worker with only clawq's own tasks is gone so long after the first signal, seconds.
SHUTDOWN_S = 4.5
#: No actor does with less private memory: interpreter, numpy, torch.
LEAST_MEMORY_MB = 64


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The host's own configuration of a worker.

    Attributes:
        broker_url: Celery and the run specs; None if nothing names one.
        data_url: streams, weights, events.
        runs: run ids to serve; None = all.
        log_folder: where logs of actors and programs go.
        actor_threads: threads of one actor; None = what the run says.
        remote_control: Celery's remote control and events.
        stall_s: seconds without an env step after which an actor counts as hung; None = what the run says.
        worker_stall_s: seconds in which a worker's own loop does not turn, after which it counts as hung.
        task_grace_s: how long a worker that ends waits for a task of a plugin, seconds.
        actor_memory_mb: private memory of an actor above which it is recycled; None = what the run says.
        announced: the URLs are those of servers that were started on this host, from its state file.
    """

    broker_url: str | None
    data_url: str | None
    runs: frozenset[str] | None
    log_folder: Path
    actor_threads: int | None
    remote_control: bool
    stall_s: float | None
    worker_stall_s: float
    task_grace_s: float = 60.0
    actor_memory_mb: int | None = None
    announced: bool = False

    @classmethod
    def from_host(cls, env: Mapping[str, str] | None = None) -> "HostSettings":
        """Read environment and state file. Raises UserError for a value that cannot be understood."""
        env = os.environ if env is None else env
        # Used by what a worker starts, told where people look.
        log_level("INFO", env)
        urls = resolve_urls(env=env)
        runs = frozenset(name.strip() for name in env.get("CLAWQ_RUNS", "").split(",") if name.strip())
        log_dir = env.get("CLAWQ_LOG_DIR")
        threads, stall = env.get("CLAWQ_ACTOR_THREADS"), env.get("CLAWQ_STALL_TIMEOUT_S")
        memory = env.get("CLAWQ_ACTOR_MEMORY_MB")
        return cls(
            broker_url=urls[0] if urls else None,
            data_url=urls[1] if urls else None,
            runs=runs or None,
            log_folder=Path(log_dir) if log_dir else state_dir(env) / "logs",
            actor_threads=_count("CLAWQ_ACTOR_THREADS", threads) if threads else None,
            remote_control=env.get("CLAWQ_REMOTE_CONTROL", "") in ("1", "true", "yes", "on"),
            stall_s=_positive("CLAWQ_STALL_TIMEOUT_S", stall) if stall else None,
            worker_stall_s=_positive("CLAWQ_WORKER_STALL_S", env.get("CLAWQ_WORKER_STALL_S", "60")),
            task_grace_s=_positive("CLAWQ_TASK_GRACE_S", env.get("CLAWQ_TASK_GRACE_S", "60")),
            actor_memory_mb=_count("CLAWQ_ACTOR_MEMORY_MB", memory, LEAST_MEMORY_MB) if memory else None,
            announced=named_urls(env=env) is None,
        )

    @property
    def place(self) -> str:
        """What the names of this worker's slots begin with: its ACL user, who may write no others; else the host."""
        user = user_of(self.data_url) if self.data_url else None
        return host_name() if user is None or user in ROLES else user

    def require_urls(self) -> tuple[str, str]:
        """(broker_url, data_url), or UserError that says how to name them."""
        if self.broker_url is None or self.data_url is None:
            raise UserError(
                "no Redis is known on this machine. Start a run here with `clawq up`, start servers with "
                "`clawq redis start`, or set CLAWQ_BROKER_URL and CLAWQ_DATA_URL to servers elsewhere."
            )
        return self.broker_url, self.data_url

    def check_servers(self) -> list[str]:
        """Look whether this host's key and both servers can be used, before Celery tries again and again.

        Returns:
            what is away now, in words; that may be waited for.

        Raises:
            UserError: no Redis is known, or the key file cannot be used.
            StoreUnfit: a server cannot be used, and waiting would not help.
        """
        host_seal()
        away = []
        for role, url in zip(("broker", "data"), self.require_urls(), strict=True):
            client = connect(url, CHECK_S)
            try:
                check_server(client, role)
            except StoreUnavailable as error:
                away.append(str(error))
            finally:
                client.close()
        return away


def slot_name(worker: str, index: int, place: str | None = None) -> str:
    """`<place>-<worker>-<index>` with only what may stand in a Redis key and a file name.

    Args:
        worker: its name on its host.
        index: of the slot.
        place: what comes first (`HostSettings.place`); None = this host.
    """
    first = f"{place or host_name()}-"
    text = first + f"{worker}-{index}"[-(_LONGEST_SLOT - len(first)) :]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-") or f"slot-{index}"


def host_name() -> str:
    """This host, without its domain."""
    return socket.gethostname().partition(".")[0][:64]


def worker_name(nodename: str, pid: int) -> str:
    """The name of a Celery worker on its host, from `name@host`.

    A bare `celery worker` is always called `celery`; its pid is added, so that two of them do not fight over slots.
    """
    name = nodename.partition("@")[0] or "worker"
    return f"celery{pid}" if name == "celery" else name


def _count(variable: str, text: str, least: int = 1) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise UserError(f"{variable}={text!r} is not a whole number of at least {least}")
    return int(text)


def _positive(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UserError(f"{variable}={text!r} is not a number larger than 0")
    return value


__all__ = ["LEAST_MEMORY_MB", "SHUTDOWN_S", "HostSettings", "slot_name", "worker_name"]
