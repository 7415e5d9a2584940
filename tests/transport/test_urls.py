import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.connection import Connection

from clawq.errors import StoreUnfit
from clawq.transport.urls import celery_url, redact, usable_url, user_of, with_user

passwords = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=12, max_size=30)
#: A host of RFC 5737's network for examples; nothing is ever sent there.
ELSEWHERE = "192.0.2.7"
ANYWHERE = {"CLAWQ_REDIS_SECURITY": "none"}


@given(passwords)
def test_a_password_never_shows_in_a_redacted_url(password: str) -> None:
    spelled = quote(password, safe="")
    for url in (f"redis://:{spelled}@h:1/0", f"rediss://user:{spelled}@h/0", f"unix:///s?db=0&password={spelled}"):
        shown = redact(url)
        assert spelled not in shown
        assert password not in shown
        assert "***" in shown


@given(passwords)
def test_a_user_is_put_into_a_url_whatever_the_password(password: str) -> None:
    url = with_user("rediss://old:pw@h:7/0?ssl_ca_certs=/a/ca.pem", "w-1", password)
    assert user_of(url) == "w-1"
    assert usable_url(url) == url
    assert url.endswith("@h:7/0?ssl_ca_certs=%2Fa%2Fca.pem")
    assert password not in redact(url)


def test_a_url_without_password_is_shown_as_it_is() -> None:
    for url in ("redis://host:6379/0", "unix:///run/x/d?db=0", "redis://user@host:1/2"):
        assert redact(url) == url


def test_a_server_that_cannot_be_reached_by_celery_is_spelled_its_way() -> None:
    assert celery_url("redis://:pw@h:1/0", ANYWHERE) == "redis://:pw@h:1/0"
    assert celery_url("unix:///run/b?db=0") == "redis+socket:///run/b?virtual_host=0"
    assert celery_url("unix://:p%40w@/run/b?db=2") == "redis+socket://:p%40w@/run/b?virtual_host=2"
    assert celery_url("unix://w1:pw@/run/b?db=0") == "redis+socket://w1:pw@/run/b?virtual_host=0"


@pytest.mark.parametrize(
    ("url", "reqs"),
    [
        ("rediss://:pw@h:1/0", ssl.CERT_REQUIRED),
        ("rediss://:pw@h:1/0?ssl_ca_certs=/ca.pem", ssl.CERT_REQUIRED),
        ("rediss://h?ssl_cert_reqs=none", ssl.CERT_NONE),
    ],
)
def test_celery_verifies_tls_unless_the_url_says_otherwise(url: str, reqs: ssl.VerifyMode) -> None:
    connect_celery: Any = Connection
    with connect_celery(celery_url(url, ANYWHERE)) as connection:
        assert connection.ssl["ssl_cert_reqs"] == reqs
        assert connection.hostname == "h"


@pytest.mark.parametrize(
    "url",
    [
        *("unix:///run/b?db=0", "redis://127.0.0.1:6379/0", "redis://127.5.5.5/0", "redis://[::1]:6379/0"),
        *("redis://localhost/0", f"redis://{socket.gethostname()}/0", f"rediss://:pw@{ELSEWHERE}:6379/0"),
    ],
)
def test_servers_on_this_machine_and_those_with_tls_and_password_are_used(url: str) -> None:
    assert usable_url(url, {}) == url


@pytest.mark.parametrize(
    ("url", "level", "why"),
    [
        (f"redis://{ELSEWHERE}:6379/0", "tls", "no password"),
        (f"redis://{ELSEWHERE}:6379/0", "password", "no password"),
        (f"rediss://{ELSEWHERE}:6379/0", "tls", "no password"),
        (f"redis://:secret@{ELSEWHERE}:6379/0", "tls", "not encrypted"),
        (f"redis://:secret@127.0.0.1.{ELSEWHERE}.example/0", "tls", "not encrypted"),
        (f"rediss://:secret@{ELSEWHERE}/0?ssl_cert_reqs=none", "tls", "does not check whose"),
        (f"rediss://:secret@{ELSEWHERE}/0?ssl_cert_reqs=CERT_NONE", "tls", "does not check whose"),
        (f"rediss://:secret@{ELSEWHERE}/0?ssl_check_hostname=False", "tls", "does not check whose"),
    ],
)
def test_a_server_elsewhere_without_protection_is_refused_with_the_setting(url: str, level: str, why: str) -> None:
    for make in (usable_url, celery_url):
        with pytest.raises(StoreUnfit, match=f"{why}.*CLAWQ_REDIS_SECURITY=(password|none)") as told:
            make(url, {"CLAWQ_REDIS_SECURITY": level})
        assert "secret" not in str(told.value)
    assert usable_url(url, ANYWHERE) == url


def test_what_this_machine_demands_must_be_a_word_that_is_known() -> None:
    with pytest.raises(StoreUnfit, match="CLAWQ_REDIS_SECURITY='off' is none of tls, password, none"):
        usable_url("unix:///s", {"CLAWQ_REDIS_SECURITY": "off"})


def test_the_certificates_of_this_machine_are_named_in_urls_that_need_them(tmp_path: Path) -> None:
    file = tmp_path / "my ca.pem"
    env = {"CLAWQ_REDIS_CA": str(file)}
    url = "rediss://:pw@h:1/0"
    with pytest.raises(StoreUnfit, match=r"CLAWQ_REDIS_CA=.* is no file that can be read"):
        usable_url(url, env)
    file.write_text("")
    assert usable_url(url, env).endswith("?ssl_ca_certs=" + quote(str(file)))
    assert celery_url(url, env).endswith("&ssl_cert_reqs=required")
    assert usable_url(f"{url}?ssl_ca_certs=/other", env) == f"{url}?ssl_ca_certs=/other"
    assert usable_url("redis://localhost/0", env) == "redis://localhost/0"


@pytest.mark.parametrize("url", ["redis://h/0", "redis://:pw@h/0", "redis://default:pw@h/0", "unix:///s?db=0"])
def test_who_names_no_user_is_nobody_in_particular(url: str) -> None:
    assert user_of(url) is None
    assert user_of("unix:///s?db=0&username=w1&password=x") == "w1"
