import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawq.errors import ClaimLost, StoreFull, StoreUnavailable, TransportError, WeightsCorrupt, WeightsGone
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from clawq.transport.weights import WeightsPublisher, WeightsReader

FETCHER = Path(__file__).with_name("fetch_weights.py")


def publisher_of(client: Any, keys: RunKeys, keep: int = 3) -> WeightsPublisher:
    return WeightsPublisher(client, keys, Claim.take(client, keys.claim("learner"), "the test", 60.0), keep)


def all_equal(version: int) -> dict[str, Any]:
    """1.4 MB in which every number is the version: two chunks, so that a mixture would show."""
    return {
        "first": np.full((300, 1000), version, np.float32),
        "half": np.full(2000, version, np.float16),
        "last": np.full((20_000,), version, np.float64),
    }


@pytest.mark.parametrize(
    ("publishes", "fetchers"), [(100, 2), pytest.param(1000, 8, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_C22_every_fetched_version_is_homogeneous_and_equals_its_tag(
    data_client: Any, redis_servers: EmbeddedRedis, run_keys: RunKeys, publishes: int, fetchers: int
) -> None:
    claim = Claim.take(data_client, run_keys.claim("learner"), "the test", 60.0)
    publisher = WeightsPublisher(data_client, run_keys, claim)
    arguments = [sys.executable, str(FETCHER), redis_servers.data_url, run_keys.tag, str(publishes)]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(fetchers)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for version in range(1, publishes + 1):
            if claim.renewal_due:
                claim.renew()
            publisher.publish(all_equal(version), version, version, {"version": version})
        reports = [json.loads(process.communicate(timeout=30)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for report in reports:
        assert report["mixed"] == report["corrupt"] == []
        assert report["backward"] == 0
        assert report["version"] == publishes
    assert sum(report["fetched"] for report in reports) > 2 * fetchers, "they did fetch while it was published"
    assert [process.returncode for process in processes] == [0] * fetchers


def test_C20_whatever_the_dtype_the_fetched_weights_hash_as_the_published_ones(
    data_client: Any, run_keys: RunKeys
) -> None:
    publisher, reader = publisher_of(data_client, run_keys), WeightsReader(data_client, run_keys)
    rng = np.random.default_rng(0)
    for version, dtype in enumerate((np.float32, np.float16, np.float64, np.int64, np.uint8), 1):
        arrays = {f"layer{n}": (rng.standard_normal((64, n + 1)) * 50).astype(dtype) for n in range(4)}
        publisher.publish(arrays, version, version)
        fetched = reader.fetch_newer(version - 1)
        assert fetched is not None
        assert fetched.version == version
        assert _hashes(fetched.arrays) == _hashes(arrays)


def _hashes(arrays: dict[str, Any]) -> dict[str, str]:
    return {
        name: hashlib.sha256(array.tobytes() + str(array.dtype).encode()).hexdigest() for name, array in arrays.items()
    }


def test_a_publisher_that_lost_its_claim_changes_nothing(data_client: Any, run_keys: RunKeys) -> None:
    first = publisher_of(data_client, run_keys)
    first.publish(all_equal(1), 1, 1)
    data_client.delete(run_keys.claim("learner"))
    second = publisher_of(data_client, run_keys)
    second.publish(all_equal(5), 5, 5)
    before = _state(data_client, run_keys)
    with pytest.raises(ClaimLost, match="the test"):
        first.publish(all_equal(6), 6, 6)
    assert _state(data_client, run_keys) == before


def test_a_lapsed_claim_stops_a_publish_until_it_is_renewed(data_client: Any, run_keys: RunKeys) -> None:
    """The data server came back empty: the learner is still the learner, but must know that it happened."""
    claim = Claim.take(data_client, run_keys.claim("learner"), "t", 60.0)
    publisher = WeightsPublisher(data_client, run_keys, claim)
    data_client.delete(claim.key)
    assert not claim.renewal_due
    with pytest.raises(StoreUnavailable, match="lapsed"):
        publisher.publish(all_equal(1), 1, 1)
    assert publisher.head() == 0
    assert claim.renewal_due
    assert claim.renew() is True
    publisher.publish(all_equal(1), 1, 1)
    assert publisher.head() == 1


def _state(client: Any, keys: RunKeys) -> tuple[dict[bytes, bytes], list[bytes]]:
    return client.hgetall(keys.control), sorted(client.scan_iter(match=keys.prefix + "*"))


def test_two_publishers_at_once_never_go_back_and_lose_no_version(data_client: Any, run_keys: RunKeys) -> None:
    """Both hold the same claim (as one learner with a second thread would): the head decides."""
    claim = Claim.take(data_client, run_keys.claim("learner"), "t", 60.0)
    publishers = [WeightsPublisher(data_client, run_keys, claim, keep=100) for _ in range(2)]
    published: list[int] = []

    def publish(publisher: WeightsPublisher, first: int) -> None:
        for version in range(first, 41, 2):
            try:
                publisher.publish({"w": np.full(3, version)}, version, version)
                published.append(version)
            except TransportError as error:
                assert "not newer" in str(error)  # noqa: PT017

    threads = [threading.Thread(target=publish, args=(each, n + 1)) for n, each in enumerate(publishers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(published) == len(set(published))
    reader = WeightsReader(data_client, run_keys)
    assert reader.head() == max(published) == 40
    for version in published:
        assert (reader.fetch(version).arrays["w"] == version).all()


@pytest.mark.parametrize("forged", [b"9", b"1", b"x", b"-3"])
def test_F11_a_head_that_nobody_published_does_not_hold_up_the_next_weights(
    data_client: Any, run_keys: RunKeys, forged: bytes
) -> None:
    publisher = publisher_of(data_client, run_keys)
    for version in (1, 2, 3):
        publisher.publish(all_equal(version), version, version)
    data_client.hset(run_keys.control, "head", forged)
    publisher.publish(all_equal(4), 4, 4)
    reader = WeightsReader(data_client, run_keys)
    assert reader.head() == 4
    assert reader.fetch(4).version == 4


@pytest.fixture
def damaged(data_client: Any, run_keys: RunKeys) -> tuple[Any, str, WeightsReader]:
    publisher_of(data_client, run_keys).publish(all_equal(1), 1, 1)
    return data_client, run_keys.weights(1), WeightsReader(data_client, run_keys)


def test_F11_a_flipped_byte_is_noticed(damaged: tuple[Any, str, WeightsReader]) -> None:
    client, key, reader = damaged
    chunk = bytearray(client.hget(key, "c1"))
    chunk[1000] ^= 1
    client.hset(key, "c1", bytes(chunk))
    with pytest.raises(WeightsCorrupt, match="version 1 fail their digest"):
        reader.fetch_newer(0)


@pytest.mark.parametrize(
    "damage",
    [
        {"c1": b""},
        {"c0": b"short"},
        {"meta": b"\xff\xfe"},
        {"meta": b"[]"},
        {"meta": b"{}"},
        {"meta": b'{"version": 1, "updates": 1, "metadata": {}, "size_bytes": 1e400, "digest": "x", "chunks": 1}'},
        {"meta": b'{"version": 1, "updates": 1, "metadata": {}, "size_bytes": 0, "digest": "x", "chunks": 0}'},
        {"meta": b'{"version": 2, "updates": 1, "metadata": {}, "size_bytes": 5, "digest": "x", "chunks": 1}'},
        {"meta": b'{"version":1, "updates":1, "metadata":{}, "size_bytes":1e14, "digest":"x", "chunks":95367432}'},
    ],
)
def test_F11_any_damage_is_weights_corrupt(damaged: tuple[Any, str, WeightsReader], damage: dict[str, bytes]) -> None:
    client, key, reader = damaged
    client.hset(key, mapping=damage)
    with pytest.raises(WeightsCorrupt):
        reader.fetch(1)


def test_F11_a_missing_chunk_is_corrupt_and_a_missing_version_is_gone(
    damaged: tuple[Any, str, WeightsReader],
) -> None:
    client, key, reader = damaged
    client.hdel(key, "c1")
    with pytest.raises(WeightsCorrupt):
        reader.fetch(1)
    client.delete(key)
    with pytest.raises(WeightsGone, match="version 1 is not kept"):
        reader.fetch(1)
    with pytest.raises(WeightsGone, match="faster than they could be fetched"):
        reader.fetch_newer(0)


def test_C61_weights_of_many_chunks_are_whole_and_staged_uploads_are_never_visible(
    data_client: Any, run_keys: RunKeys
) -> None:
    publisher, reader = publisher_of(data_client, run_keys), WeightsReader(data_client, run_keys)
    large = {"w": np.arange(10_000_000, dtype=np.float32)}
    publisher.publish(large, 1, 1)
    fetched = reader.fetch(1)
    np.testing.assert_array_equal(fetched.arrays["w"], large["w"])
    sizes = [data_client.hstrlen(run_keys.weights(1), field) for field in data_client.hkeys(run_keys.weights(1))]
    assert max(sizes) == 2**20
    assert len(sizes) == 40
    # An upload that was interrupted before its MULTI: nobody sees it, and it runs out.
    publisher._stage(run_keys.staging("interrupted"), b"half of it", "{}")
    assert reader.head() == 1
    assert 0 < data_client.ttl(run_keys.staging("interrupted")) <= 600
    assert data_client.ttl(run_keys.weights(1)) == -1, "what is published does not run out"


def test_a_failed_publish_leaves_no_staging_key(data_client: Any, run_keys: RunKeys) -> None:
    publisher = publisher_of(data_client, run_keys)
    publisher.publish(all_equal(3), 3, 3)
    with pytest.raises(TransportError, match="only grow"):
        publisher.publish(all_equal(2), 2, 2)
    assert not list(data_client.scan_iter(match=run_keys.staging("x")[:-1] + "*"))


def test_a_full_server_refuses_a_publish_whole(own_servers: EmbeddedRedis, run_keys: RunKeys) -> None:
    client = connect(own_servers.data_url)
    publisher = publisher_of(client, run_keys)
    publisher.publish(all_equal(1), 1, 1)
    for number in range(40):
        try:
            client.xadd(run_keys.stream("a"), {"f": bytes(1_000_000)}, id=f"1-{number + 1}")
        except Exception:
            break
    client.config_set("maxmemory", "10mb")
    with pytest.raises(StoreFull):
        publisher.publish(all_equal(2), 2, 2)
    reader = WeightsReader(client, run_keys)
    assert reader.head() == 1
    assert (reader.fetch(1).arrays["last"] == 1).all()
    client.unlink(run_keys.stream("a"))
    publisher.publish(all_equal(2), 2, 2)
    assert reader.head() == 2
    client.close()


def test_publishing_keeps_the_rest_of_the_control_record(data_client: Any, run_keys: RunKeys) -> None:
    record = ControlRecord(data_client, run_keys)
    record.write(window_bytes=123, config_epoch=4, stop=True)
    publisher_of(data_client, run_keys).publish(all_equal(9), 9, 9)
    control = record.read()
    assert control is not None
    assert (control.head, control.window_bytes, control.config_epoch, control.stop) == (9, 123, 4, True)


def test_the_old_weights_stay_readable_while_the_server_is_away_and_after(
    own_servers: EmbeddedRedis, run_keys: RunKeys
) -> None:
    client = connect(own_servers.data_url, timeout_s=0.3)
    publisher, reader = publisher_of(client, run_keys), WeightsReader(client, run_keys)
    publisher.publish(all_equal(1), 1, 1)
    held = reader.fetch(1)
    own_servers.processes[1].kill()
    own_servers.processes[1].wait()
    for act in (lambda: reader.fetch_newer(0), lambda: publisher.publish(all_equal(2), 2, 2), reader.head):
        with pytest.raises(StoreUnavailable):
            act()
    assert (held.arrays["first"] == 1).all()
    client.close()
