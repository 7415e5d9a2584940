"""Faults of the two Redis servers: F3 to F7."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from chaos.system import System
from clawq.errors import TransportError


def pause(seconds: float) -> None:
    """The length of a fault: it is what is tested, so it is really waited for."""
    threading.Event().wait(seconds)


@contextmanager
def unharmed(system: System) -> Iterator[None]:
    """Nobody may be ended or replaced meanwhile."""

    def who() -> set[int]:
        mains = {p.pid for name in system.workers for p in system.mains(name)}
        return mains | {p.pid for p in system.actors()} | {system.learner.process.pid}

    before = who()
    yield
    assert before <= who(), f"processes {before - who()} were ended\n{system.describe()}"


def killed_with_aof(system: System, dice: Random) -> str:
    """F3: both servers killed five times, each time started again; all that was acknowledged is there."""
    slowest_s = 0.0
    with unharmed(system):
        for number in range(5):
            before = system.mark()
            for server in (system.data, system.broker):
                server.kill()
                server.start()
            system.over()
            if number < 4:
                slowest_s = max(slowest_s, system.await_recovery(before, 10.0))
    return f"slowest of the first four {slowest_s:.1f} s"


def killed_without_aof(system: System, dice: Random) -> str:
    """F4: the data server comes back empty."""
    with unharmed(system):
        system.data.kill()
        pause(dice.uniform(0.0, 1.0))
        system.data.start()
        system.over()
        system.until(lambda: system.client.exists(system.keys.control), "the control record to be written again")
        system.await_recovery(system.mark())
    lost = sum(system.balance().sums["gaps"].values())
    return f"{lost} acknowledged fragments went with it, told as gaps"


def stalled(seconds: float) -> Callable[[System, Random], str | None]:
    """F5: both servers stand still; connections stay."""

    def inject(system: System, dice: Random) -> None:
        with unharmed(system):
            for server in (system.data, system.broker):
                server.stall()
            pause(seconds)
            for server in (system.data, system.broker):
                server.go_on()
            system.over()
            system.await_recovery(system.until(system.mark, "the servers to answer"), 60.0)

    return inject


def kicked(system: System, dice: Random) -> str:
    """F6: all connections of both servers cut five times, and those that wait in XREAD or BRPOP besides."""
    waiting = 0
    with unharmed(system):
        for _ in range(5):
            for server in (system.data, system.broker):
                for line in bytes(server.ask("CLIENT", "LIST")).decode().splitlines():
                    facts = dict(pair.partition("=")[::2] for pair in line.split())
                    if facts.get("cmd") in ("xread", "brpop", "blpop"):
                        waiting += 1
                        _quietly(server, "CLIENT", "KILL", "ID", facts["id"])
                for kind in ("normal", "pubsub"):
                    _quietly(server, "CLIENT", "KILL", "TYPE", kind)
            pause(dice.uniform(0.0, 0.4))
        system.over()
        system.await_recovery(system.mark())
    return f"{waiting} of them were waiting in XREAD or BRPOP"


def _quietly(server: object, *words: str) -> None:
    try:
        server.ask(*words)  # type: ignore[attr-defined]
    except TransportError:
        return  # it was this very connection, or one that went meanwhile


def full(seconds: float) -> Callable[[System, Random], str | None]:
    """F7: the data server's memory is full."""

    def inject(system: System, dice: Random) -> str:
        with unharmed(system):
            before = system.mark()
            limit = system.data.ask("CONFIG", "GET", "maxmemory")
            system.data.ask("CONFIG", "SET", "maxmemory", "1mb")
            pause(seconds)
            held = sum(seq for _, seq in system.mark().streams.values())
            system.data.ask("CONFIG", "SET", "maxmemory", _value(limit))
            system.over()
            system.await_recovery(system.mark())
        return f"while full: {held - sum(seq for _, seq in before.streams.values())} fragments were taken"

    return inject


def _value(answer: object) -> bytes:
    """Of CONFIG GET."""
    if isinstance(answer, dict):
        return bytes(next(iter(answer.values())))
    assert isinstance(answer, list)
    return bytes(answer[1])
