"""The ledgers of all readers of a run with many slots, over a real server: exact for each, at any moment."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from clawq.core import Entry
from clawq.programs.audit import NOT_TOLD, audit_live, others
from clawq.programs.balance import GONE, Balance
from clawq.transport.books import Books
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers
from clawq.transport.stream import StreamWriter
from clawq.transport.tally import Tally


class Reader:
    """A reader that takes everything over, and publishes its ledger."""

    def __init__(self, data: Any, keys: RunKeys, name: str, required: bool = True) -> None:
        self._now = 0.0
        self.stream = StreamReader(data, keys, name, clock=self._clock, required=required)
        self.tally, self.books = Tally(), Books(data, keys, name)
        self.stream.tell_server(self.tally.on_server)
        self.stream.tell_slots(self.tally.on_slots)
        self.name, self.got = name, list[Entry]()

    def _clock(self) -> float:
        """Every look at it is a second later: slots are looked up with each read."""
        self._now += 1.0
        return self._now

    def read(self) -> None:
        """Take over what there is."""
        while entries := self.stream.read(0.0):
            for entry in entries:
                if entry.missed:
                    self.tally.miss(entry)
                else:
                    self.tally.take(entry)
                    self.got.append(entry)
        self.publish()

    def publish(self) -> None:
        self.books.publish(*self.tally.snapshot())
        self.stream.acknowledge(self.stream.cursors())
        self.stream.checkpointed(self.stream.cursors())


class Run:
    """Slots that come, send, go, and come back."""

    def __init__(self, data: Any, keys: RunKeys) -> None:
        self.data, self.keys = data, keys
        self.learner = Reader(data, keys, "learner")
        self.sent: dict[str, int] = {}
        self.writers: dict[str, StreamWriter] = {}
        self.seqs: dict[str, int] = {}

    def open(self, slot: str) -> None:
        self.writers[slot] = StreamWriter.open(self.data, self.keys, slot, "w")
        self.seqs[slot] = 0

    def send(self, slot: str, entries: int = 1) -> None:
        for _ in range(entries):
            self.seqs[slot] += 1
            self.writers[slot].send(self.seqs[slot], b"x")
            self.sent[slot] = self.sent.get(slot, 0) + 1

    def close(self, slot: str) -> None:
        self.writers.pop(slot).close()

    def trim_and_sweep(self) -> list[str]:
        self.learner.stream.trim(self.learner.stream.cursors(), 0)
        return self.learner.stream.sweep()

    def balance(self, reader: str = "learner") -> Balance:
        found = audit_live(self.data, self.keys, reader, settling_s=0.0)
        assert found.problems() == [], str(found.to_json())
        assert found.acknowledged == sum(self.sent.values())
        return found


@pytest.fixture
def run(data_client: Any, run_keys: RunKeys) -> Iterator[Run]:
    run = Run(data_client, run_keys)
    run.learner.read()
    yield run
    for slot in list(run.writers):
        run.close(slot)


def row(found: Balance, slot: str) -> tuple[int | None, int, int, int]:
    [one] = [one for one in found.rows if one.slot == slot]
    return one.acknowledged, one.settled, one.in_stream, one.gap


def test_slots_that_are_gone_are_one_row_for_every_reader_and_one_that_comes_back_begins_anew(run: Run) -> None:
    late: Reader | None = None
    for number in range(60):
        run.open(f"w{number}")
        run.send(f"w{number}", 2)
        run.learner.read()
        run.close(f"w{number}")
        if number == 29:
            run.trim_and_sweep()
            # (What is there when it begins is its own; what was swept before is not.)
            late = Reader(run.data, run.keys, "late")
            late.read()
    assert late is not None
    run.balance("late")
    # Not swept while a required reader has not got it
    assert run.trim_and_sweep() == []
    late.read()
    assert len(run.trim_and_sweep()) == 30
    for name, gap in (("learner", 0), ("late", 60)):
        assert row(run.balance(name), GONE) == (120, 120 - gap, 0, gap)
    # One of them comes back before either has looked again
    run.open("w7")
    run.send("w7", 3)
    for name in ("learner", "late"):
        assert row(run.balance(name), "w7") == (3, 0, 3, 0)
    run.learner.read()
    late.read()
    run.send("w7")
    for name in ("learner", "late"):
        assert row(run.balance(name), "w7") == (4, 3, 1, 0)
    # What is kept and published is bounded by the slots that are there
    assert run.data.hlen(run.keys.swept) == 3
    for name in ("learner", "late"):
        assert sorted(run.data.hkeys(run.keys.ledger(name))) == [b"@sums", b"w7"]
        assert run.data.hkeys(run.keys.kept(name)) == run.data.hkeys(run.keys.cursors(name)) == [b"w7"]
    assert late.stream.cursors().keys() == late.stream.ordinals().keys() == {"w7"}
    assert [entry.ordinal for entry in late.got if entry.slot == "w7"] == [3, 4, 5]


def test_an_optional_reader_is_told_all_that_it_missed_though_slots_came_and_went(run: Run) -> None:
    run.open("stays")
    run.send("stays", 4)
    curious = Reader(run.data, run.keys, "curious", required=False)
    curious.read()
    for number in range(40):
        run.open(f"w{number}")
        run.send(f"w{number}", 3)
        run.send("stays")
        run.learner.read()
        if number % 4 == 0:
            curious.read()
        run.close(f"w{number}")
        run.trim_and_sweep()
    # It is behind: what it was not told of yet is told by the ledger
    found = run.balance("curious")
    seen = sum(found.sums["gaps"].values()) + found.sums["entries"]
    assert seen == found.acknowledged
    assert found.sums["gaps"][NOT_TOLD] > 0
    curious.read()
    found = run.balance("curious")
    assert NOT_TOLD not in found.sums["gaps"]
    assert found.sums["gaps"]["trimmed"] + found.sums["entries"] == found.acknowledged == 164
    assert found.sums["entries"] == len(curious.got)


def test_a_random_history_balances_for_each_reader_after_every_step(run: Run) -> None:
    chance = random.Random(7)
    readers = [run.learner, Reader(run.data, run.keys, "second"), Reader(run.data, run.keys, "third", required=False)]
    readers[1].read()
    names = [f"s{number}" for number in range(5)]
    for step in range(90):
        slot = chance.choice(names)
        if slot not in run.writers:
            run.open(slot)
        elif chance.random() < 0.7:
            run.send(slot)
        else:
            run.close(slot)
        if chance.random() < 0.5:
            chance.choice(readers).read()
        if chance.random() < 0.4:
            run.trim_and_sweep()
        if step % 3 == 0:
            for reader in readers:
                if run.data.exists(run.keys.ledger(reader.name)):
                    run.balance(reader.name)
    for reader in readers:
        reader.read()
        run.balance(reader.name)
    # Everything once, for the required ones
    for reader in readers[:2]:
        ids = [(entry.slot, entry.epoch, entry.seq) for entry in reader.got]
        assert len(ids) == len(set(ids)) == sum(run.sent.values())
    told = others(run.data, run.keys, None, settling_s=0.0)
    assert [one.reader for one in told] == ["second", "third"]
    assert all(not one.problems() for one in told)
    Readers(run.data, run.keys).leave("third")
    assert not run.data.exists(run.keys.ledger("third"))
