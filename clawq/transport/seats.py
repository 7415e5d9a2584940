"""Seats: the numbered places of the actors that take part in a run's rounds.

Where the order and the random numbers of a run must be the same on any pool of workers, an actor does not write the
stream of its slot, which is named after host and worker, but takes one of the run's seats: a stream like any other,
under a claim like any other (`clawq.transport.stream`), whose name says only which one it is. Whoever finds no free
seat stands by. A seat is free when nobody ever took it, when its actor gave it back, or when its claim can be taken.
"""

from collections.abc import Sequence
from typing import Any

import redis

from clawq.errors import ClaimHeld
from clawq.transport.claims import is_free
from clawq.transport.client import translated
from clawq.transport.keys import RunKeys
from clawq.transport.stream import StreamWriter


def open_seat(client: redis.Redis, keys: RunKeys, seats: Sequence[str], worker: str, ttl_s: float) -> StreamWriter:
    """Take the first free one of these seats.

    Args:
        client: of the data server.
        keys: of the run.
        seats: their names.
        worker: host and worker, for people.
        ttl_s: the seat is free again when its actor was silent for so long.

    Raises:
        ClaimHeld: none is free.
        StoreUnavailable, StoreFull: try again later.
    """
    untyped: Any = client
    with translated(client):
        holders = untyped.mget([keys.claim(f"slot:{seat}") for seat in seats])
    for seat, holder in zip(seats, holders, strict=True):
        if not is_free(holder):
            continue
        try:
            return StreamWriter.open(client, keys, seat, worker, ttl_s)
        except ClaimHeld:
            continue  # somebody was quicker
    raise ClaimHeld(f"each of the {len(seats)} seats", "an actor")


__all__ = ["open_seat"]
