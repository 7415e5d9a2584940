"""Looks at a running household of clawq from outside, every few seconds: what `ops/bench/soak.py` judges.

Processes are found in the registry of the state folder, so that a replaced one is followed; what comes and goes by
itself (evaluations and the like) is left out. Of a role that several processes fill (actors) the sum is taken.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from clawq.procfs import rss_mb, uss_mb
from clawq.registry import Record, Registry
from clawq.transport.control import Board
from clawq.transport.keys import RunKeys
from ops.bench.flatness import Series

#: Whose memory, descriptors and threads are looked at.
ROLES = ("up", "learner", "coordinator", "supervisor", "worker", "actor", "watchdog")
#: A change of so much is none: megabytes (a few arenas of the allocator), and one thing more or less.
_MB, _ONE = 1.0, 1.0
#: What ends by itself at a size of its own, not at a flat one; see the modules named there.
_BOUNDS = {
    "events": (11_000.0, "EVENTS_KEPT, 10 000 about (transport/control.py)"),
    "broker file MB": (140.0, "the rewrite of the append-only file at 64 MB and twice its size"),
    "run folder logs MB": (2_400.0, "metrics.jsonl 2 × 1 GB, events 2 × 100 MB, schedule 2 × 64 MB, logs 5 MB each"),
    "state folder MB": (8.0, "deaths.jsonl and the watchdog's audit and reports, each halved at its size"),
}
_LOGS = ("metrics.", "schedule.", "events.out.")


def describe(name: str) -> Series:
    """How the series of that name is judged."""
    bound, by = _BOUNDS.get(name, (None, ""))
    if name.endswith("per s"):
        # On a shared machine these say how much of it we were given; even CPU time is dearer when others compute.
        return Series(name, "1/s", falls=True, told=True)
    if name.startswith("CPU "):
        return Series(name, "us", told=True)
    if name == "stream entries":
        # Streams are bounded in bytes ("streams MB"); what a fragment holds follows the speed of its actor.
        return Series(name, told=True)
    if name.endswith(" RSS MB"):
        # Shared pages count in it: the private ones are judged.
        return Series(name, "MB", grain=_MB)
    return Series(name, grain=_MB if name.endswith("MB") else _ONE, bound=bound, bounded_by=by)


class Sampler:
    """Looks at one run.

    Args:
        broker: client.
        data: client.
        keys: of the run.
        folder: of the run.
        state: the state folder.
        root: the process that was started; all others are below it.
    """

    def __init__(self, broker: Any, data: Any, keys: RunKeys, folder: Path, state: Path, root: int) -> None:
        self._broker, self._data, self._keys = broker, data, keys
        self._folder, self._state, self._root = folder, state, root
        self._board = Board(data, keys)
        host = next((path for path in (state / "processes").iterdir() if path.is_dir()), state)
        self._registry = Registry(host)
        self._cpu: dict[int, tuple[str, float]] = {}
        self._before: tuple[float, float, float] | None = None

    def look(self) -> dict[str, float]:
        """One value for each series."""
        records = [record for record in self._registry.records() if record.role in ROLES and record.identity.alive]
        return {
            **dict(self._servers()),
            **dict(_processes(records, self._root)),
            **dict(self._files()),
            **self._work(records),
        }

    def _servers(self) -> Iterator[tuple[str, float]]:
        for name, client in (("broker", self._broker), ("data", self._data)):
            info = client.info()
            yield f"{name} used MB", info["used_memory"] / 1e6
            yield f"{name} RSS MB", info["used_memory_rss"] / 1e6
            yield f"{name} clients", float(info["connected_clients"])
            yield f"{name} keys", float(client.dbsize())
        keys = self._keys
        lengths = [self._data.xlen(keys.stream(slot.decode())) for slot in self._data.hkeys(keys.slots)]
        yield "stream entries", float(sum(lengths))
        yield "streams", float(len(lengths))
        yield "streams MB", float(self._board.read().get("stored_bytes", 0.0)) / 1e6
        yield "events", float(self._data.xlen(keys.events))

    def _files(self) -> Iterator[tuple[str, float]]:
        logs, rest = (0, 0), (0, 0)
        for file, size in _walk(self._folder):
            if file.name.startswith(_LOGS) or file.parent.name == "logs":
                logs = (logs[0] + 1, logs[1] + size)
            else:
                rest = (rest[0] + 1, rest[1] + size)
        yield "run folder files", float(rest[0] + logs[0])
        yield "run folder MB", rest[1] / 1e6
        yield "run folder logs MB", logs[1] / 1e6
        broker = {file: size for file, size in _walk(self._state) if "broker.aof" in file.name}
        others = [size for file, size in _walk(self._state) if file not in broker]
        yield "broker file MB", sum(broker.values()) / 1e6
        yield "state folder files", float(len(others))
        yield "state folder MB", sum(others) / 1e6

    def _work(self, records: list[Record]) -> dict[str, float]:
        """Rates since the last look by the run's own clock, and what they took of CPU time."""
        board = self._board.read()
        wall_s, steps, updates = (float(board.get(name, 0.0)) for name in ("wall_s", "env_steps", "updates"))
        cpu = {record.pid: (record.role, _cpu_s(record.pid)) for record in records}
        used_s = dict.fromkeys(ROLES, 0.0)
        for pid, (role, now_s) in cpu.items():
            used_s[role] += now_s - self._cpu.get(pid, (role, now_s))[1]
        before, self._before, self._cpu = self._before, (wall_s, steps, updates), cpu
        if before is None or wall_s <= before[0]:
            return {}
        span_s, steps, updates = (now - then for now, then in zip(self._before, before, strict=True))
        return {
            "env steps per s": steps / span_s,
            "updates per s": updates / span_s,
            **({"CPU us of actors per env step": 1e6 * used_s["actor"] / steps} if steps else {}),
            **({"CPU us of learner per update": 1e6 * used_s["learner"] / updates} if updates else {}),
        }


def _processes(records: list[Record], root: int) -> Iterator[tuple[str, float]]:
    sums: Counter[str] = Counter()
    for record in records:
        role, pid = record.role, record.pid
        seen = {
            "RSS MB": rss_mb(pid),
            "USS MB": uss_mb(pid),
            "files open": _entries(pid, "fd"),
            "threads": _entries(pid, "task"),
        }
        if all(value is not None for value in seen.values()):
            sums.update({f"{role} {name}": value for name, value in seen.items() if value is not None})
            sums[f"{role} processes"] += 1
    yield from sums.items()
    yield "zombies", float(sum(_is_zombie(child) for child in psutil.Process(root).children(recursive=True)))


def _entries(pid: int, what: str) -> float | None:
    try:
        return float(len(os.listdir(f"/proc/{pid}/{what}")))
    except OSError:
        return None


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    except psutil.Error:
        return 0.0


def _walk(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path, path.stat().st_size
        except OSError:
            continue


__all__ = ["ROLES", "Sampler", "describe"]
