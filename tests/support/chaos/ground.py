"""What a system under chaos stands on: its two servers, disks, clocks, and the lines between it and them."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import clocks
import namespaces
from disks import may_mount, small_disk
from redis_process import RedisProcess
from wire import Wire


@dataclass(frozen=True, slots=True)
class Setup:
    """What a system is like.

    Attributes:
        workers: how many, named w0, w1, …
        slots: of each.
        aof: whether the data server keeps what it has over a kill.
        memory_mb: of the data server.
        wire: makes the wire of one party to the data server, from its address; None: they connect to it directly.
        overrides: of the configuration, after `LIGHT`.
        watchdog: whether there is one.
        env: of all processes.
        learner_env: of the first learner alone.
        clocks: worker -> seconds by which its wall clock is wrong.
        settable_clock: the data server's can be set (`Ground.set_clock`).
        apart: workers that run in a network namespace of their own (`Ground.namespaces`).
        disks: folder below the system's -> size of the file system of its own that it has, such as `8m`.
    """

    workers: int = 2
    slots: int = 1
    aof: bool = False
    memory_mb: int = 128
    wire: Callable[[tuple[str, int]], Wire] | None = None
    overrides: tuple[str, ...] = ()
    watchdog: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    learner_env: Mapping[str, str] = field(default_factory=dict)
    clocks: Mapping[str, int] = field(default_factory=dict)
    settable_clock: bool = False
    apart: tuple[str, ...] = ()
    disks: Mapping[str, str] = field(default_factory=dict)


#: Two workers with a slot each.
PLAIN = Setup()


class NotHere(Exception):
    """This machine cannot do what a fault needs; the text says what that is."""


class Ground:
    """Servers and lines of one system; they are there as soon as it is made.

    Args:
        folder: for their files; made if missing.
        setup: see Setup.

    Attributes:
        broker, data: the servers.
        sockets: short folder for sockets of the system.
        wires: party -> its wire to the data server.
        namespaces: worker -> its network namespace.
    """

    def __init__(self, folder: Path, setup: Setup) -> None:
        self._folder, self._setup, self._things = folder, setup, ExitStack()
        if setup.settable_clock and not clocks.can_set():
            raise NotHere("setting a server's clock needs libfaketime (apt install libfaketime)")
        if setup.apart and not namespaces.can_make():
            raise NotHere("network namespaces need root, ip and tc")
        if setup.disks and not may_mount():
            raise NotHere("a small file system needs root")
        folder.mkdir(parents=True, exist_ok=True)
        self.sockets = Path(tempfile.mkdtemp(prefix="clawq-chaos-", dir="/tmp"))
        for name, size in setup.disks.items():
            self._things.enter_context(small_disk(folder / name, size))
        self.wires: dict[str, Wire] = {}
        self.namespaces = {name: namespaces.Namespace() for name in setup.apart}
        for one in self.namespaces.values():
            self._things.callback(one.close)
        clock = clocks.settable(folder / "clock") if setup.settable_clock else {}
        sides = [one.address for one in self.namespaces.values()]
        self.broker = RedisProcess(folder / "broker", aof=True, bind=sides)
        self.data = RedisProcess(folder / "data", aof=setup.aof, memory_mb=setup.memory_mb, env=clock, bind=sides)

    def env_of(self, party: str) -> dict[str, str]:
        """What the environment of a worker, or of the `learner`, says of its servers and its clock."""
        env = clocks.shifted(self._setup.clocks[party]) if party in self._setup.clocks else {}
        if party in self.namespaces:
            host = self.namespaces[party].address
            urls = {"BROKER": f"redis://{host}:{self.broker.port}/0", "DATA": f"redis://{host}:{self.data.port}/0"}
            return env | {f"CLAWQ_{name}_URL": url for name, url in urls.items()} | {"CLAWQ_REDIS_SECURITY": "none"}
        return env | {"CLAWQ_BROKER_URL": self.broker.url, "CLAWQ_DATA_URL": self._data_url(party)}

    def prefix_of(self, party: str) -> tuple[str, ...]:
        """Words before its command."""
        return self.namespaces[party].prefix if party in self.namespaces else ()

    def _data_url(self, party: str) -> str:
        if self._setup.wire is None:
            return self.data.url
        if party not in self.wires:
            self.wires[party] = self._setup.wire(("127.0.0.1", self.data.port))
        return f"redis://127.0.0.1:{self.wires[party].port}/0"

    def set_clock(self, seconds: int) -> None:
        """Let the data server's clock be so wrong within a second."""
        clocks.set_clock(self._folder / "clock", seconds)

    def close(self) -> None:
        """End servers and lines; whoever used them must have ended. Idempotent."""
        for wire in self.wires.values():
            wire.close()
        self.broker.close()
        self.data.close()
        clocks.tidy(self.data.process.pid)
        self._things.close()

    def forget_sockets(self) -> list[str]:
        """Take the folder for sockets away; what was still in it."""
        left = [path.name for path in self.sockets.iterdir()] if self.sockets.exists() else []
        shutil.rmtree(self.sockets, ignore_errors=True)
        return left
