"""What Redis counts, and where a reader stands: the two sides of the ledger, over real servers."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from clawq.core import Stream, Vanished
from clawq.transport import readers
from clawq.transport.books import Books, Position, Sighting, View
from clawq.transport.client import connect
from clawq.transport.control import delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.restarts import bear, server_of
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter


def send(writer: StreamWriter, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        writer.send(seq, b"x")


def test_what_was_acknowledged_goes_on_counting_when_a_stream_is_trimmed_swept_and_made_anew(
    data_client: Any, run_keys: RunKeys
) -> None:
    books = Books(data_client, run_keys)
    assert books.look({}) == View({}, 0)
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    first = Stream(writer.epoch, 0)
    send(writer, 1, 3)
    reader = StreamReader(data_client, run_keys)
    while reader.cursors().get("a") != f"{writer.epoch}-3":
        entries = reader.read(2.0)
        assert {entry.stream for entry in entries} == {first}
    assert books.look({}).streams == {"a": Sighting(3, 3, first)}
    at = Position(2, f"{writer.epoch}-2", born=writer.epoch)
    assert books.look({"a": at}) == View({"a": Sighting(3, 1, first)}, 0)
    writer.close()
    # The same stream, with another writer
    again = StreamWriter.open(data_client, run_keys, "a", "w")
    assert books.look({"a": at}) == View({"a": Sighting(3, 1, first)}, 0)
    again.close()
    reader.trim(reader.cursors(), 0)
    assert reader.sweep() == ["a"]
    # Gone, and not forgotten
    assert books.look({}) == View({}, 3)
    again = StreamWriter.open(data_client, run_keys, "a", "w")
    send(again, 1, 2)
    second = Stream(again.epoch, 3)
    assert books.look({"a": at}) == View({"a": Sighting(2, 2, second)}, 3)
    # Whatever the clock says, what comes later is above all that is gone
    data_client.hset(run_keys.swept, "epoch", 2**50)
    assert StreamWriter.open(data_client, run_keys, "b", "w").epoch == 2**50 + 1


def test_what_a_reader_publishes_is_read_whole_and_only_changes_are_written(
    data_client: Any, run_keys: RunKeys
) -> None:
    books = Books(data_client, run_keys, "second")
    assert books.read() is None
    positions = {"a": Position(3, "5-3"), "b": Position(1, "6-1", gap=2)}
    books.publish(positions, {"entries": 4})
    assert Books(data_client, run_keys, "second").read() == (positions, {"entries": 4})
    data_client.hdel(run_keys.ledger("second"), "a")
    books.publish(positions, {"entries": 5})
    assert books.read() == ({"b": positions["b"]}, {"entries": 5})
    # A server that lost it is told everything again
    books.forget()
    books.publish(positions, {"entries": 5})
    assert books.read() == (positions, {"entries": 5})


class Asking:
    """A reader with a clock of its own that has read two entries of slot "a", and what it tells of servers.

    Attributes:
        told: (server, what vanished there).
    """

    def __init__(self, servers: EmbeddedRedis, keys: RunKeys) -> None:
        self.client: Any = connect(servers.data_url)
        self.told: list[tuple[str, Mapping[str, Vanished]]] = []
        self._now_s = 0.0
        self.reader = StreamReader(self.client, keys, clock=lambda: self._now_s)
        self.reader.tell_server(lambda server, found: self.told.append((server, found)))
        self.writer = StreamWriter.open(self.client, keys, "a", "w")
        send(self.writer, 1, 2)
        while self.reader.cursors().get("a") != f"{self.writer.epoch}-2":
            self.reader.read(0.0)

    @property
    def vanished(self) -> list[Mapping[str, Vanished]]:
        """What it told, without the servers."""
        return [found for _, found in self.told]

    def look(self) -> None:
        """A second later it looks again."""
        self._now_s += 1.0
        self.reader._discover_if_due()


@pytest.fixture
def asking(own_servers: EmbeddedRedis, run_keys: RunKeys) -> Iterator[Asking]:
    asking = Asking(own_servers, run_keys)
    yield asking
    asking.client.close()


def test_a_reader_tells_of_another_server_what_it_has_read_there_and_what_is_lost(
    asking: Asking, own_servers: EmbeddedRedis, run_keys: RunKeys, restart_data: Callable[[EmbeddedRedis], None]
) -> None:
    told, client, epoch = asking.told, asking.client, asking.writer.epoch
    # The first server is told once, and nothing vanished there
    assert asking.vanished == [{}]
    # Given three entries of which the reader knows and that it has not read
    send(asking.writer, 3, 5)
    asking.look()
    restart_data(own_servers)
    client.connection_pool.disconnect()
    # And two of the same epoch on the new server, of which it reads one before it looks which server that is
    client.hset(run_keys.slots, "a", json.dumps({"epoch": epoch, "born": epoch, "before": 5}))
    for seq in (6, 7):
        client.execute_command("XADD", run_keys.stream("a"), f"{epoch}-{seq}", "f", "x")
    asking.reader._discovery.slots = ["a"]
    asking.reader._positions.cursors["a"] = (epoch, 6)
    asking.look()
    assert told[1][0] != told[0][0]
    assert told[1][1] == {"a": Vanished(read=1, lost=3, cursor=f"{epoch}-6", stream=Stream(epoch, 5))}
    asking.look()
    assert len(told) == 2
    # A reader that goes on from a checkpoint tells it too
    resumed = StreamReader(client, run_keys, cursors={"a": "1-9"}, server=told[0][0], unread={"a": 4})
    resumed.tell_server(lambda server, found: told.append((server, found)))
    resumed._discover_if_due()
    assert told[2] == (told[1][0], {"a": Vanished(0, 4, "1-9", Stream(epoch, 5))})


def test_a_server_that_is_restarted_while_a_reader_looks_is_told_of_with_all_that_it_had(
    asking: Asking,
    own_servers: EmbeddedRedis,
    restart_data: Callable[[EmbeddedRedis], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(asking.writer, 3, 5)
    asking.look()

    def look_and_restart(client: Any, keys: RunKeys, before: str = "") -> str:
        """The server is another one right after it was asked which it is."""
        monkeypatch.setattr(readers, "server_of", server_of)
        found = server_of(client, keys, before)
        restart_data(own_servers)
        client.connection_pool.disconnect()
        return found

    monkeypatch.setattr(readers, "server_of", look_and_restart)
    asking.look()
    # (What it saw was of either: the next look is due at once.)
    asking.reader._discover_if_due()
    assert asking.vanished == [{}, {"a": Vanished(read=0, lost=3, cursor="0-0")}]


def test_what_was_read_of_a_stream_that_was_taken_away_is_told_when_the_server_is_another(
    asking: Asking, own_servers: EmbeddedRedis, restart_data: Callable[[EmbeddedRedis], None]
) -> None:
    asking.writer.close()
    asking.reader.trim(asking.reader.cursors(), 0)
    assert asking.reader.sweep() == ["a"]
    restart_data(own_servers)
    asking.client.connection_pool.disconnect()
    asking.look()
    assert asking.vanished == [{}, {"a": Vanished(0, 0, "0-0")}]


def test_a_run_whose_keys_were_deleted_and_that_goes_on_is_told_as_if_on_another_server(
    data_client: Any, run_keys: RunKeys
) -> None:
    bear(data_client, run_keys)
    first = server_of(data_client, run_keys)
    bear(data_client, run_keys)
    assert server_of(data_client, run_keys) == first
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    send(writer, 1, 2)
    writer.close()
    # Given a finished run: its keys are gone, and it goes on from its checkpoint
    delete_run(data_client, run_keys)
    assert server_of(data_client, run_keys, first) == first
    bear(data_client, run_keys)
    told: list[Mapping[str, Vanished]] = []
    at = {"a": f"{writer.epoch}-2"}
    reader = StreamReader(data_client, run_keys, cursors=at, server=first)
    reader.tell_server(lambda server, found: told.append(found))
    reader._discover_if_due()
    assert told == [{"a": Vanished(0, 0, "0-0")}]
    assert server_of(data_client, run_keys) != first
