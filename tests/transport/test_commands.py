"""The books of commands on the broker: attempts, and those that are not tried any more."""

import uuid
from typing import Any

import pytest

from clawq.transport.commands import MAX_ATTEMPTS, Commands
from clawq.transport.keys import DEAD_COMMANDS_KEY, attempts_key


@pytest.fixture
def commands(broker_client: Any) -> Commands:
    return Commands(broker_client)


def test_attempts_are_counted_for_each_command_until_it_ends(commands: Commands, broker_client: Any) -> None:
    # An id comes over the wire: whatever it is, its key is bounded and runs out by itself
    one, other = uuid.uuid4().hex, "x" * 100_000
    assert [commands.begin(one) for _ in range(MAX_ATTEMPTS + 1)] == [1, 2, 3, 4]
    assert commands.begin(other) == 1
    assert len(attempts_key(other)) < 64
    assert 0 < broker_client.ttl(attempts_key(one)) <= 86_400
    commands.ended(one)
    commands.ended(other)
    assert commands.begin(one) == 1
    commands.ended(one)
    assert not broker_client.exists(attempts_key(one), attempts_key(other))


def test_dead_commands_are_kept_with_their_heads_newest_first(commands: Commands, broker_client: Any) -> None:
    commands.bury("garbage", "clawq.run", b"\xff" * 10_000, "w1")
    commands.bury("attempts", "clawq", b"{}", "w2", "lab.task", "ab" * 16)
    newest, older = commands.dead(2)
    assert (newest.reason, newest.task, newest.command, newest.worker) == ("attempts", "lab.task", "ab" * 16, "w2")
    assert (older.reason, older.queue, len(older.head)) == ("garbage", "clawq.run", 4096)
    for entry in (newest, older):
        broker_client.xdel(DEAD_COMMANDS_KEY, entry.id)


def test_what_waits_is_counted_over_all_queues(commands: Commands, broker_client: Any) -> None:
    queues = [f"test:{uuid.uuid4().hex}" for _ in range(3)]
    broker_client.lpush(queues[0], "a", "b")
    broker_client.lpush(queues[2], "c")
    assert commands.waiting(queues) == 3
    assert commands.waiting([]) == 0
    broker_client.unlink(*queues)
