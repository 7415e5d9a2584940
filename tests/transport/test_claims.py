import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import redis
from holding import held_until_killed

from clawq.errors import ClaimHeld, ClaimLost, StoreUnavailable
from clawq.procfs import Identity
from clawq.transport.claims import Claim, holder_of
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


def test_the_claim_of_a_process_of_this_machine_that_has_ended_is_free_at_once_for_one(
    redis_servers: EmbeddedRedis, data_client: redis.Redis, run_keys: RunKeys
) -> None:
    key = run_keys.claim("learner")
    with (
        held_until_killed(redis_servers.data_url, run_keys.tag, "learner"),
        pytest.raises(ClaimHeld, match="one that is killed"),
    ):
        Claim.take(data_client, key, "too early", 5.0)
    assert holder_of(data_client, key) is None
    assert data_client.pttl(key) > 500_000
    # When several want it at once
    with ThreadPoolExecutor(8) as pool:
        tries = [pool.submit(Claim.take, data_client, key, f"heir {number}", 5.0) for number in range(8)]
    # Then one has it, under its own limit
    [heir] = [each.result() for each in tries if each.exception() is None]
    assert all(isinstance(each.exception(), ClaimHeld | None) for each in tries)
    assert holder_of(data_client, key) == heir.holder
    assert data_client.pttl(key) <= 5_000
    assert heir.renew() is False


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"boot": "another"}, {"boot": ""}, {"namespace": 1}, {"uid": os.getuid() + 1}, {"pid": "one"}, {"pid": 1e400},
        {"start_ticks": None},
    ],
    ids=str,
)  # fmt: skip
def test_of_a_holder_that_cannot_be_seen_the_claim_must_run_out(
    data_client: redis.Redis, run_keys: RunKeys, elsewhere: dict[str, Any]
) -> None:
    key, me = run_keys.claim("learner"), Identity.of(os.getpid())
    assert me is not None
    # Given a process that is gone, as far as its pid goes
    gone = {**asdict(me), "start_ticks": me.start_ticks + 1}
    data_client.set(key, json.dumps({"token": "t", "holder": "gone", "process": gone}), px=60_000)
    assert holder_of(data_client, key) is None
    data_client.set(key, json.dumps({"token": "t", "holder": "elsewhere", "process": gone | elsewhere}), px=60_000)
    assert holder_of(data_client, key) == "elsewhere"
    with pytest.raises(ClaimHeld, match="elsewhere"):
        Claim.take(data_client, key, "me", 5.0)


_LOOK = """
import json, os
from dataclasses import asdict
from clawq.procfs import Identity
from clawq.transport.claims import is_free
gone = asdict(Identity.of(os.getpid())) | {"start_ticks": 1}
print(is_free(json.dumps({"process": gone})))
"""


def test_where_proc_shows_another_namespaces_pids_nobody_is_taken_for_gone() -> None:
    # As in a container that has the host's /proc: there a living holder is another process, or none.
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespace can be made here")
    for words, free in (([], b"True\n"), (apart, b"False\n")):
        assert subprocess.check_output([*words, sys.executable, "-c", _LOOK]) == free
