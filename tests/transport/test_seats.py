import pytest
import redis

from clawq.errors import ClaimHeld
from clawq.transport.keys import RunKeys
from clawq.transport.seats import open_seat
from clawq.transport.stream import StreamWriter

SEATS = ("seat-000", "seat-001")


def test_actors_take_the_seats_in_turn_and_one_too_many_is_refused(data_client: redis.Redis, run_keys: RunKeys) -> None:
    def sit() -> StreamWriter:
        return open_seat(data_client, run_keys, SEATS, "worker", 60.0)

    first, second = sit(), sit()
    assert (first.slot, second.slot) == SEATS
    with pytest.raises(ClaimHeld, match="each of the 2 seats"):
        sit()
    # When one is given back, the next actor has it, as another incarnation under a new epoch
    first.close()
    third = sit()
    assert third.slot == "seat-000"
    assert (first.incarnation, third.incarnation) == (0, 1)
    assert third.epoch > first.epoch
    second.close()
    third.close()
