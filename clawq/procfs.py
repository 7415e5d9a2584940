"""What the kernel says about processes (Linux), and who a process is for good.

A pid is a number that will be used again. `Identity` adds boot, pid namespace, start time in clock ticks and user: no
later process has the same one, whatever clocks do. Between looking and signalling a pid can still change hands, so a
signal goes through a pidfd that was opened before the identity was compared (`open_if`).

A process of another user shows little; what cannot be read is None, and counts as not ours.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

#: The pid namespace of the machine itself, as Linux numbers it; every container has another one.
HOST_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True, slots=True)
class Stat:
    """Some of /proc/PID/stat.

    Attributes:
        state: one letter: R, S, D, T, t, Z, X or I.
        ppid: of the parent.
        session: id of the session, which is the pid of its leader.
        start_ticks: when it started, clock ticks since boot.
    """

    state: str
    ppid: int
    session: int
    start_ticks: int


def parse_stat(text: str) -> Stat:
    """Parse a line of /proc/PID/stat. The command name may hold anything, brackets too: only the last one ends it."""
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def read_stat(pid: int) -> Stat | None:
    """The state of a process; None if there is none."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None


@cache
def boot_id() -> str:
    """What the kernel calls this boot; empty where it does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> int:
    """The namespace in which our pids count; 0 where there is none, or where /proc shows the pids of another one."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return os.stat("/proc/self/ns/pid").st_ino
    return 0


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, and no other one ever."""

    boot: str
    namespace: int
    pid: int
    start_ticks: int
    uid: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has that pid now (in our namespace); None if there is none."""
        stat = read_stat(pid)
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return None
        return None if stat is None else cls(boot_id(), pid_namespace(), pid, stat.start_ticks, uid)

    @property
    def here(self) -> bool:
        """Whether its pid counts among ours: same boot, same namespace."""
        return self.boot == boot_id() and self.namespace == pid_namespace()

    @property
    def stat(self) -> Stat | None:
        """Its state; None if it is gone, whoever has its pid now."""
        stat = read_stat(self.pid) if self.here else None
        return stat if stat is not None and stat.start_ticks == self.start_ticks else None

    @property
    def alive(self) -> bool:
        """Whether it can still do something; a zombie cannot."""
        stat = self.stat
        return stat is not None and stat.state not in "ZX"

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """Inverse of `dataclasses.asdict`."""
        return cls(str(raw["boot"]), *(int(raw[name]) for name in ("namespace", "pid", "start_ticks", "uid")))


def open_if(identity: Identity) -> int | None:
    """A pidfd of that very process, None if it is gone; the caller closes it. It cannot come to mean another one."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    if Identity.of(identity.pid) == identity:
        return pidfd
    os.close(pidfd)
    return None


def environ(pid: int) -> dict[str, str] | None:
    """The environment with which it was exec'ed; None if we may not read it or it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def own_pids() -> Iterator[int]:
    """The processes of our user, this one left out."""
    me, uid = os.getpid(), os.getuid()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != me and entry.stat().st_uid == uid:
                yield int(entry.name)


def ancestors(pid: int) -> frozenset[int]:
    """Pids from the parent of `pid` up to the first process."""
    found: set[int] = set()
    while (stat := read_stat(pid)) is not None and stat.ppid > 0 and stat.ppid not in found:
        found.add(pid := stat.ppid)
    return frozenset(found)


def rss_mb(pid: int) -> float | None:
    """Resident memory, shared pages too; cheap."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return None


def uss_mb(pid: int) -> float | None:
    """Memory that would be free if it ended: pages it shares with nobody. The kernel walks them all: some 10 ms."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6
    return None


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler for that signal, so that the signal does not end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def command_line(pid: int) -> str:
    """Its words, for people."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


__all__ = [
    "HOST_NAMESPACE",
    "Identity",
    "Stat",
    "ancestors",
    "boot_id",
    "catches",
    "command_line",
    "environ",
    "open_if",
    "own_pids",
    "parse_stat",
    "pid_namespace",
    "read_stat",
    "rss_mb",
    "uss_mb",
]
