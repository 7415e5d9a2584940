"""Faults on purpose, for tests of what clawq does about a broken simulator.

A `FaultPlan` says what goes wrong (sleep for ever, raise, give nan, exit), where (at a step or a reset, counted from
the making of the env) and whether only once: with `once_file` the first process that comes to the place makes the
file and fails, its replacement finds the file and goes on. `Faults` counts and strikes; the env only calls it.
"""

import os
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from clawq.errors import SimulatorFailed


class FaultPlan(BaseModel):
    """What goes wrong.

    Attributes:
        kind: `none`; `hang` (sleep for ever); `raise` (RuntimeError); `exit` (the process ends with status 3);
            `simulator` (SimulatorFailed); `abort` (the process ends with that error's status, as a simulator's own code
            may do); `nan` (the caller makes the observation of env 0 not a number).
        phase: whether `at` counts calls of `step` or of `reset`.
        at: which call strikes, 1 is the first.
        once_file: strike only while this file does not exist, and make it then.
        child_processes: children that the environment starts when it is made, as simulator hosts do.
        leak_bytes: memory that every call of `step` takes and never gives back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["none", "hang", "raise", "nan", "exit", "simulator", "abort"] = "none"
    phase: Literal["step", "reset"] = "step"
    at: int = Field(default=1, ge=1)
    once_file: str | None = None
    child_processes: int = Field(default=0, ge=0, le=50)
    leak_bytes: int = Field(default=0, ge=0, le=100_000_000)


class Faults:
    """Counts the calls of an environment and strikes where the plan says."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._calls = {"step": 0, "reset": 0}
        self._leaked: list[bytes] = []

    def strike(self, phase: Literal["step", "reset"]) -> bool:
        """Count one call; fail if it is the one. True means: the caller must give nan."""
        self._calls[phase] += 1
        plan = self._plan
        if plan.leak_bytes and phase == "step":
            # Not zeros, which the kernel would not even give memory for.
            self._leaked.append(b"x" * plan.leak_bytes)
        if plan.kind == "none" or phase != plan.phase or self._calls[phase] != plan.at or not self._first():
            return False
        if plan.kind == "hang":
            while True:
                time.sleep(3600)
        if plan.kind == "raise":
            raise RuntimeError(f"fault on purpose at {phase} {plan.at}")
        if plan.kind == "exit":
            os._exit(3)
        if plan.kind == "simulator":
            raise SimulatorFailed(f"fault on purpose at {phase} {plan.at}: the simulator is lost")
        if plan.kind == "abort":
            os._exit(SimulatorFailed.exit_code)
        return True

    def _first(self) -> bool:
        if self._plan.once_file is None:
            return True
        try:
            Path(self._plan.once_file).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


__all__ = ["FaultPlan", "Faults"]
