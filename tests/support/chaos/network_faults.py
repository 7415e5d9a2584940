"""Faults of the network between parties and the data server: F8, partitions, a slow link."""

from collections import Counter
from collections.abc import Callable
from random import Random

from chaos.interceptor import Interceptor, at_random
from chaos.redis_faults import pause, unharmed
from chaos.system import System

#: Share of the calls that fail.
SHARE = 0.25


def calls_fail(seconds: float) -> Callable[[System, Random], str]:
    """F8: of each kind of call to the data server a quarter fails, by request, response or in flight."""

    def inject(system: System, dice: Random) -> str:
        wires = [wire for wire in system.wires.values() if isinstance(wire, Interceptor)]
        with unharmed(system):
            for wire in wires:
                wire.judge = at_random(Random(dice.random()), SHARE)
            pause(seconds)
            for wire in wires:
                wire.judge = lambda batch: ""
            system.over()
            system.await_recovery(system.mark())
        failed = Counter[str]()
        for wire in wires:
            for (kind, _), count in wire.failed.items():
                failed[kind] += count
        return f"{failed.total()} batches failed, by their first command: {dict(failed.most_common())}"

    return inject


def partition(seconds: float, *parties: str) -> Callable[[System, Random], str]:
    """Nothing passes between these parties and the data server, and nobody is told."""

    def inject(system: System, dice: Random) -> str:
        cut = parties or tuple(system.wires)
        before = system.mark()
        with unharmed(system):
            for name in cut:
                system.wires[name].lost = True
            pause(seconds)
            meanwhile = system.mark().committed - before.committed
            for name in cut:
                system.wires[name].lost = False
            system.over()
            system.await_recovery(system.mark())
        if "learner" not in cut and len(cut) < len(system.workers):
            assert meanwhile > 5, "the others were held up"
        return f"{meanwhile} fragments committed meanwhile"

    return inject


def namespace_cut(seconds: float) -> Callable[[System, Random], str]:
    """A worker in a network namespace of its own: all its packets vanish, to both servers."""

    def inject(system: System, dice: Random) -> str:
        before, [line] = system.mark(), system.ground.namespaces.values()
        with unharmed(system):
            line.cut()
            pause(seconds)
            meanwhile = system.mark().committed - before.committed
            line.mend()
            system.over()
            system.await_recovery(system.mark(), 90.0)
        return f"{meanwhile} fragments of the others committed meanwhile"

    return inject


def slow_link(delay_s: float, seconds: float) -> Callable[[System, Random], str]:
    """One worker's line is slow; the others are not held up."""

    def inject(system: System, dice: Random) -> str:
        before = system.mark()
        with unharmed(system):
            system.wires["w0"].delay_s = delay_s
            pause(seconds)
            meanwhile = system.mark().committed - before.committed
            system.wires["w0"].delay_s = 0.0
            system.over()
            system.await_recovery(system.mark())
        assert meanwhile > 5 * seconds, f"only {meanwhile} fragments in {seconds:.0f} s: the others were held up"
        return f"{meanwhile} fragments committed meanwhile"

    return inject
