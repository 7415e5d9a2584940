"""A Redis server's state in words, from its own INFO: for people who look after it."""

from typing import Any

import redis

from clawq.amounts import bytes_text
from clawq.transport.client import check_server, translated


def health(client: redis.Redis, role: str) -> list[tuple[str, str]]:
    """Lines of (what, words) about the server that is the `broker` or the `data` server.

    Raises:
        StoreUnavailable: it does not answer.
        StoreUnfit: it cannot be used as it is.
    """
    version = check_server(client, role)
    untyped: Any = client
    with translated(client):
        facts: dict[str, Any] = untyped.info()
    return [
        ("version", ".".join(map(str, version))),
        ("memory", _memory(facts)),
        ("when full", f"{facts['maxmemory_policy']} (writes are refused, nothing is deleted)"),
        ("clients", f"{facts['connected_clients']} connected, {facts.get('blocked_clients', 0)} of them waiting"),
        ("kept", _persistence(facts)),
        ("up for", _duration(int(facts["uptime_in_seconds"]))),
    ]


def _memory(facts: dict[str, Any]) -> str:
    used, most = int(facts["used_memory"]), int(facts.get("maxmemory", 0))
    limit = f"{bytes_text(most)} at most" if most else "no limit"
    return f"{bytes_text(used)} used, {bytes_text(int(facts['used_memory_peak']))} at the peak, {limit}"


def _persistence(facts: dict[str, Any]) -> str:
    if not int(facts.get("aof_enabled", 0)):
        return "in memory only"
    state = facts.get("aof_last_write_status", "unknown")
    return "on disk (append-only file)" if state == "ok" else f"on disk, but the last write was not: {state}"


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


__all__ = ["health"]
