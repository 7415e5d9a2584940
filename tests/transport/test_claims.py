import time
from collections.abc import Callable

import pytest
import redis

from clawq.errors import ClaimHeld, ClaimLost, StoreUnavailable
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis


def test_F13_a_second_holder_is_refused_and_told_who_has_it(data_client: redis.Redis, run_keys: RunKeys) -> None:
    first = Claim.take(data_client, run_keys.claim("learner"), "learner on host-a, pid 7", 5.0)
    with pytest.raises(ClaimHeld, match="learner is held by learner on host-a, pid 7") as told:
        Claim.take(data_client, run_keys.claim("learner"), "learner on host-b", 5.0)
    assert told.value.holder == "learner on host-a, pid 7"
    first.release()
    first.release()
    Claim.take(data_client, run_keys.claim("learner"), "learner on host-b", 5.0)


def test_a_claim_runs_out_by_the_servers_clock_and_renewing_prevents_it(
    data_client: redis.Redis, run_keys: RunKeys, eventually: Callable[..., None]
) -> None:
    claim = Claim.take(data_client, run_keys.claim("x"), "me", 0.2)
    assert not claim.renewal_due
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        assert not claim.renew(), "it never lapsed"
    eventually(lambda: not data_client.exists(claim.key), "it runs out without renewal", 2.0)
    assert claim.renewal_due


def test_a_lapsed_claim_that_nobody_took_is_taken_anew_and_says_so(data_client: redis.Redis, run_keys: RunKeys) -> None:
    claim = Claim.take(data_client, run_keys.claim("x"), "me", 5.0)
    data_client.delete(claim.key)
    assert claim.renew() is True
    assert claim.renew() is False
    with pytest.raises(ClaimHeld):
        Claim.take(data_client, run_keys.claim("x"), "other", 5.0)


def test_a_claim_that_somebody_took_over_cannot_be_renewed_nor_released_nor_written_under(
    data_client: redis.Redis, run_keys: RunKeys
) -> None:
    mine = Claim.take(data_client, run_keys.claim("x"), "me", 5.0)
    record = ControlRecord(data_client, run_keys, mine)
    record.write(window_bytes=1, config_epoch=1)
    data_client.delete(mine.key)
    theirs = Claim.take(data_client, run_keys.claim("x"), "the other", 5.0)
    with pytest.raises(ClaimLost, match="taken over by the other"):
        mine.renew()
    with pytest.raises(ClaimLost, match="held by the other"):
        record.write(window_bytes=2)
    mine.release()
    assert theirs.renew() is False
    control = record.read()
    assert control is not None
    assert control.window_bytes == 1


def test_a_claim_that_changes_hands_between_the_check_and_the_write_stops_the_write(
    data_client: redis.Redis, run_keys: RunKeys
) -> None:
    claim = Claim.take(data_client, run_keys.claim("x"), "me", 5.0)

    def queue_late(pipe: redis.client.Pipeline) -> None:
        data_client.set(claim.key, '{"token": "other", "holder": "the other"}')
        pipe.hset(run_keys.control, "head", 99)

    with pytest.raises(ClaimLost, match="the other"):
        claim.fenced(queue_late)
    assert not data_client.exists(run_keys.control)


def test_garbage_in_a_claim_is_somebody_elses(data_client: redis.Redis, run_keys: RunKeys) -> None:
    data_client.set(run_keys.claim("x"), b"\xff\xfe")
    with pytest.raises(ClaimHeld, match="not clawq"):
        Claim.take(data_client, run_keys.claim("x"), "me", 5.0)


def test_claims_of_a_server_that_is_away_say_so(own_servers: EmbeddedRedis, run_keys: RunKeys) -> None:
    client = connect(own_servers.data_url)
    claim = Claim.take(client, run_keys.claim("x"), "me", 5.0)
    own_servers.processes[1].kill()
    own_servers.processes[1].wait()
    for act in (claim.renew, claim.release):
        with pytest.raises(StoreUnavailable):
            act()
    client.close()


def test_a_claim_taken_for_a_long_start_is_held_for_less_afterwards(
    data_client: redis.Redis, run_keys: RunKeys
) -> None:
    claim = Claim.take(data_client, run_keys.claim("learner"), "me", 120.0)
    assert 100_000 < data_client.pttl(claim.key) <= 120_000
    assert not claim.hold_for(10.0)
    assert 5_000 < data_client.pttl(claim.key) <= 10_000
    assert not claim.renewal_due
