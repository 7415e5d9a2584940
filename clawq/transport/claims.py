"""Claims: exclusive, fenced ownership with a time limit that the Redis server keeps.

A claim is one key, SET NX PX with a random token. Whoever acts under a claim either proves it inside the same MULTI
(`fenced`), or writes under ids that a later holder makes unusable (a slot's epoch). So a process that was stopped for
longer than the limit and then goes on cannot do harm, even if it does not know yet that it lost the claim.

A claim names the process that took it. On the machine of that process nobody waits for the limit once it has ended:
the next one takes the claim over.

No Lua: renewing is WATCH, GET, MULTI. Only the server's clock counts.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import redis

from clawq.errors import ClaimHeld, ClaimLost, StoreUnavailable
from clawq.json_text import parse_object
from clawq.procfs import Identity
from clawq.transport.client import describe, translated

#: Renew when this share of the time limit has passed.
_RENEW_SHARE = 1 / 3
#: A MULTI under WATCH is tried again so often when somebody touched the watched keys.
_ATTEMPTS = 20
_LONGEST_HOLDER = 300


class Claim:
    """A claim that we took. Made by `take`.

    Attributes:
        key: the Redis key.
        holder: who we said that we are.
        ttl_s: time limit without renewal, seconds.
    """

    def __init__(self, client: redis.Redis, key: str, holder: str, ttl_s: float) -> None:
        self.key, self.holder, self.ttl_s = key, holder, ttl_s
        self._client: Any = client
        me = Identity.of(os.getpid())
        process = {} if me is None else {"process": asdict(me)}
        self._value = json.dumps({"token": secrets.token_hex(16), "holder": holder, **process}).encode()
        self._renewed_at = time.monotonic()

    @classmethod
    def take(cls, client: redis.Redis, key: str, holder: str, ttl_s: float) -> "Claim":
        """Take a claim that nobody holds, or whose holder was a process of this machine that has ended.

        Args:
            client: of the data server.
            key: `RunKeys.claim(...)`.
            holder: host, process and purpose in words, shown to whoever is refused.
            ttl_s: the claim runs out when it is not renewed for so long.

        Raises:
            ClaimHeld: somebody holds it.
        """
        claim = cls(client, key, holder, ttl_s)
        with translated(client):
            # After an unclear failure of an earlier try the key may hold a token of nobody: it runs out by itself.
            if client.set(key, claim._value, nx=True, px=claim._ttl_ms):
                return claim
            found = client.get(key)
        if is_free(found) and claim._watched(partial(claim._succeed_once, found)):
            return claim
        raise ClaimHeld(key.rpartition("claim:")[2], _holder_of(found))

    @classmethod
    def seize(cls, client: redis.Redis, key: str, holder: str, ttl_s: float) -> "Claim | None":
        """Take a claim away from whoever holds it, who finds out by ClaimLost; None if nobody holds it."""
        claim = cls(client, key, holder, ttl_s)
        with translated(client):
            return claim if client.set(key, claim._value, xx=True, px=claim._ttl_ms) else None

    def _succeed_once(self, found: Any, pipe: Any) -> bool:
        # Somebody else may have been quicker.
        if pipe.get(self.key) not in (None, found):
            return False
        pipe.multi()
        pipe.set(self.key, self._value, px=self._ttl_ms)
        pipe.execute()
        return True

    @property
    def renewal_due(self) -> bool:
        """Whether a third of the limit has passed since the last renewal."""
        return time.monotonic() - self._renewed_at > self.ttl_s * _RENEW_SHARE

    def renew(self) -> bool:
        """Hold it for another `ttl_s`; returns True if it had lapsed and nobody had taken it, so that we took it anew.

        A lapse means that the server came back empty, or that we were stopped for longer than the limit. In between
        somebody may have held it: whoever goes on must not rely on what he knew.

        Raises:
            ClaimLost: somebody else holds it.
        """
        started = time.monotonic()
        lapsed = self._watched(self._renew_once)
        self._renewed_at = started
        return lapsed

    def _renew_once(self, pipe: Any) -> bool:
        value = pipe.get(self.key)
        if value is not None and value != self._value:
            raise ClaimLost(f"{self.key.rpartition('claim:')[2]} was taken over by {_holder_of(value)}")
        pipe.multi()
        if value is None:
            pipe.set(self.key, self._value, px=self._ttl_ms)
        else:
            # Unlike SET, this works on a server that is out of memory.
            pipe.pexpire(self.key, self._ttl_ms)
        pipe.execute()
        return value is None

    def is_held(self) -> bool:
        """Whether it was ours when the server answered; what must not be done without it goes through `fenced`."""
        with translated(self._client):
            return bool(self._client.get(self.key) == self._value)

    def release(self) -> None:
        """Give it back, if it is still ours. Idempotent."""
        self._watched(self._release_once)

    def _release_once(self, pipe: Any) -> bool:
        if pipe.get(self.key) != self._value:
            return False
        pipe.multi()
        pipe.delete(self.key)
        pipe.execute()
        return True

    def verify_in(self, pipe: Any) -> None:
        """Watch the claim in `pipe` and make sure that it is ours; a MULTI that follows fails if it changes hands.

        The pipeline stays in immediate mode: read what else is needed, then call `pipe.multi()`.

        Raises:
            ClaimLost: somebody else holds it.
            StoreUnavailable: nobody holds it (the server came back empty, or we were stopped): `renewal_due` is set;
                renew, see whether it had lapsed, and try again.
        """
        pipe.watch(self.key)
        value = pipe.get(self.key)
        if value is None:
            self._renewed_at = -math.inf
            raise StoreUnavailable(f"the claim on {self.key.rpartition('claim:')[2]} lapsed; it must be renewed first")
        if value != self._value:
            raise ClaimLost(f"{self.key.rpartition('claim:')[2]} is held by {_holder_of(value)}")

    def fenced(self, queue: Callable[[Any], Any]) -> None:
        """Execute the commands that `queue` puts into a MULTI, only while the claim is ours.

        Raises:
            ClaimLost, StoreUnavailable: it is not ours (see `verify_in`); nothing was executed.
        """

        def once(pipe: Any) -> bool:
            self.verify_in(pipe)
            pipe.multi()
            queue(pipe)
            pipe.execute()
            return True

        self._watched(once)

    def _watched(self, once: Callable[[Any], bool]) -> bool:
        return watched(self._client, (self.key,), once)

    @property
    def _ttl_ms(self) -> int:
        return max(1, int(self.ttl_s * 1000))


def holder_of(client: Any, key: str) -> str | None:
    """Who holds the claim at `key`, in words; None if nobody does who may still live."""
    with translated(client):
        value = client.get(key)
    return None if is_free(value) else _holder_of(value)


def is_free(value: Any) -> bool:
    """Whether a claim with that value (None: there is no key) can be taken: nobody has it, or a process that ended.

    Only of our own processes on this machine is that known; whoever else has it, has it until it runs out.
    """
    if value is None:
        return True
    try:
        process = Identity.from_json(parse_object(value)["process"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
    # Other users' processes may be hidden from us.
    seen = bool(process.boot and process.namespace) and process.here and process.uid == os.getuid()
    return seen and not process.alive


def watched(client: Any, keys: tuple[str, ...], once: Callable[[Any], bool]) -> bool:
    """Run `once` under WATCH of `keys`, again whenever one of them changed before its MULTI was executed."""
    with translated(client):
        for _ in range(_ATTEMPTS):
            with client.pipeline(transaction=True) as pipe:
                pipe.watch(*keys)
                try:
                    return once(pipe)
                except redis.WatchError:
                    continue
    raise StoreUnavailable(f"{describe(client)}: {', '.join(keys)} kept changing; {_ATTEMPTS} tries were not enough")


def _holder_of(value: Any) -> str:
    if value is None:
        return "nobody (it ran out)"
    try:
        return str(parse_object(value)["holder"])[:_LONGEST_HOLDER]
    except (ValueError, KeyError):
        return "somebody who is not clawq"
