"""TLS with a server that has it: our clients, Celery's, a worker, and each way that it can fail.

A whole run over TLS is in test_acl.py.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clawq_process import Clawq
from kombu.connection import Connection
from tls import Authority, start_with_tls, tls_server

from clawq.errors import StoreUnavailable, StoreUnfit
from clawq.transport.client import check_server, connect
from clawq.transport.listening import Tcp, Tls
from clawq.transport.server import EmbeddedRedis
from clawq.transport.urls import celery_url

pytestmark = pytest.mark.skipif(tls_server() is None, reason="no Redis server with TLS (ops/setup-tls), or no openssl")

PASSWORD = "not-a-secret"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "our-ca")


def start(folder: Path, tls: Tls) -> EmbeddedRedis:
    """Servers with that certificate."""
    return start_with_tls(folder, Tcp(name="localhost", password=PASSWORD, tls=tls))


@pytest.fixture(scope="module")
def servers(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    tls = Tls(*authority.certificate("right", "DNS:localhost"), authority.file)
    servers = start(tmp_path_factory.mktemp("tls"), tls)
    yield servers
    servers.stop()


def plain(url: str) -> str:
    return url.partition("?")[0]


SLOW = (pytest.param(case, marks=pytest.mark.slow) for case in ("other host", "expired"))


@pytest.mark.parametrize("case", ["unknown authority", "plain port", *SLOW])
def test_what_is_wrong_with_tls_is_said_in_a_line_by_clients_and_by_a_worker(
    authority: Authority, servers: EmbeddedRedis, tmp_path: Path, case: str
) -> None:
    ca, own = authority.file, None
    if case == "unknown authority":
        ca, why = Authority(tmp_path, "other-ca").file, "signed by nobody whom this machine knows"
        url = plain(servers.data_url)
    elif case == "other host":
        url, why = plain(servers.data_url).replace("localhost", "127.0.0.1"), "certificate is for another host"
    elif case == "expired":
        made = authority.certificate("expired", "DNS:localhost", days=-1)
        with pytest.raises((StoreUnavailable, StoreUnfit), match="has expired"):
            own = start(tmp_path / "redis", Tls(*made, ca))
        return
    else:
        own = EmbeddedRedis.start(tmp_path / "redis", 64, Tcp(password=PASSWORD))
        url, why = own.data_url.replace("redis://", "rediss://"), "TLS"
    try:
        began = time.monotonic()
        with pytest.raises((StoreUnfit, StoreUnavailable), match=why) as told:
            check_server(connect(f"{url}?ssl_ca_certs={ca}", timeout_s=2.0), "data")
        assert time.monotonic() - began < 10.0
        assert PASSWORD not in str(told.value)
        if case != "plain port":
            worker(tmp_path, url, ca, why)
    finally:
        if own is not None:
            own.stop()


def worker(folder: Path, url: str, ca: Path, why: str) -> None:
    """A worker says it too, and ends instead of trying for ever."""
    home = Clawq(folder, CLAWQ_BROKER_URL=url, CLAWQ_DATA_URL=url, CLAWQ_REDIS_CA=str(ca))
    try:
        told = home.call("worker", "start", "--slots", "1")
        assert told.status != 0
        assert why in told.output
        assert "Traceback" not in told.output
        assert PASSWORD not in told.output
    finally:
        home.close()


@pytest.mark.slow
def test_celery_checks_the_certificate_as_our_own_clients_do(
    servers: EmbeddedRedis, authority: Authority, tmp_path: Path
) -> None:
    connect_celery: Any = Connection
    right, other = authority.file, Authority(tmp_path, "third-ca").file
    for url, ca, works in (
        (servers.broker_url, right, True),
        (servers.broker_url, other, False),
        (servers.broker_url.replace("localhost", "127.0.0.1"), right, False),
    ):
        connection = connect_celery(
            celery_url(f"{plain(url)}?ssl_ca_certs={ca}"), transport_options={"socket_timeout": 3}
        )
        with connection:
            if works:
                connection.default_channel.client.ping()
            else:
                with pytest.raises(Exception, match="certificate verify failed"):
                    connection.default_channel.client.ping()


def test_a_plain_client_at_a_tls_port_is_told_to_use_tls(servers: EmbeddedRedis) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        check_server(connect(plain(servers.data_url).replace("rediss://", "redis://"), timeout_s=2.0), "data")


def test_a_server_without_tls_is_not_started_as_if_it_had_it(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho 'Redis server v=7.0.0'\n")
    fake.chmod(0o755)
    home = Clawq(tmp_path, CLAWQ_REDIS_SERVER=str(fake))
    made, key = authority.certificate("any", "DNS:localhost")
    try:
        words = ("--tls-cert", str(made), "--tls-key", str(key), "--tls-ca", str(authority.file))
        told = home.call("redis", "start", "--tcp", *words)
        assert told.status == 2
        assert "was built without TLS" in told.output
    finally:
        home.close()
