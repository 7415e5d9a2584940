"""A Redis of a test's own, in a process of its own, that can be killed, stopped, filled and started again."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clawq.errors import TransportError
from clawq.transport.client import connect, translated
from clawq.transport.server import find_server


class RedisProcess:
    """One server; it runs as soon as it is made.

    Args:
        folder: for its log and its append-only file; made if missing.
        aof: keeps what it has over a kill.
        memory_mb: its maxmemory.
        tcp: listens on the loopback interface, so that a `Wire` can stand before it; else on a unix socket.
        env: beside that of this process.

    Attributes:
        url: for clients.
        port: 0 for a unix socket.
        process: the one that runs, or ran last.
        restarts: how often it was started after the first time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        aof: bool,
        memory_mb: int = 64,
        tcp: bool = True,
        env: Mapping[str, str] | None = None,
        bind: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._aof, self._memory_mb, self._env = folder, aof, memory_mb, {**os.environ, **(env or {})}
        self._bind = bind
        self._sockets = None if tcp else Path(tempfile.mkdtemp(prefix="clawq-own-", dir="/tmp"))
        self.port, self.restarts = _free_port() if tcp else 0, -1
        self.url = f"redis://127.0.0.1:{self.port}/0" if tcp else f"unix://{self._sockets}/s?db=0"
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        """Start it (again) at the same URL, and wait until it answers."""
        words = [str(find_server().path), "--port", str(self.port), "--bind", "127.0.0.1", *self._bind, "--save", ""]
        words += ["--unixsocket", str(self._sockets / "s")] if self._sockets else []
        words += ["--dir", str(self._folder), "--logfile", str(self._folder / "redis.log")]
        words += [
            "--protected-mode",
            "no",
            "--appendonly",
            "yes" if self._aof else "no",
            "--maxmemory-policy",
            "noeviction",
        ]
        words += ["--maxmemory", f"{self._memory_mb}mb", "--client-output-buffer-limit", "normal 256mb 128mb 30"]
        self.process = subprocess.Popen(words, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.restarts += 1
        deadline_s = time.monotonic() + 60.0
        while True:
            try:
                self.ask("PING")
                return self.process
            except TransportError:
                pass
            assert self.process.poll() is None, f"it ended while starting:\n{(self._folder / 'redis.log').read_text()}"
            assert time.monotonic() < deadline_s, "the server did not start"
            time.sleep(0.02)

    def ask(self, *words: Any) -> Any:
        """Send one command, past every wire."""
        client: Any = connect(self.url, timeout_s=5.0)
        try:
            with translated(client):
                return client.execute_command(*words)
        finally:
            client.close()

    def stall(self) -> None:
        """Stop it (SIGSTOP): connections stay, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `stall`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, also if it is stopped."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it for good."""
        self.kill()
        if self._sockets:
            shutil.rmtree(self._sockets, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
