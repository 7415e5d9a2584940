"""Child processes: exec'ed by one thread that lives as long as the process, and ended with everything they started.

`Spawner` has the one thread. The parent-death signal of Linux follows the thread that created a child, so a child
spawned by a pool thread would be killed when that thread ends; this thread never ends. Children are exec'ed through
`clawq.spawning.launch`, never forked with our memory; each gets a session of its own, a unique tag in its environment
(inherited by whatever it starts), a log file, and optionally a control socket. It stands in the host's registry of
processes (`clawq.registry`) from before its program begins until it was reaped, so that the watchdog knows it.

`Child.end_tree` ends the whole tree: the session (while the leader is not yet reaped, so that its id cannot be a
stranger's), then whoever carries the tag, found by /proc and signalled through a pidfd. Only processes with our own
unique tag are ever touched. A child that is blocked in the kernel may survive SIGKILL for a while; `end_tree` says so.
"""

import contextlib
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from clawq.progress import PROGRESS_VARIABLE
from clawq.registry import ENDED_IN_ORDER, TAG_VARIABLE, Record, Registration, Registry, describe
from clawq.spawning.failure import oom_kills
from clawq.spawning.launch import PARENT_VARIABLE, RELEASE_VARIABLE
from clawq.spawning.logfile import LogFile

#: Environment variable with the file descriptor of the control socket.
CONTROL_FD_VARIABLE = "CLAWQ_CONTROL_FD"
#: How long a killed process may take to be dead, seconds.
DEATH_S = 2.0
#: How often the logs of living children are brought under their bounds, seconds.
TRIM_S = 5.0


class Child:
    """One exec'ed process and all that it starts.

    Attributes:
        pid: of the leader; not reaped (so not reused) until `end_tree` returns.
        tag: 128-bit tag in the environment of the tree.
        control: our end of the control socket, or None.
        log: its log.
        ooms: processes that the kernel had killed for memory when it was started (see `clawq.spawning.failure`).
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        tag: str,
        control: socket.socket | None,
        log: LogFile,
        record: Record | None = None,
    ) -> None:
        self._process = process
        self._record = record
        self.pid = process.pid
        self.tag = tag
        self.control = control
        self.log = log
        self.ooms = oom_kills()
        self.stdin = process.stdin
        self.stdout = process.stdout

    def exited(self) -> bool:
        """Whether the leader has ended. It stays a zombie, so that its pid stays ours."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait for the leader to end; whether it did."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.002
        while not self.exited():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        return True

    def terminate(self) -> None:
        """SIGTERM to the leader, if it has not ended."""
        if not self.exited():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Ask a hung leader for the stacks of its threads (they go to its log)."""
        if not self.exited():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGUSR1)
                self.wait_exit(0.3)

    def kill_session(self) -> None:
        """SIGKILL to the leader's session; safe in a signal handler."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def end_tree(self, grace_s: float = 0.0, why: str = "") -> int:
        """End leader and descendants. Idempotent. `why` is noted as the cause of its death.

        With a grace the leader is first told by the end of its control socket and stdin, and has `grace_s` to end by
        itself; then SIGKILL.

        Returns:
            The leader's exit status (negative: the signal), or -999 if it survives SIGKILL (blocked in the kernel).
        """
        if self._process.returncode is not None:
            return self._process.returncode
        if grace_s > 0:
            self._close(self.control, self.stdin)
            self.wait_exit(grace_s)
        by_itself = self.exited()
        self.kill_session()
        kill_tagged(TAG_VARIABLE, self.tag)
        self._close(self.control, self.stdin, self.stdout)
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return -999
        if self._record is not None:
            Registry().bury(self._record, why or self._how(status, by_itself))
        return status

    def _how(self, status: int, by_itself: bool) -> str:
        if status == 0 or not by_itself:
            return ENDED_IN_ORDER
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}\n{self.log.tail(5)}".rstrip()

    @staticmethod
    def _close(*pipes: "socket.socket | IO[bytes] | None") -> None:
        for pipe in pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def kill_tagged(variable: str, value: str) -> int:
    """SIGKILL every process of ours with `variable=value` in its environment; returns how many there were.

    A pidfd is opened before the environment is read, so the signal cannot reach a process that took over the pid. They
    are dead on return, unless one is blocked in the kernel for longer than DEATH_S.
    """
    if not Path("/proc/self/environ").exists():
        return 0
    wanted = f"{variable}={value}".encode()
    killed: list[int] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            pidfd = os.pidfd_open(int(entry.name))
            try:
                if wanted in Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed.append(os.dup(pidfd))
            finally:
                os.close(pidfd)
    deadline = time.monotonic() + DEATH_S
    for pidfd in killed:
        wait_readable([pidfd], deadline - time.monotonic())
        os.close(pidfd)
    return len(killed)


class Spawner:
    """Starts children from one long-lived thread, which also keeps their logs under their bounds.

    Args:
        trim_s: how often it looks at the logs.
    """

    def __init__(self, trim_s: float = TRIM_S) -> None:
        self._trim_s = trim_s
        self._orders: queue.SimpleQueue[tuple[Callable[[], Child], Future[Child]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="clawq-spawner", daemon=True).start()

    def spawn(
        self,
        program: str | Sequence[str],
        log: LogFile,
        env: Mapping[str, str] | None = None,
        *,
        control: bool = False,
        pipes: bool = False,
        registration: Registration | None = None,
    ) -> Child:
        """Start a child and return it.

        Args:
            program: a Python module, or a module and its arguments; it is run by this interpreter.
            log: where its stderr (and stdout, unless `pipes`) goes.
            env: variables beside our own environment.
            control: give it a control socket (CLAWQ_CONTROL_FD).
            pipes: give it pipes as stdin and stdout.
            registration: what the watchdog shall know of it.

        Raises:
            OSError: the system cannot start another process.
        """
        words = [program] if isinstance(program, str) else list(program)
        answer: Future[Child] = Future()
        known = registration or Registration()
        self._orders.put((lambda: _start(words, log, env or {}, control, pipes, known), answer))
        return answer.result(timeout=60.0)

    def _serve(self) -> None:
        living: list[Child] = []
        trimmed_at = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                order, answer = self._orders.get(timeout=self._trim_s if living else None)
                try:
                    child = order()
                    living.append(child)
                    answer.set_result(child)
                # Whatever went wrong belongs to the caller; this thread must live on.
                except BaseException as error:
                    answer.set_exception(error)
            if time.monotonic() - trimmed_at >= self._trim_s:
                trimmed_at = time.monotonic()
                living = [child for child in living if not child.exited()]
                for child in living:
                    child.log.trim()


def _start(
    words: list[str], log: LogFile, env: Mapping[str, str], control: bool, pipes: bool, registration: Registration
) -> Child:
    tag, registry = secrets.token_hex(16), Registry()
    variables = {**os.environ, **env, TAG_VARIABLE: tag, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    variables.pop(PROGRESS_VARIABLE, None)
    if (shown := registry.prepare(tag)) is not None:
        variables[PROGRESS_VARIABLE] = str(shown)
    ours, theirs = socket.socketpair() if control else (None, None)
    if theirs is not None:
        variables[CONTROL_FD_VARIABLE] = str(theirs.fileno())
    held, release = os.pipe()
    variables[RELEASE_VARIABLE] = str(held)
    log_fd = log.open()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "clawq.spawning.launch", *words],
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else log_fd,
            stderr=log_fd,
            pass_fds=(held,) if theirs is None else (held, theirs.fileno()),
            env=variables,
            start_new_session=True,
            # Unbuffered: a buffer's lock would make closing wait for a writer that is stuck.
            bufsize=0,
        )
        record = describe(process.pid, tag, registration, variables, _where(log))
        if record is not None:
            registry.add(record)
        os.write(release, b"\1")
    except BaseException:
        registry.remove(tag)
        if ours is not None:
            ours.close()
        raise
    finally:
        for fd in (log_fd, held, release):
            os.close(fd)
        if theirs is not None:
            theirs.close()
    return Child(process, tag, ours, log, record)


def _where(log: LogFile) -> str:
    return "" if log.path == Path(os.devnull) else str(log.path)


def wait_readable(fds: Sequence[int], timeout_s: float) -> list[int]:
    """The descriptors that can be read, after at most `timeout_s`. Unlike select() it takes any descriptor number."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000.0)]


__all__ = ["CONTROL_FD_VARIABLE", "TAG_VARIABLE", "Child", "Spawner", "kill_tagged", "wait_readable"]
