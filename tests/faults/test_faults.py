"""The faults of the catalog, done to a real system: a few of them to one in the default tests, all with `slow`.

`ops/chaos` does the same and prints what became of it. What else covers them: ops/decisions/chaos.md.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from chaos.catalog import FAULTS
from chaos.fault import run_fault, suffer
from chaos.ground import Setup
from chaos.interceptor import Interceptor
from chaos.network_faults import calls_fail
from chaos.system import System

#: These take seconds, and need no server or process to be started anew. (F11 before those that write as other slots.)
SHORT = ("F6", "F11", "F9", "F8-again")


def test_F6_F8_F9_F11_one_system_bears_one_fault_after_another(tmp_path: Path) -> None:
    shorter = replace(FAULTS["F8"], inject=calls_fail(2.0))
    with System(tmp_path / "s", Setup(workers=1, wire=Interceptor)) as system:
        for fault in (*(FAULTS[name] for name in SHORT), shorter):
            verdict = suffer(system, fault)
            sys.stdout.write(verdict.line() + "\n")
            assert verdict.ok, verdict.problems[0]
        system.stop()
    assert system.leftovers == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
def test_chaos(name: str, tmp_path: Path) -> None:
    verdict = run_fault(FAULTS[name], tmp_path / "s")
    sys.stdout.write(verdict.line() + "\n")
    assert verdict.ok, "\n".join(verdict.problems)
