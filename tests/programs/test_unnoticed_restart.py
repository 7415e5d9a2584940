"""A data server that came back empty, and a writer and a reader that have not noticed it yet: the books balance."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from clawq.core import Entry, Slots
from clawq.programs.balance import Balance, balance
from clawq.replay.staging import Staging
from clawq.testing.experience import Chances, TrueSlot
from clawq.transport.books import Books, positions_of
from clawq.transport.client import connect
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter


class Following:
    """A reader, and a ledger of what became of its entries; entries are settled at once, or when they are committed.

    Attributes:
        reader: asks which server it is, and which slots there are, when it is told to look.
    """

    def __init__(self, client: Any, keys: RunKeys, at_once: bool) -> None:
        self._now_s, self._at_once = 0.0, at_once
        self._fragments = TrueSlot("a", 2, np.random.default_rng(0), count(1), chances=Chances(0.0, 0.0))
        self._staging, self._books = Staging(10**9), Books(client, keys)
        self._handled: set[tuple[int, int]] = set()
        self.reader = StreamReader(client, keys, clock=lambda: self._now_s)
        self.reader.tell_server(self._staging.on_server)
        self.reader.tell_slots(self._forget)

    def _forget(self, slots: Slots) -> None:
        self._staging.look(slots)

    def look(self) -> None:
        """A second later it looks again, as often as the server is another one."""
        self._now_s += 1.0
        self.read()
        self.read()

    def read(self) -> None:
        """Take what has come."""
        for entry in self.reader.read(0.0):
            self._accept(entry)

    def _accept(self, entry: Entry) -> None:
        if (entry.epoch, entry.seq) in self._handled:
            self._staging.drop(entry, "duplicate")
        elif self._at_once:
            self._staging.drop(entry, "corrupt")
        else:
            self._staging.put(entry, self._fragments.fragment(3)[0])
        self._handled.add((entry.epoch, entry.seq))

    def commit(self) -> None:
        """Settle all that waits."""
        for staged in self._staging.take(1000, 0.0):
            self._staging.commit(staged)

    def balance(self) -> Balance:
        """By now."""
        sums, places = self._staging.books
        positions = positions_of(places)
        return balance("learner", "now", positions, self._books.look(positions), sums)


@pytest.fixture
def client(own_servers: EmbeddedRedis) -> Iterator[Any]:
    client: Any = connect(own_servers.data_url)
    yield client
    client.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["settled", "waiting"])
@pytest.mark.parametrize("seen", [2, 3], ids=["unread", "read"])
@pytest.mark.parametrize("looks", ["before", "between", "after"])
def test_what_a_writer_wrote_before_it_noticed_the_new_server_is_counted_once(
    client: Any,
    own_servers: EmbeddedRedis,
    run_keys: RunKeys,
    restart_data: Callable[[EmbeddedRedis], None],
    looks: str,
    seen: int,
    at_once: bool,
) -> None:
    following = Following(client, run_keys, at_once)
    writer = StreamWriter.open(client, run_keys, "a", "w")
    for seq in range(1, 4):
        writer.send(seq, b"x")
        if seq == seen:
            following.look()
    restart_data(own_servers)
    client.connection_pool.disconnect()
    # Given a writer whose last word got no answer, and that says it again: nobody has registered its slot there
    writer.send(3, b"x")
    if looks == "before":
        following.look()
    following.read()
    if looks == "between":
        following.look()
    # Then it notices, and goes on in a new epoch
    again = StreamWriter.open(client, run_keys, "a", "w", after_epoch=writer.epoch)
    for seq in range(1, 4):
        again.send(seq, b"x")
        following.read()
    for _ in range(2):
        following.look()
        assert following.balance().problems() == []
        following.commit()
    again.send(4, b"x")
    following.look()
    following.commit()
    found = following.balance()
    assert found.problems() == []
    assert [(row.slot, row.acknowledged, row.settled) for row in found.rows if row.slot == "a"] == [("a", 5, 5)]
    # What was on the old server is what is left of all that was settled
    assert found.sums["entries"] == 5 + found.sums["before"]
