"""The watchdog's audit log: one line for each decision: who, evidence, signal, result. Append-only and bounded.

It is also the watchdog's memory over its own restarts: kills of the last minute, and counts of what was ended by
reason, are read back from disk.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawq.procfs import boot_id
from clawq.state import replace_private
from clawq.watchdog.snapshot import Decision

#: Size at which the log becomes `audit.jsonl.1` and a new one begins, bytes.
LIMIT_BYTES = 2_000_000


class Audit:
    """The log in a folder.

    Args:
        folder: the registry's.
        limit_bytes: see LIMIT_BYTES.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.file = folder / "audit.jsonl"
        self._counts = folder / "reaped.json"
        self._limit_bytes = limit_bytes

    def note(self, decision: Decision, result: str, **more: Any) -> None:
        """Add a line; a disk that is full costs the line and nothing else."""
        who = None if decision.record is None else decision.record
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "boot": boot_id(),
            "at_s": round(time.monotonic(), 3),
            "kind": decision.kind,
            "action": decision.action,
            "why": decision.why,
            "pid": who.pid if who else 0,
            "start_ticks": who.identity.start_ticks if who else 0,
            "role": who.role if who else "",
            "place": who.place if who else "",
            "run": who.run if who else "",
            "tag": who.tag if who else "",
            "evidence": dict(decision.evidence),
            "result": result,
            **more,
        }
        with contextlib.suppress(OSError):
            if self.file.exists() and self.file.stat().st_size > self._limit_bytes:
                self.file.replace(self.file.with_name(self.file.name + ".1"))
            with open(os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as out:
                out.write(json.dumps(line, default=str) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """The newest lines, oldest first; what is torn is left out."""
        found: list[dict[str, Any]] = []
        for file in (self.file.with_name(self.file.name + ".1"), self.file):
            with contextlib.suppress(OSError):
                for text in file.read_text(errors="replace").splitlines():
                    with contextlib.suppress(ValueError):
                        found.append(json.loads(text))
        return found

    def kills(self, since_s: float) -> tuple[float, ...]:
        """Monotonic times of what was ended since then, in this boot."""
        return tuple(
            float(line["at_s"])
            for line in self.lines()
            if line.get("boot") == boot_id() and line.get("ended") and float(line.get("at_s", 0.0)) >= since_s
        )

    def count(self, reason: str) -> None:
        """One more process was ended for that reason."""
        with contextlib.suppress(OSError):
            replace_private(self._counts, json.dumps({**self.reaped(), reason: self.reaped()[reason] + 1}))

    def reaped(self) -> Counter[str]:
        """How many processes were ended on this host, by reason."""
        try:
            raw = json.loads(self._counts.read_text())
        except (OSError, ValueError):
            return Counter()
        return Counter({str(why): int(count) for why, count in raw.items()}) if isinstance(raw, Mapping) else Counter()


__all__ = ["LIMIT_BYTES", "Audit"]
