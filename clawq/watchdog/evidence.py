"""What is kept of a process before it is ended: a small folder for people, and the last words for the run's events.

    <registry>/reports/<time>-<role>-<pid>/
        decision.json   what was decided, by which numbers, about whom
        stack.txt       where it was: py-spy's dump if that is installed (it reads even a stopped process), and what
                        faulthandler wrote when it was sent SIGUSR1 (in C, so a loop that never lets go of the
                        interpreter's lock does not stop it)
        proc.txt        what the kernel says: state, wait channel, threads, children
        log.txt         the end of its log
        events.json     the last events of its run

The newest REPORTS are kept. Nothing here may fail: a report that cannot be written is no reason to let a process hang.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from clawq.procfs import catches, command_line
from clawq.registry import Record
from clawq.watchdog.snapshot import Decision

#: Reports that are kept.
REPORTS = 50
#: How long a process has for writing its stacks, and py-spy for reading them, seconds.
STACK_S, PY_SPY_S = 1.0, 5.0
_TAIL_BYTES = 60_000


def save(folder: Path, decision: Decision, record: Record, pidfd: int | None, events: list[object]) -> Path | None:
    """Write the report of a process that still lives (`pidfd`) or not (None); returns its folder, None if it failed."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{record.role}-{record.pid}"
    report = folder / "reports" / name
    try:
        report.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A record names its Redis, perhaps with a password: that stays out of what is shown around.
        who = {key: value for key, value in asdict(record).items() if key != "urls"}
        facts = {"kind": decision.kind, "why": decision.why, "evidence": dict(decision.evidence), "process": who}
        (report / "decision.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
        (report / "events.json").write_text(json.dumps(events, indent=2, default=str) + "\n")
        if pidfd is not None:
            (report / "proc.txt").write_text(_kernel(record.pid))
            (report / "stack.txt").write_text(_stacks(record, pidfd))
        (report / "log.txt").write_text(log_tail(record))
    except OSError:
        return None
    _drop_old(report.parent)
    return report


def log_tail(record: Record, size: int = _TAIL_BYTES) -> str:
    """The end of its log; empty if it has none."""
    return _read_from(Path(record.log), -size) if record.log else ""


def _stacks(record: Record, pidfd: int) -> str:
    parts = []
    spy = shutil.which("py-spy")
    if spy is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(record.pid)],
                capture_output=True,
                text=True,
                timeout=PY_SPY_S,
                check=False,
            )
            parts.append(f"py-spy (status {done.returncode}):\n{done.stdout}{done.stderr}")
    # One that has no handler would be ended by it.
    if record.log and catches(record.pid, signal.SIGUSR1):
        parts.append(f"faulthandler:\n{_faulthandler(Path(record.log), pidfd)}")
    return "\n".join(parts) or "there is no py-spy here, and the process handles no SIGUSR1\n"


def _faulthandler(log: Path, pidfd: int) -> str:
    """Ask for the stacks and wait until the log stops growing. A stopped process must go on for that (it is fenced)."""
    begin = _size(log)
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    deadline, size = time.monotonic() + STACK_S, begin
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if size > begin and _size(log) == size:
            break
        size = _size(log)
    return _read_from(log, begin)


def _kernel(pid: int) -> str:
    parts = [command_line(pid)]
    for name in ("status", "wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            parts.append(f"--- {name}\n{Path(f'/proc/{pid}/{name}').read_text(errors='replace')}")
    with contextlib.suppress(OSError):
        for task in sorted(os.listdir(f"/proc/{pid}/task"))[:200]:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
            parts += [f"child {child}: {command_line(int(child))}" for child in children]
    return "\n".join(parts) + "\n"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, begin: int) -> str:
    """The text from that place on; a negative place counts from the end. Bounded."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end + begin) if begin < 0 else min(begin, end))
            return file.read(4 * _TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _drop_old(folder: Path) -> None:
    for old in sorted(folder.iterdir())[:-REPORTS]:
        shutil.rmtree(old, ignore_errors=True)


__all__ = ["REPORTS", "log_tail", "save"]
