"""When actors are worn out, and that slots replace them."""

import subprocess
import sys
from typing import Any

import pytest

from clawq.config import Recycle
from clawq.control.recycling import LOOK_S, TURN_S, Limits, Recycler, Wear, private_bytes
from clawq.errors import SimulatorFailed
from clawq.spawning.failure import how_it_ended, oom_kills

MB = 1_000_000


class Held:
    """What actors hold, and the time, both set by hand."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.now_s = 1000.0
        self.recycler = Recycler(None, lambda pid, enough: self.bytes[pid], lambda: self.now_s)


def run(**recycle: Any) -> dict[str, Any]:
    return {"config": {"actors": {"recycle": recycle}}}


@pytest.fixture
def held() -> Held:
    return Held()


def test_C15_a_slot_above_its_limit_is_recycled_once_per_cool_down(held: Held) -> None:
    wear, limited = Wear(), run(memory_mb=500, cooldown_s=100.0)
    held.bytes[1] = 499 * MB
    assert held.recycler.due(wear, 1, limited) is None
    held.bytes[1] = 501 * MB
    asked = []
    for _ in range(160):
        held.now_s += LOOK_S / 2
        if held.recycler.due(wear, 1, limited) == "memory":
            asked.append(held.now_s)
            # And the next actor holds as much again
            wear.renew()
            held.recycler.worked(wear, 1)
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 100.0


def test_actors_of_one_process_take_turns(held: Held) -> None:
    one, other, limited = Wear(), Wear(), run(memory_mb=500)
    held.bytes = {1: 600 * MB, 2: 600 * MB}
    assert held.recycler.due(one, 1, limited) == "memory"
    assert held.recycler.due(other, 2, limited) is None
    # Its successor works: now the other one may go
    held.recycler.worked(one, 5)
    held.now_s += LOOK_S
    assert held.recycler.due(other, 2, limited) == "memory"
    # A turn that nobody gives back runs out
    third = Wear()
    held.bytes[3] = 600 * MB
    assert held.recycler.due(third, 3, limited) is None
    held.now_s += TURN_S + LOOK_S
    assert held.recycler.due(third, 3, limited) == "memory"


def test_fragments_are_counted_for_each_actor_anew(held: Held) -> None:
    wear, limited = Wear(), run(fragments=10)
    held.recycler.worked(wear, 9)
    assert held.recycler.due(wear, 1, limited) is None
    held.recycler.worked(wear, 1)
    assert held.recycler.due(wear, 1, limited) == "fragments"
    wear.renew()
    assert held.recycler.due(wear, 1, limited) is None


def test_the_lower_limit_holds_and_what_makes_no_sense_is_none() -> None:
    assert Limits.of(run(memory_mb=500), 400).memory_bytes == 400 * MB
    assert Limits.of(run(memory_mb=500), 600).memory_bytes == 500 * MB
    assert Limits.of({"config": {"actors": {"recycle": Recycle().model_dump()}}}) == Limits()
    odd: list[dict[str, Any]] = [{}, {"config": 3}, {"config": {"actors": []}}, run(memory_mb="x", fragments=-1)]
    for nonsense in odd:
        assert Limits.of(nonsense) == Limits()


def test_memory_is_that_of_the_whole_tree_and_what_is_shared_does_not_count() -> None:
    # The child of a child holds 50 MB of its own, and maps 50 MB of a file that others may share.
    code = (
        "import subprocess, sys, mmap, tempfile\n"
        "if len(sys.argv) > 1:\n"
        "    held = b'x' * 50_000_000\n"
        "    file = tempfile.TemporaryFile(); file.write(b'y' * 50_000_000); file.flush()\n"
        "    shared = mmap.mmap(file.fileno(), 50_000_000); other = mmap.mmap(file.fileno(), 50_000_000)\n"
        "    sum(shared[::4096]) + sum(other[::4096])\n"
        "    print('up', flush=True); sys.stdin.read()\n"
        "else:\n"
        "    subprocess.run([sys.executable, '-c', open('/proc/self/cmdline').read().split(chr(0))[2], 'child'])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"up\n"
        resident, private = private_bytes(child.pid, 10**12), private_bytes(child.pid, 0)
        assert resident > 150 * MB
        assert 50 * MB < private < resident - 90 * MB
    finally:
        child.communicate()
    assert private_bytes(child.pid, 0) == 0


def test_how_a_process_ended_is_told_apart(tmp_path: Any) -> None:
    assert how_it_ended(SimulatorFailed.exit_code, 0)[0] == "simulator"
    assert how_it_ended(3, 0) == ("died", "exited with status 3")
    assert how_it_ended(-9, 4, 4) == ("died", "was killed by signal 9")
    kind, words = how_it_ended(-9, 4, 5)
    assert kind == "oom"
    assert "memory" in words
    assert how_it_ended(-15, 4, 5)[0] == "died", "the kernel kills with 9"
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 7\n")
    assert oom_kills(counters) == 7
    assert oom_kills(tmp_path / "missing") == 0
