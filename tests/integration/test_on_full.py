"""What an actor does when its outbox is full, end to end: real sender thread, real Redis, real consumer and ledger.

Redis stands still, is out of memory, or the learner has too much unread; the actor goes on as long as its policy lets
it. Afterwards every env step that was made is in the ledger: committed, or dropped under its reason, to the step.
"""

import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from clawq.acting.outbox import FULL, OnFull, Outbox
from clawq.acting.sender import Pauses, Sender
from clawq.replay.consumer import Consumer
from clawq.replay.staleness import StalenessRule
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot
from clawq.transport.client import connect
from clawq.transport.codec import decode, encode
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsReader
from clawq.types import Fragment

Eventually = Callable[..., None]
STEPS, ENVS, CAPACITY = 5, 4, 4
FRAGMENT = STEPS * ENVS
OPEN_WINDOW = 10_000_000


class Chain:
    """An actor's sender over a real stream, and what a learner reads of it."""

    def __init__(self, servers: EmbeddedRedis, on_full: OnFull) -> None:
        self.servers, self.keys = servers, RunKeys(RUN)
        self.data: Any = connect(servers.data_url)
        self.control = ControlRecord(self.data, self.keys)
        self.control.write(stop=False, window_bytes=OPEN_WINDOW, config_epoch=1)
        client = connect(servers.data_url, 0.5)
        self.outbox = Outbox(CAPACITY, on_full)
        epochs = [0]

        def open_slot() -> StreamWriter:
            writer = StreamWriter.open(client, self.keys, "s", "test", 60.0, after_epoch=epochs[-1])
            epochs.append(writer.epoch)
            return writer

        sink = open_slot()
        pauses = Pauses(poll_s=0.02, eager_s=0.01, first_s=0.01, longest_s=0.1)
        self.sender = Sender(self.outbox, sink, open_slot, encode, WeightsReader(client, self.keys), pauses)
        self.true = TrueSlot("s", ENVS, np.random.default_rng(0), count(1), chances=Chances(0.1, 0.1))
        self.made = 0
        self.waiting: Fragment | None = None
        self.sender.start()

    def put(self, fragments: int) -> int:
        """Make and put fragments until one finds no room (it waits then, as the env loop does); how many went in."""
        for number in range(fragments):
            fragment = self.waiting or self.true.fragment(STEPS)[0]
            if self.waiting is None:
                self.made += 1
            self.waiting = None
            if not self.outbox.put(fragment, 0.2):
                self.waiting = fragment
                return number
        return fragments

    def read(self) -> Consumer:
        """Everything in the stream, committed."""
        consumer = Consumer(
            StreamReader(self.data, self.keys),
            Examiner(decode, FragmentCheck(SPEC, RUN)),
            StalenessRule(),
            lambda: 0,
            lambda entry, reason, detail: None,
        ).start()
        try:
            expected = int(self.data.xlen(self.keys.stream("s")))
            deadline_s = time.monotonic() + 30
            while consumer.counts.entries < expected and time.monotonic() < deadline_s:
                for staged in consumer.take(64, 0.1):
                    consumer.commit(staged)
        finally:
            consumer.close()
        return consumer

    def close(self) -> None:
        self.sender.close()
        self.data.close()


def stall(chain: Chain) -> Callable[[], None]:
    server = chain.servers.processes[1]
    server.send_signal(signal.SIGSTOP)
    return lambda: server.send_signal(signal.SIGCONT)


def fill(chain: Chain) -> Callable[[], None]:
    before = chain.data.config_get("maxmemory")["maxmemory"]
    chain.data.config_set("maxmemory", 1)
    return lambda: chain.data.config_set("maxmemory", before)


def pace(chain: Chain) -> Callable[[], None]:
    # What is unread already is more than that: nothing more is sent.
    chain.control.write(window_bytes=1)
    return lambda: chain.control.write(window_bytes=OPEN_WINDOW)


@pytest.fixture
def chain_of(own_servers: EmbeddedRedis) -> Iterator[Callable[[OnFull], Chain]]:
    chains: list[Chain] = []

    def make(on_full: OnFull) -> Chain:
        chains.append(Chain(own_servers, on_full))
        return chains[-1]

    yield make
    own_servers.processes[1].send_signal(signal.SIGCONT)
    for chain in chains:
        chain.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trouble", [stall, fill, pace], ids=["stalled", "out_of_memory", "paced"])
@pytest.mark.parametrize("on_full", ["block", "drop_oldest", "drop_newest"])
def test_every_env_step_is_committed_or_dropped_under_its_reason_to_the_step(
    chain_of: Callable[[OnFull], Chain],
    eventually: Eventually,
    on_full: OnFull,
    trouble: Callable[[Chain], Callable[[], None]],
) -> None:
    chain = chain_of(on_full)
    assert chain.put(3) == 3
    assert chain.sender.drain(20)
    heal = trouble(chain)
    if trouble is pace:
        eventually(lambda: chain.sender.view.paced, "the sender is held back", 20)
    went_in = chain.put(13)
    dropped = chain.outbox.dropped.get(FULL, 0) // FRAGMENT
    # One fragment may be in the sender's hands: that one is never dropped, and makes room for another.
    if on_full == "block":
        assert (went_in in (CAPACITY, CAPACITY + 1), dropped) == (True, 0)
    else:
        assert went_in == 13
        assert 13 - dropped in (CAPACITY, CAPACITY + 1)
    heal()
    eventually(lambda: chain.sender.drain(1), "all that waits is sent", 30)
    # What was dropped last is told by the header of the next fragment.
    assert chain.put(1) == 1
    eventually(lambda: chain.sender.drain(1), "the last one is sent", 30)
    consumer = chain.read()
    counts = consumer.counts
    assert consumer.check_valid() == (True, "")
    assert counts.produced_steps == chain.made * FRAGMENT
    assert counts.dropped_steps == ({FULL: dropped * FRAGMENT} if dropped else {})
    assert counts.committed_steps == (chain.made - dropped) * FRAGMENT
    assert (counts.unaccounted_steps, counts.refused_steps, counts.duplicates) == (0, 0, 0)
    # Fragments too: what is missing in the numbers of the stream is what was dropped.
    assert counts.gap_fragments == dropped
    seqs = [int(entry_id.partition(b"-")[2]) for entry_id, _ in chain.data.xrange(chain.keys.stream("s"))]
    assert counts.committed == len(seqs) == chain.made - dropped
    gone = set(range(1, chain.made + 1)) - set(seqs)
    # The oldest 4 of the 13, or the newest 4, are there, and whichever the sender had in its hands.
    allowed = {"block": set[int](), "drop_oldest": set(range(4, 13)), "drop_newest": set(range(8, 17))}
    assert gone <= allowed[on_full]
