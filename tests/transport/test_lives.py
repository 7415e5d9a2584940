"""Actors that ended without a word are counted, each once, whoever finds it; those that said goodbye are not."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from holding import held_until_killed

from clawq.transport.client import connect
from clawq.transport.keys import RunKeys
from clawq.transport.lives import Lives, LostLives
from clawq.transport.readers import StreamReader
from clawq.transport.server import EmbeddedRedis
from clawq.transport.stream import StreamWriter


def test_a_killed_actor_is_counted_at_once_and_once_whatever_becomes_of_its_slot(
    redis_servers: EmbeddedRedis, data_client: Any, run_keys: RunKeys, eventually: Callable[..., None]
) -> None:
    lives = LostLives(data_client, run_keys)
    assert lives.count() == 0
    with held_until_killed(redis_servers.data_url, run_keys.tag, "slot:a"):
        assert lives.count() == 0, "it is at work"
    assert lives.count() == 1, "its claim need not run out"
    # Its successor
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    assert lives.count() == 1
    writer.send(1, b"x")
    writer.close(all_sent=True)
    writer.close()
    assert lives.count() == 1
    # The end of the stream, and another one of that name
    reader = StreamReader(data_client, run_keys)
    while reader.cursors().get("a") != f"{writer.epoch}-1":
        reader.read(2.0)
    reader.trim(reader.cursors(), 0)
    assert reader.sweep() == ["a"]
    assert lives.count() == 1
    again = StreamWriter.open(data_client, run_keys, "a", "w")
    assert lives.count() == 1
    # One that gives its slot back with something unsent is as good as killed
    again.close()
    assert lives.count() == 2
    eventually(lambda: reader.read(0.01) or reader.sweep() == ["a"], "it is seen, and swept", 10.0)
    assert lives.count() == 2


def test_an_actor_that_begins_a_new_epoch_itself_has_lost_nothing(data_client: Any, run_keys: RunKeys) -> None:
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    # Given that its claim lapsed, or a stream refused its ids
    data_client.delete(run_keys.claim("slot:a"))
    writer.close()
    same = StreamWriter.open(data_client, run_keys, "a", "w", after_epoch=writer.epoch)
    assert LostLives(data_client, run_keys).count() == 0
    # And one that lost its slot to another does not speak for that one
    data_client.delete(run_keys.claim("slot:a"))
    StreamWriter.open(data_client, run_keys, "a", "another")
    same.close(all_sent=True)
    assert LostLives(data_client, run_keys).count() == 1
    assert Lives.of(data_client.hget(run_keys.slots, "a")).open


def test_an_actor_that_stood_still_until_its_slot_was_swept_and_goes_on_has_lost_nothing(
    data_client: Any, run_keys: RunKeys
) -> None:
    lives, reader = LostLives(data_client, run_keys), StreamReader(data_client, run_keys)
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    for count in (0, 0, 1):
        writer.send(1, b"x")
        while reader.cursors().get("a") != f"{writer.epoch}-1":
            reader.read(2.0)
        data_client.delete(run_keys.claim("slot:a"))
        reader.trim(reader.cursors(), 0)
        assert reader.sweep() == ["a"]
        assert lives.count() == 1
        if count == 0:
            writer = StreamWriter.open(data_client, run_keys, "a", "w", after_epoch=writer.epoch)
            assert lives.count() == 0, "it lives"
    # It did not come back from the third time; whoever comes next is another one
    StreamWriter.open(data_client, run_keys, "a", "w")
    assert lives.count() == 1


def test_who_says_goodbye_is_never_taken_for_lost_whenever_that_is_looked_at(
    redis_servers: EmbeddedRedis, data_client: Any, run_keys: RunKeys
) -> None:
    done, lives = threading.Event(), LostLives(data_client, run_keys)

    def come_and_go() -> None:
        with connect(redis_servers.data_url) as client:
            for _ in range(300):
                StreamWriter.open(client, run_keys, "a", "w").close(all_sent=True)
        done.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    counts = [lives.count()]
    while not done.is_set():
        counts.append(lives.count())
    thread.join()
    assert set(counts) == {0}


def test_a_restarted_server_forgets_nobody_and_counts_nobody_twice(
    own_servers: EmbeddedRedis, restart_data: Callable[[EmbeddedRedis], None]
) -> None:
    keys = RunKeys("1" * 32)
    with connect(own_servers.data_url) as client:
        lives = LostLives(client, keys)
        StreamWriter.open(client, keys, "a", "w").close()
        assert lives.count() == 1
        kept = client.hgetall(keys.slots)
        restart_data(own_servers)
        # Empty, again and again
        assert lives.count() == 1
        StreamWriter.open(client, keys, "a", "w").close()
        assert lives.count() == 2
        restart_data(own_servers)
        assert lives.count() == 2
        # With what it had
        restart_data(own_servers)
        client.hset(keys.slots, mapping=kept)
        assert lives.count() == 2
        restart_data(own_servers)
        client.hset(keys.slots, mapping=kept)
        assert lives.count() == 2


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"lost": -2, "epoch": 1}', b'{"lost": "1", "epoch": 1}', b'{"epoch": 1}', b'{"lost": 1e400}'],
)
def test_garbage_in_a_registration_counts_nothing(data_client: Any, run_keys: RunKeys, text: bytes) -> None:
    data_client.hset(run_keys.slots, mapping={"a": text, "not a slot": b'{"epoch": 1, "lost": 0, "open": true}'})
    assert LostLives(data_client, run_keys).count() == 1
    data_client.hset(run_keys.slots, "b", b'{"epoch": 1, "lost": 9000000000000000000, "open": true}')
    assert LostLives(data_client, run_keys).count() == 100_002
