import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.connection import PythonRespSerializer

from clawq.errors import ClawqError, RecordUnreadable, StoreFull, StoreUnavailable, StoreUnfit, TransportError
from clawq.transport.client import (
    check_server,
    connect,
    max_memory_bytes,
    translate,
    translated,
)
from clawq.transport.server import EmbeddedRedis


def test_a_usable_server_passes_and_tells_its_version(data_client: redis.Redis) -> None:
    assert check_server(data_client, "data") >= (6, 2)
    assert max_memory_bytes(data_client) == 512 * 2**20


def test_a_server_that_evicts_keys_is_refused_with_what_to_set(own_servers: EmbeddedRedis) -> None:
    client = connect(own_servers.data_url)
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnfit, match=r"allkeys-lru.*Set `maxmemory-policy noeviction`"):
        check_server(client, "data")
    client.close()


class _OldServer(socketserver.StreamRequestHandler):
    """Answers INFO as a Redis 5 would: no such server can be installed here any more."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            for _ in range(2 * int(line[1:])):
                self.rfile.readline()
            text = b"redis_version:5.0.7\r\nmaxmemory_policy:noeviction\r\nrun_id:0\r\n"
            self.wfile.write(b"$%d\r\n%s\r\n" % (len(text), text))


@pytest.fixture
def old_server() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldServer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        thread.join()


def test_a_server_that_is_too_old_is_refused_with_the_versions(old_server: str) -> None:
    client = connect(old_server)
    with pytest.raises(StoreUnfit, match=r"the broker Redis at redis://127\.0\.0\.1.*is version 5\.0\.7.*needs 6\.2"):
        check_server(client, "broker")
    client.close()


def test_an_unreachable_server_is_told_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = time.monotonic()
    for url in (f"redis://:secret@127.0.0.1:{port}/0", "unix:///nonexistent/socket?db=0"):
        with pytest.raises(StoreUnavailable, match=r"the data Redis at .* cannot be reached") as told:
            check_server(connect(url, timeout_s=1.0), "data")
        assert "secret" not in str(told.value)
    assert time.monotonic() - started < 2.0, "no retries inside redis-py"


def test_a_server_that_hangs_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout_s=0.3)
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer in time"), translated(client):
            client.ping()
        assert time.monotonic() - started < 1.5
        client.close()


@pytest.mark.parametrize("url", ["http://h:1/", "h:6379", "", "redis+socket:///x", "rediss://u:pass@h:nonsense/0"])
def test_what_is_no_redis_url_is_told_without_its_password(url: str) -> None:
    with pytest.raises(StoreUnfit, match=r"no (usable )?Redis URL") as told:
        connect(url)
    assert "pass" not in str(told.value)


def test_a_wrong_password_is_told_without_any_password(own_servers: EmbeddedRedis) -> None:
    admin = connect(own_servers.data_url)
    admin.config_set("requirepass", "rightpassword")
    path = own_servers.data_url.removeprefix("unix://")
    for url in (own_servers.data_url, f"unix://:wrongpassword@{path}"):
        with pytest.raises(StoreUnfit, match="Check user, password and rights") as told:
            check_server(connect(url), "data")
        assert "password@" not in str(told.value)
        assert "wrongpassword" not in str(told.value)
        assert "rightpassword" not in str(told.value)
    check_server(connect(f"unix://:rightpassword@{path}"), "data")
    admin.close()


def test_exceptions_become_ours_by_what_the_caller_can_do() -> None:
    cases: list[tuple[Exception, type[ClawqError]]] = [
        (redis.ConnectionError("refused"), StoreUnavailable),
        (redis.TimeoutError("slow"), StoreUnavailable),
        (redis.BusyLoadingError("loading"), StoreUnavailable),
        (redis.ResponseError("MISCONF Redis is configured to save"), StoreUnavailable),
        (redis.exceptions.OutOfMemoryError("command not allowed"), StoreFull),
        (redis.AuthenticationError("WRONGPASS"), StoreUnfit),
        (redis.exceptions.NoPermissionError("NOPERM"), StoreUnfit),
        (redis.ReadOnlyError("READONLY"), StoreUnfit),
        (redis.exceptions.MovedError("1 h:1"), StoreUnfit),
        (redis.ResponseError("WRONGTYPE"), RecordUnreadable),
        (redis.ResponseError("ERR"), TransportError),
    ]
    for error, expected in cases:
        assert type(translate(error)) is expected, error
        # And as redis-py words it of a command in a pipeline.
        error.args = (f"Command # 1 (HSET k f v) of pipeline caused error: {error}",)
        assert type(translate(error)) is expected, error
    with pytest.raises(ZeroDivisionError), translated():
        raise ZeroDivisionError


def test_a_server_that_refuses_writes_for_a_while_is_unavailable_to_pipelines_and_transactions_too(
    own_servers: EmbeddedRedis,
) -> None:
    client = connect(own_servers.data_url)
    # It takes none without a replica, which is on its way.
    client.config_set("min-replicas-to-write", 1)
    for transaction in (False, True):
        pipe = client.pipeline(transaction=transaction)
        pipe.set("a", "2")
        pipe.set("b", "2")
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"), translated(client):
            pipe.execute()
    client.close()


def test_large_values_are_written_without_copies_and_come_back(data_client: redis.Redis, run_keys: object) -> None:
    key = f"{getattr(run_keys, 'prefix')}metrics"  # noqa: B009
    blob = bytearray(4_000_000)
    blob[-1] = 7
    data_client.hset(key, mapping={"a": memoryview(blob), "b": b"", "c": "text"})
    assert data_client.hgetall(key) == {b"a": bytes(blob), b"b": b"", b"c": b"text"}


@pytest.mark.parametrize(
    "command",
    [
        (
            "XREAD",
            "COUNT",
            64,
            "BLOCK",
            500,
            "STREAMS",
            *(f"key-{n}" for n in range(300)),
            *(f"1-{n}" for n in range(300)),
        ),
        ("CONFIG GET", "maxmemory"),
        ("SET", b"key", "\u00e9\u4e2d", 1, -2.5),
        ("XADD", "key", "1-1", "f", b"x" * 100_000),
        ("XADD", "key", "1-1", "f", memoryview(b"x" * 10), bytearray(b"y")),
        (b"PING",),
    ],
)
def test_commands_are_packed_in_c_or_in_python_to_the_same_bytes(command: tuple[Any, ...]) -> None:
    packer = connect("unix:///nowhere").connection_pool.connection_kwargs["command_packer"]
    theirs: Any = PythonRespSerializer(6000, packer.encode)
    expected = theirs.pack(*command)
    assert b"".join(packer.pack(*command)) == b"".join(expected)


def test_what_cannot_be_packed_is_refused_in_words() -> None:
    packer = connect("unix:///nowhere").connection_pool.connection_kwargs["command_packer"]
    for bad in ({1}, None, True):
        with pytest.raises(redis.DataError, match="Invalid input of type"):
            packer.pack("SET", "key", bad)
