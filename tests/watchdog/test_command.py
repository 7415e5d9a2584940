"""`clawq watchdog` as users run it, and who keeps one running."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from clawq_process import Clawq

from clawq.registry import Registry, registry_folder
from clawq.spawning.spawner import Spawner
from clawq.watchdog import keeping
from clawq.watchdog.daemon import only_watchdog, watchdog_pid
from clawq.watchdog.explain import explain
from clawq.watchdog.keeping import WatchdogKeeper
from clawq.watchdog.policy import Policy

if TYPE_CHECKING:
    from tests.watchdog.conftest import Kennel

Alive = Callable[[int], bool]
Eventually = Callable[..., None]
IDLE = "mine.moved('step'); print('ready', flush=True); time.sleep(600)"


def test_explain_says_what_is_known_which_rule_would_apply_and_why(kennel: "Kennel", quick: Policy) -> None:
    child = kennel.child(IDLE, {"step": 3600.0})
    text = "\n".join(explain(child.pid, kennel.registry, quick))
    for words in (
        f"actor place-child0 (pid {child.pid})",
        f"pid {os.getpid()}, which lives",
        "the same process as registered",
        "counts as hung after 3600 s",
        "MB of its own",
        "well: no rule applies",
    ):
        assert words in text
    kennel.record(child, limits={"step": 0.0})
    assert "hung -> end: no progress for" in "\n".join(explain(child.pid, kennel.registry, quick))
    kennel.record(child, identity=replace(kennel.record(child).identity, start_ticks=1))
    assert "gone; its pid is another process now" in "\n".join(explain(child.pid, kennel.registry, quick))
    dead = kennel.child(IDLE)
    os.kill(dead.pid, signal.SIGKILL)
    dead.wait_exit(10.0)
    dead.end_tree()
    assert (
        "earlier    actor place-child1 ended 0 s ago: killed by signal 9"
        in explain(dead.pid, kennel.registry, quick)[-1]
    )
    stranger, tagged = kennel.stranger(), kennel.stranger(child.tag)
    assert "never touches it" in explain(stranger.pid, kennel.registry, quick)[0]
    assert f"was started by actor place-child0 (pid {child.pid})" in explain(tagged.pid, kennel.registry, quick)[0]
    assert "there is no process" in explain(2**22 - 3, kennel.registry, quick)[0]


@pytest.mark.slow
def test_R20_a_second_watchdog_steps_back_and_status_names_the_first(home: Clawq, eventually: Eventually) -> None:
    first = home.start("watchdog", "start")
    registry = Registry(registry_folder(home.env))
    eventually(lambda: watchdog_pid(registry) == first.process.pid, "the watchdog", 60.0)
    second = home.call("watchdog", "start")
    assert second.status == 0
    assert f"has a watchdog already (pid {first.process.pid})" in second.output
    assert f"watchdog    pid {first.process.pid}" in home.call("watchdog", "status").output
    status, _, left = first.stop()
    assert (status, left) == (0, [])
    assert "none runs" in home.call("watchdog", "status").output


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_F20_a_watchdog_that_dies_or_freezes_is_replaced_and_the_next_one_adopts_who_lives(
    kennel: "Kennel", eventually: Eventually, monkeypatch: pytest.MonkeyPatch, alive: Alive, fault: signal.Signals
) -> None:
    monkeypatch.setenv("CLAWQ_WATCHDOG", "1")
    monkeypatch.setattr(keeping, "HUNG_S", 6.0)
    code = "print('ready', flush=True)\nwhile True:\n    mine.moved('step'); time.sleep(0.05)"
    busy = kennel.child(code, {"step": 5.0})
    keeper = WatchdogKeeper(Spawner(), look_s=0.2)
    try:
        eventually(lambda: watchdog_pid(kennel.registry), "a watchdog", 60.0)
        first = watchdog_pid(kennel.registry)
        assert first is not None
        os.kill(first, fault)
        eventually(lambda: watchdog_pid(kennel.registry) not in (None, first), "the next one", 60.0)
        assert alive(busy.pid)
    finally:
        keeper.close()
    assert watchdog_pid(kennel.registry) is None


def test_while_somebody_else_watches_none_is_started(kennel: "Kennel", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWQ_WATCHDOG", "1")
    with only_watchdog(kennel.registry):
        keeper = WatchdogKeeper(Spawner(), look_s=0.01)
        keeper._thread.join(0.1)
        keeper.close()
    assert keeper._child is None
