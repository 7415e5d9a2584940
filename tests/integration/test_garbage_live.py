"""Garbage in every place of a system that trains: nothing ends, what was refused is counted, and training goes on."""

import json
import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from clawq_process import Clawq, Command
from garbage import GARBAGE

from clawq.control.queues import lease_queue
from clawq.state import ServerState
from clawq.transport.client import connect
from clawq.transport.commands import KEPT, Commands
from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.keys import CELERY_PREFIX

Eventually = Callable[..., None]
QUICK = ("budget={}", "evaluation.interval_s=null", "evaluation.final_episodes=2", "record.animation=false")
ODD = (b"", b"-7", b"\xff\xfe\x00", b"9" * 5000, b"[" * 50_000, b'{"epoch": 1e999, "chunks": [], "set": [7]}', b"null")
#: A slot that no worker has.
INTRUDER = "intruder"


class Vandal:
    """Writes garbage wherever somebody reads, in a run that trains.

    Attributes:
        entries: how many it put into a stream of fragments.
    """

    def __init__(self, broker: Any, data: Any, run: RunRecord, seed: int) -> None:
        self._broker, self._data, self._run = broker, data, run
        self._random = random.Random(seed)
        self.entries = 0
        data.hset(run.keys.slots, INTRUDER, json.dumps({"worker": "nobody", "epoch": 1}))

    def everywhere(self) -> None:
        """Once in each place."""
        keys, data, odd = self._run.keys, self._data, self._odd
        self._fragments()
        for field in ("head", "stop", "window_bytes", "config_epoch", "required"):
            data.hset(keys.control, field, b"\xff" + odd())
        for name in (f"nobody-{self.entries}".encode(), *data.hkeys(keys.heartbeats)):
            data.hset(keys.heartbeats, name, odd())
        data.hset(keys.slots, b"\xff" + odd()[:100], odd())
        # The newest weights; `versions` is a list that only the learner reads.
        for version in data.zrange(keys.versions, -1, -1):
            data.hset(keys.weights(int(version)), self._random.choice(("meta", "c0")), odd())
        for stream in (keys.orders, keys.events):
            for kind in ("tune_wanted", "quarantine", "evaluation_wanted", "evaluation", "nonsense", b"\xff"):
                data.xadd(stream, {"kind": kind, "facts": odd()})
            data.xadd(stream, {b"\xff": odd()})
        self._broker.lpush(CELERY_PREFIX + lease_queue(self._run.run_id), *GARBAGE)

    def _fragments(self) -> None:
        """Into a stream that no actor writes: other bytes, a good fragment that was changed, and no fragment at all."""
        keys, data = self._run.keys, self._data
        good = self._good()
        changed = bytearray(good)
        for _ in range(self._random.randint(1, 4)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        for fields in ({"f": self._random.randbytes(200)}, {"f": bytes(changed)}, {"f": good[:-9]}, {b"\xff": b"x"}):
            self.entries += 1
            data.xadd(keys.stream(INTRUDER), fields, id=f"1-{self.entries}")

    def _good(self) -> bytes:
        keys = self._run.keys
        for key in self._data.scan_iter(f"{keys.prefix}s:*"):
            for _, fields in self._data.xrevrange(key, count=1):
                if INTRUDER.encode() not in key:
                    return bytes(fields[b"f"])
        return b"x" * 300

    def _odd(self) -> bytes:
        return self._random.choice((*ODD, self._random.randbytes(30)))


def actors(up: Command) -> set[psutil.Process]:
    return {process for process in up.tree() if "clawq.programs.actor" in " ".join(process.cmdline())}


def vandalise(home: Clawq, eventually: Eventually, rounds: int) -> None:
    """A run that trains through so many rounds of it."""
    up = home.up("point.yaml", "g", *QUICK)

    def newest(name: str) -> float:
        return float(next((line[name] for line in reversed(home.metrics("g")) if line.get(name) is not None), 0))

    def refused() -> float:
        last = (home.metrics("g") or [{}])[-1]
        return sum(float(count) for name, count in last.items() if name.startswith("rejected/"))

    eventually(lambda: newest("updates") > 20, "updates", 90)
    state = ServerState.read(home.folder / "state")
    assert state is not None
    broker, data = connect(state.broker_url), connect(state.data_url)
    run = RunRegistry(broker).get("g")
    assert run is not None
    before, vandal = actors(up), Vandal(broker, data, run, 7)
    for _ in range(rounds):
        vandal.everywhere()
        # All of it was read, and what came later is trained on, by actors that have newer weights.
        updates, version = newest("updates"), newest("weights_version")
        eventually(lambda: refused() == vandal.entries, "every entry to be refused", 30)
        eventually(lambda: newest("updates") > updates + 20, "updates", 60)  # noqa: B023
        eventually(lambda: newest("weights_version") > version, "newer weights", 60)  # noqa: B023
    books = Commands(broker)
    buried = min(rounds * len(GARBAGE), KEPT)
    eventually(lambda: len(books.dead(2 * KEPT)) >= buried, "what is no command to be set aside", 30)
    assert {command.reason for command in books.dead(2 * KEPT)} == {"garbage"}
    steps = newest("env_steps")
    eventually(lambda: newest("env_steps") > steps, "experience to arrive", 60)
    assert actors(up) == before
    status, _, left = up.stop()
    assert (status, left) == (0, []), up.output + home.logs("g")
    assert "Traceback" not in up.output + home.logs("g")
    for client in (broker, data):
        client.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_F9_F10_F11_forty_rounds_of_garbage_end_nothing(clawq: Clawq, eventually: Eventually) -> None:
    vandalise(clawq, eventually, rounds=40)
