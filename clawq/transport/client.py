"""The one place where Redis clients are made, and where redis-py's exceptions become ours.

`connect` gives a client with explicit timeouts and no retries inside redis-py: retried writes duplicate (measured: one
`xadd()` call during a stall gave two entries), so whoever can retry safely does it himself. RESP2, hiredis for reading,
a packer of our own for writing (hiredis copies the whole command: 4 MB writes cost nine times as much).

`translated()` wraps every use of a client. `check_server` says in plain words why a server cannot be used. What a
URL may be, and how it is shown without its password, is for clawq.transport.urls.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from hiredis import pack_command
from redis._parsers import Encoder
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from clawq.errors import RecordUnreadable, StoreFull, StoreUnavailable, StoreUnfit, TransportError
from clawq.transport.urls import CA_VARIABLE, redact, usable_url, without_secrets

#: Bytes read from a socket at once; the default of 32 KB costs 10-30 % on fragments.
_SOCKET_READ_BYTES = 1 << 20
#: Commands up to this size are joined into one buffer; larger arguments are sent as they are, without a copy.
_JOIN_BYTES = 6000
#: redis-py puts before the text of a command's error which command of a pipeline that was, and this.
_IN_A_PIPELINE = " of pipeline caused error: "
#: Oldest server that has what we call; 7.0 is what is tested.
OLDEST_VERSION = (6, 2)
TESTED_VERSION = (7, 0)
_CLUSTER_ERRORS = (
    redis.exceptions.RedisClusterException,
    redis.exceptions.ClusterError,
    redis.exceptions.AskError,
    redis.exceptions.ClusterCrossSlotError,
)


def connect(url: str, timeout_s: float = 5.0) -> redis.Redis:
    """A client of the server at `url`; nothing is sent yet.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with password if one is needed.
        timeout_s: longest wait for a connection and for a reply. Blocking reads must ask for less.

    Raises:
        StoreUnfit: the URL cannot be understood, or this host demands more protection (clawq.transport.urls).
    """
    url = usable_url(url)
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=_SOCKET_READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            health_check_interval=0,
            # CLIENT SETINFO would cost two more round trips for each connection and is unknown to older servers.
            driver_info=None,
            command_packer=_packer(),
        )
    except (ValueError, TypeError) as error:
        raise StoreUnfit(f"{redact(url)} is no usable Redis URL: {without_secrets(str(error), url)}") from None
    return redis.Redis.from_pool(pool)


#: redis-py's own way (which has no types).
_PACK: Any = PythonRespSerializer.pack


class _Packer(PythonRespSerializer):
    """Packs commands: in C, but those with large arguments in Python, which does not copy them.

    An XREAD over 256 streams has 516 small arguments; packing them in Python takes longer than all else of a wake-up.
    """

    def pack(self, *args: Any) -> Any:
        """The command as buffers to be sent one after another."""
        for arg in args:
            if isinstance(arg, (bytes, bytearray, memoryview)) and (len(arg) > _JOIN_BYTES or type(arg) is not bytes):
                return _PACK(self, *args)
        words = tuple(args[0].split()) if isinstance(args[0], str) else (args[0],)
        try:
            return [pack_command((*words, *args[1:]))]
        except TypeError:
            # What C does not know; in Python it has a text.
            return _PACK(self, *args)


def _packer() -> Any:
    encoder: Any = Encoder
    return _Packer(_JOIN_BYTES, encoder("utf-8", "strict", False).encode)


def describe(client: redis.Redis) -> str:
    """Where a client's server is, in words, without secrets."""
    kwargs = client.connection_pool.connection_kwargs
    if "path" in kwargs:
        return f"unix://{kwargs['path']}"
    scheme = "rediss" if "SSL" in client.connection_pool.connection_class.__name__ else "redis"
    return f"{scheme}://{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{kwargs.get('db', 0)}"


@contextmanager
def translated(client: redis.Redis | None = None) -> Iterator[None]:
    """Turn redis-py's exceptions into ours.

    Args:
        client: named in the text if given.

    Raises:
        StoreUnavailable: cannot be reached, timed out, is loading, or has no free connection.
        RecordUnreadable: a key of ours holds another type.
        StoreFull: out of memory.
        StoreUnfit: password, rights, read-only replica, cluster without a cluster client.
        TransportError: whatever else Redis answered.
    """
    try:
        yield
    except redis.WatchError:
        # Control flow of whoever watches; never leaves this package.
        raise
    except redis.RedisError as error:
        raise translate(error, describe(client) if client is not None else "Redis") from error


def translate(error: Exception, where: str = "Redis") -> TransportError:
    """Our error for one of redis-py's."""
    # Of a command in a pipeline it tells first which one that was.
    text = str(error).rpartition(_IN_A_PIPELINE)[2]
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreFull(f"{where} is out of memory and refuses writes (its maxmemory is reached)")
    if isinstance(error, (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)):
        return StoreUnfit(f"{where} refuses us: {text}. Check user, password and rights (ACL)")
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return StoreUnfit(f"{where} is a read-only replica; clawq needs the primary")
    if isinstance(error, _CLUSTER_ERRORS):
        return StoreUnfit(f"{where} is a node of a Redis Cluster that does not own our keys: {text}")
    if trouble := _tls_trouble(text):
        return StoreUnfit(f"{where} cannot be trusted with TLS: {trouble}")
    if isinstance(error, redis.TimeoutError):
        hint = " (TLS is asked of it; is this its TLS port?)" if where.find("rediss://") >= 0 else ""
        return StoreUnavailable(f"{where} did not answer in time: {text}{hint}")
    if isinstance(error, (redis.ConnectionError, redis.BusyLoadingError)):
        return StoreUnavailable(f"{where} cannot be reached: {text}")
    if text.startswith(("MISCONF", "NOREPLICAS", "MASTERDOWN", "TRYAGAIN", "BUSY ", "CLUSTERDOWN")):
        # The server is there but cannot write just now (disk full under an AOF, a replica away, a long script).
        return StoreUnavailable(f"{where} cannot serve us now: {text}")
    if text.startswith("WRONGTYPE"):
        return RecordUnreadable(
            f"{where}: a key of ours holds something of another type, which somebody else wrote: {text}. It is tried "
            "again until that key is deleted"
        )
    return TransportError(f"{where} answered: {error}")


def _tls_trouble(text: str) -> str | None:
    """What is wrong with a server's TLS, in words, from the text of the ssl module; None if that is not it."""
    if "Hostname mismatch" in text or "IP address mismatch" in text or "doesn't match" in text:
        return "its certificate is for another host. Use the name that is in the certificate, or have one made for this"
    if "certificate has expired" in text or "certificate is not yet valid" in text:
        return "its certificate has expired, or is not valid yet (or a clock is wrong). Have a new one made"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "its certificate is signed by nobody whom this machine knows. Name the file with the certificate of its "
            f"authority in {CA_VARIABLE}"
        )
    if "[SSL" in text or "SSL:" in text:
        return f"no TLS can be spoken with it ({text}). Is this its TLS port, and does it want a certificate of ours?"
    return None


def check_server(client: redis.Redis, role: str) -> tuple[int, ...]:
    """Make sure that a server can be used; returns its version.

    Args:
        client: made by `connect`.
        role: `broker` or `data`, for the text.

    Raises:
        StoreUnavailable: it cannot be reached.
        StoreUnfit: too old, wrong eviction policy, missing rights.
    """
    where = f"the {role} Redis at {describe(client)}"
    try:
        server = client.info("server")
        policy = client.info("memory").get("maxmemory_policy", "unknown")
    except redis.RedisError as error:
        raise translate(error, where) from error
    version = _version(str(server.get("redis_version", "0")))
    if version < OLDEST_VERSION:
        raise StoreUnfit(
            f"{where} is version {'.'.join(map(str, version))}; clawq needs {_dotted(OLDEST_VERSION)} or newer "
            f"(tested with {_dotted(TESTED_VERSION)} and newer). Use a newer Redis or Valkey, or let clawq start one"
        )
    if policy != "noeviction":
        raise StoreUnfit(
            f"{where} has maxmemory-policy {policy}: it would silently delete keys of clawq when memory runs out. "
            "Set `maxmemory-policy noeviction` (redis.conf, or `CONFIG SET maxmemory-policy noeviction`)"
        )
    return version


def memory_bytes(client: redis.Redis) -> tuple[int, int]:
    """What the server uses, and its maxmemory (0 if it has no limit)."""
    with translated(client):
        memory = client.info("memory")
    return int(memory["used_memory"]), int(memory.get("maxmemory", 0))


def max_memory_bytes(client: redis.Redis) -> int:
    """The server's maxmemory, 0 if it has no limit."""
    with translated(client):
        return int(client.info("memory").get("maxmemory", 0))


def memory_left_bytes(client: redis.Redis) -> int | None:
    """What the server may still take up to its maxmemory; None if it has no limit."""
    with translated(client):
        memory = client.info("memory")
    most = int(memory.get("maxmemory", 0))
    return max(0, most - int(memory.get("used_memory", 0))) if most else None


def socket_timeout_s(client: redis.Redis) -> float:
    """The longest wait for a reply of this client."""
    return float(client.connection_pool.connection_kwargs.get("socket_timeout") or 5.0)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
