"""Redis URLs: what may stand in them, how they are shown, and how well the way to their server must be protected.

A server on this machine (a socket file, or a loopback address) may be used as it is. One on another machine must speak
TLS with a certificate that is checked, and ask for a password; that is the host's own rule, and nothing that comes over
the wire can soften it. Two environment variables of the host belong to it:

    CLAWQ_REDIS_SECURITY   the least that is asked of a server on another machine: `tls` (the default); `password`: not
                           encrypted, for a network on which you trust everybody; `none`: not even that
    CLAWQ_REDIS_CA         file with the certificates of those who may sign a server's; default: those of the system

Passwords never get into texts: URLs are shown through `redact`.
"""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from clawq.errors import StoreUnfit

SECURITY_VARIABLE, CA_VARIABLE = "CLAWQ_REDIS_SECURITY", "CLAWQ_REDIS_CA"
#: What CLAWQ_REDIS_SECURITY may say, strictest first.
LEVELS = ("tls", "password", "none")
_SCHEMES = ("redis", "rediss", "unix")
_SECRET_ARGUMENTS = frozenset({"password", "ssl_password"})
#: In a URL's query these would make TLS worth nothing.
_UNCHECKED = {"ssl_cert_reqs": {"none", "optional"}, "ssl_check_hostname": {"0", "f", "false", "n", "no"}}


def usable_url(url: str, env: Mapping[str, str] | None = None) -> str:
    """The URL to connect to: with the host's certificates named in it where it needs them.

    Raises:
        StoreUnfit: it is no URL of Redis, or its server is not protected as this host demands.
    """
    env = os.environ if env is None else env
    if url.partition("://")[0] not in _SCHEMES:
        raise StoreUnfit(
            f"{redact(url)} is no Redis URL: it must start with redis://, rediss:// (TLS) or unix:// (socket file)"
        )
    try:
        _check_protection(url, env)
    except ValueError as error:
        raise StoreUnfit(f"{redact(url)} is no usable Redis URL: {without_secrets(str(error), url)}") from None
    if not url.startswith("rediss://") or "ssl_ca_certs=" in url or not (file := env.get(CA_VARIABLE)):
        return url
    if not os.access(file, os.R_OK) or not Path(file).is_file():
        raise StoreUnfit(f"{CA_VARIABLE}={file} is no file that can be read; it must hold certificates in PEM form")
    return f"{url}{'&' if '?' in url else '?'}ssl_ca_certs={quote(file, safe='/')}"


def _check_protection(url: str, env: Mapping[str, str]) -> None:
    level = env.get(SECURITY_VARIABLE, LEVELS[0])
    if level not in LEVELS:
        raise StoreUnfit(f"{SECURITY_VARIABLE}={level!r} is none of {', '.join(LEVELS)}")
    if is_loopback(url) or level == "none":
        return
    shown = redact(url)
    if not has_password(url):
        raise StoreUnfit(
            f"{shown} is on another machine and has no password: whoever reaches it can read and change everything. "
            f"Give it one (`clawq redis start --bind` does), or set {SECURITY_VARIABLE}=none on this machine if nobody "
            "else can reach it"
        )
    if level == "password":
        return
    if not url.startswith("rediss://"):
        raise StoreUnfit(
            f"{shown} is on another machine and not encrypted: who listens on the network gets the password. Use TLS "
            f"(rediss://), or set {SECURITY_VARIABLE}=password on this machine if you trust everybody on that network"
        )
    query = dict(parse_qsl(urlsplit(url).query))
    for name, unchecked in _UNCHECKED.items():
        if query.get(name, "").lower().removeprefix("cert_") in unchecked:
            raise StoreUnfit(
                f"{shown}: {name}={query[name]} does not check whose server it is. Name the certificate of its "
                f"authority in {CA_VARIABLE} instead, or set {SECURITY_VARIABLE}=password"
            )


def is_loopback(url: str) -> bool:
    """Whether what is sent to that server never leaves this machine."""
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    return is_local(url) or host == "localhost" or re.fullmatch(r"127(\.\d+){3}", host) is not None


def is_local(url: str) -> bool:
    """Whether that server shares its memory with us: a unix socket, or this host by name."""
    parts = urlsplit(url)
    return parts.scheme == "unix" or parts.hostname in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def has_password(url: str) -> bool:
    """Whether the URL names a password."""
    parts = urlsplit(url)
    return bool(parts.password or dict(parse_qsl(parts.query)).get("password"))


def user_of(url: str) -> str | None:
    """The ACL user that the URL names; None if it names none, or only the one that everybody is."""
    parts = urlsplit(url)
    user = unquote(parts.username or "") or dict(parse_qsl(parts.query)).get("username", "")
    return user if user not in ("", "default") else None


def with_user(url: str, user: str, password: str) -> str:
    """The same server, as that user."""
    parts = urlsplit(url)
    place = f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc.rpartition('@')[2]}"
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("username", "password")]
    return parts._replace(netloc=place, query=urlencode(query)).geturl()


def same_server(one: str, other: str) -> bool:
    """Whether two URLs lead to the same server, whoever they name as user."""
    return bool(one and other) and _place(one) == _place(other)


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    # Behind a host there is only the number of a database.
    return parts.netloc.rpartition("@")[2], parts.path if parts.scheme == "unix" else ""


def redact(url: str) -> str:
    """The URL without its password, for texts; rather too much is hidden than too little."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, host = rest.rpartition("@")
    if at and ":" in user:
        rest = f"{user.partition(':')[0]}:***@{host}"
    return scheme + separator + re.sub(r"(password=)[^&#]*", r"\1***", rest)


def celery_url(url: str, env: Mapping[str, str] | None = None) -> str:
    """The same server as a Celery broker URL (kombu spells socket files `redis+socket://`).

    TLS is verified unless the URL says otherwise, as redis-py does by itself; kombu alone would not.
    A redis-py socket URL carries its password as `unix://[user]:pw@/path` or `?password=`; kombu takes both the same.

    Raises:
        StoreUnfit: as `usable_url`.
    """
    url = usable_url(url, env)
    if url.startswith("rediss://") and "ssl_cert_reqs=" not in url:
        return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"
    if not url.startswith("unix://"):
        return url
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    query["virtual_host"] = query.pop("db", "0")
    secret = f"{parts.username or ''}:{parts.password}@" if parts.password else ""
    return f"redis+socket://{secret}{parts.path}?{urlencode(query)}"


def without_secrets(text: str, url: str) -> str:
    """A text about a URL without the URL's secrets."""
    try:
        parts = urlsplit(url)
        secrets = [parts.password, *(v for k, v in parse_qsl(parts.query) if k in _SECRET_ARGUMENTS)]
    except ValueError:
        return "it cannot be parsed"
    for secret in filter(None, secrets):
        text = text.replace(secret, "***").replace(unquote(secret), "***")
    return text


__all__ = [
    "CA_VARIABLE",
    "LEVELS",
    "SECURITY_VARIABLE",
    "celery_url",
    "has_password",
    "is_local",
    "is_loopback",
    "redact",
    "same_server",
    "usable_url",
    "user_of",
    "with_user",
    "without_secrets",
]
