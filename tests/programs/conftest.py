"""Runs in this process, made by tests of the programs and ended after them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from recorded import Recorded
from room import Room

from clawq.transport.server import EmbeddedRedis


@pytest.fixture
def make_room(
    tmp_path: Path, redis_servers: EmbeddedRedis, data_client: redis.Redis, broker_client: redis.Redis
) -> Iterator[Callable[..., Room]]:
    """`make_room(**sections)`: a learner and its actors as threads, under SMALL with these sections."""
    rooms: list[Room] = []

    def make(**sections: Any) -> Room:
        folder = tmp_path / f"room-{len(rooms)}"
        rooms.append(Room(folder, redis_servers, data_client, broker_client, **sections))
        return rooms[-1]

    yield make
    for room in rooms:
        room.close()


@pytest.fixture
def record(
    tmp_path: Path, redis_servers: EmbeddedRedis, data_client: redis.Redis, broker_client: redis.Redis
) -> Iterator[Callable[..., Recorded]]:
    """`record(**sections)`: a run that is being recorded."""
    made: list[Recorded] = []

    def begin(**sections: Any) -> Recorded:
        made.append(Recorded(tmp_path, redis_servers, data_client, broker_client, **sections))
        return made[-1]

    yield begin
    for one in made:
        one.close()
