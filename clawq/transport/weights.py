"""Weights in Redis: one immutable hash for each version, and a head that only ever grows.

Layout of `w:<version>`: `meta` (JSON: version, updates, metadata, size, digest, number of chunks) and `c0` .. `cn`, the
safetensors bytes in chunks of at most 1 MiB (one large bulk costs a server several times as much). New weights are
first written under a staging key with a time limit. Then one MULTI, watched by the publisher's claim, renames it,
moves the head in the control record and unlinks what is no longer kept. A crash before that leaves a staging key that
runs out; nobody can see half of it. A publisher that lost its claim changes nothing.

A reader gets a version by one HMGET (large ones by several: the hash never changes) and verifies length and digest.
Where this host has a key, a version carries a seal beside its meta, which names version and digest; readers with the
key take nothing that has no right one (clawq.transport.signing). Versions that go out of the newest K while somebody
wants them give WeightsGone: read the head again. Pinned versions are kept.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import redis
from safetensors import SafetensorError
from safetensors.numpy import load, save

from clawq.core import Weights
from clawq.errors import SignatureInvalid, TransportError, WeightsCorrupt, WeightsGone
from clawq.json_text import is_whole, parse_object
from clawq.transport.claims import Claim, watched
from clawq.transport.client import translated
from clawq.transport.keys import RunKeys
from clawq.transport.pins import Pins
from clawq.transport.signing import CONTROL_FIELDS, ControlSeal, host_seal
from clawq.transport.texts import parse_whole, readable, unreadable

#: Size of one hash field.
_CHUNK_BYTES = 1 << 20
#: Chunks sent in one pipeline; bounds the query buffer in the server.
_CHUNKS_AT_ONCE = 16
#: Weights that are larger, or say more of themselves, are none of ours: refused before they are fetched.
MAX_WEIGHTS_BYTES, _MOST_META_BYTES = 4_000_000_000, 1_000_000
_STAGING_TTL_S = 600
#: What a seal of weights is one of.
_KIND = "weights"
#: A reader that always comes too late for the head gives up after so many tries.
_FETCH_ATTEMPTS = 20


class WeightsPublisher:
    """The learner's end.

    Args:
        client: of the data server.
        keys: of the run.
        claim: the learner's claim; nothing is published without it.
        keep: newest versions kept beside pinned ones.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, claim: Claim, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest version must be kept")
        self._client: Any = client
        self._keys, self._claim, self._keep = keys, claim, keep
        self._pins = Pins(client, keys)
        self._seal, self._control_seal = host_seal(), ControlSeal(keys.tag)

    def publish(
        self,
        arrays: Mapping[str, Any],
        version: int,
        updates: int,
        metadata: Mapping[str, Any] | None = None,
        pin: str | None = None,
    ) -> None:
        """Make new weights visible, all at once.

        Args:
            arrays: name -> array or CPU tensor, all finite.
            version: larger than the head.
            updates: updates made so far.
            metadata: JSON-able facts.
            pin: a name under which the version is kept from the first moment on.

        Raises:
            WeightsCorrupt: an array holds values that are not finite; nothing was published.
            ClaimLost: somebody else publishes for this run now; nothing was published.
            TransportError: the head is already as high (and is something else); nothing was published.
            StoreUnavailable: unclear, or the claim lapsed; renew the claim if that is due and publish the same once
                more, which is success if it is there already.
            StoreFull: nothing was published.
        """
        blob = save(_checked(arrays, version))
        staging = self._keys.staging(secrets.token_hex(8))
        facts = {
            "version": version,
            "updates": updates,
            "metadata": dict(metadata or {}),
            "size_bytes": len(blob),
            "digest": _digest(blob),
            "chunks": -(-len(blob) // _CHUNK_BYTES),
        }
        meta = json.dumps(facts)
        moved = False
        try:
            self._stage(staging, blob, meta)
            watching = (self._keys.control, self._keys.pins)
            moved = watched(self._client, watching, lambda pipe: self._move(pipe, staging, version, meta.encode(), pin))
        finally:
            if not moved:
                self._drop(staging)

    def head(self) -> int:
        """The newest published version, 0 if there is none."""
        return _head(self._client, self._keys)

    def pin(self, version: int, tag: str) -> None:
        """See `Pins.pin`."""
        self._pins.pin(version, tag)

    def unpin(self, tag: str) -> None:
        """See `Pins.unpin`."""
        self._pins.unpin(tag)

    def pins(self) -> dict[str, int]:
        """Tag -> pinned version."""
        return self._pins.all()

    def _stage(self, staging: str, blob: bytes, meta: str) -> None:
        view = memoryview(blob)
        chunks = [view[start : start + _CHUNK_BYTES] for start in range(0, len(blob), _CHUNK_BYTES)]
        with translated(self._client):
            for first in range(0, max(1, len(chunks)), _CHUNKS_AT_ONCE):
                pipe = self._client.pipeline(transaction=False)
                for number, chunk in enumerate(chunks[first : first + _CHUNKS_AT_ONCE], first):
                    pipe.hset(staging, f"c{number}", chunk)
                pipe.hset(staging, mapping={"meta": meta, **self._seal.fields(_KIND, self._keys.tag, meta.encode())})
                pipe.expire(staging, _STAGING_TTL_S)
                pipe.execute()

    def _move(self, pipe: Any, staging: str, version: int, meta: bytes, pin: str | None) -> bool:
        """The MULTI: everything that makes a version visible. False if exactly this is published already."""
        self._claim.verify_in(pipe)
        control = pipe.hmget(self._keys.control, CONTROL_FIELDS)
        head, pinned, kept = self._standing(pipe)
        if version == head and pipe.hget(self._keys.weights(version), "meta") == meta:
            # An earlier try whose answer was lost; the digest in the meta says that the content is the same.
            return False
        if version <= head:
            raise TransportError(f"weights version {version} is not newer than the head ({head}); versions only grow")
        old = [each for each in kept[self._keep - 1 :] if each not in pinned]
        pipe.multi()
        pipe.rename(staging, self._keys.weights(version))
        pipe.persist(self._keys.weights(version))
        pipe.zadd(self._keys.versions, {str(version): version})
        pipe.hset(self._keys.control, mapping=self._control_seal.sealed(control, {"head": version}))
        if pin is not None:
            pipe.hset(self._keys.pins, pin, version)
        if old:
            pipe.zrem(self._keys.versions, *old)
            pipe.unlink(*(self._keys.weights(each) for each in old))
        pipe.execute()
        return True

    def _standing(self, pipe: Any) -> tuple[int, set[int], list[int]]:
        """The head, the pinned versions, and those that are kept, newest first; what is no version counts for none."""
        pinned = set(readable(pipe.hgetall(self._keys.pins), parse_whole).values())
        members = dict.fromkeys(pipe.zrange(self._keys.versions, 0, -1))
        kept = sorted(readable({each: each for each in members}, parse_whole).values(), reverse=True)
        try:
            head = parse_whole(pipe.hget(self._keys.control, "head"))
        except ValueError:
            head = -1
        # The record is ours to mend: the head is kept, so one that is not was written by somebody else.
        return head if head in kept else max(kept, default=0), pinned, kept

    def _drop(self, staging: str) -> None:
        try:
            with translated(self._client):
                self._client.unlink(staging)
        except TransportError:
            return  # it runs out by itself


class WeightsReader:
    """The end of actors and evaluators; a core.WeightsSource."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._keys = keys
        self._seal = host_seal()

    def head(self) -> int:
        """The newest published version, 0 if there is none."""
        return _head(self._client, self._keys)

    def fetch_newer(self, than: int) -> Weights | None:
        """The head if its version is larger than `than`, verified; else None.

        Raises:
            WeightsCorrupt: it cannot be used.
            StoreUnavailable: go on with what you have and try again later.
        """
        for _ in range(_FETCH_ATTEMPTS):
            head = self.head()
            if head <= than:
                return None
            try:
                return self.fetch(head)
            except WeightsGone:
                continue  # published and already replaced while we looked
        raise WeightsGone(f"weights were replaced {_FETCH_ATTEMPTS} times faster than they could be fetched")

    def fetch(self, version: int) -> Weights:
        """That version, verified.

        Raises:
            WeightsGone: it is not kept (any more).
            WeightsCorrupt: it cannot be used.
        """
        meta, chunks = self._chunks(version, 0)
        if meta is None:
            raise WeightsGone(f"weights version {version} is not kept")
        facts = _facts(meta, version)
        # A chunk that is not there or not whole ends it: what the meta claims must not decide how often we ask.
        while len(chunks) < facts["chunks"] and all(chunk and len(chunk) == _CHUNK_BYTES for chunk in chunks):
            meta, more = self._chunks(version, len(chunks))
            if meta is None:
                raise WeightsGone(f"weights version {version} went away while it was fetched")
            chunks += more
        return _assemble(facts, chunks[: facts["chunks"]], version)

    def _chunks(self, version: int, first: int) -> tuple[bytes | None, list[bytes | None]]:
        """The meta and the next few chunks, by one command. WeightsCorrupt if they are not sealed as they must be."""
        names = ["meta", "seal", *(f"c{number}" for number in range(first, first + _CHUNKS_AT_ONCE))]
        with translated(self._client):
            meta, seal, *chunks = self._client.hmget(self._keys.weights(version), names)
        if meta is not None:
            try:
                self._seal.check(seal, _KIND, self._keys.tag, meta)
            except SignatureInvalid as error:
                raise WeightsCorrupt(f"weights version {version} are refused: {error}") from None
        return meta, chunks


def _head(client: Any, keys: RunKeys) -> int:
    with translated(client):
        head = client.hget(keys.control, "head")
    try:
        return parse_whole(head)
    except ValueError as error:
        raise unreadable("the head of the weights, in the control record,", error) from None


def _checked(arrays: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Contiguous arrays, all finite."""
    checked = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in checked.items():
        if np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            bad = int(array.size - np.count_nonzero(np.isfinite(array)))
            raise WeightsCorrupt(f"weights version {version} were not published: {name} has {bad} values not finite")
    return checked


def _facts(meta: bytes, version: int) -> dict[str, Any]:
    try:
        if len(meta) > _MOST_META_BYTES:
            raise ValueError(f"a description of {len(meta)} bytes")
        facts = parse_object(meta)
        chunks, size = facts["chunks"], facts["size_bytes"]
        numbers = (chunks, size, facts["updates"], facts["version"])
        sound = all(map(is_whole, numbers)) and facts["version"] == version and chunks == -(-size // _CHUNK_BYTES)
        if sound and size <= MAX_WEIGHTS_BYTES and isinstance(facts["metadata"], dict) and facts["digest"]:
            return facts
    except (KeyError, ValueError) as error:
        raise WeightsCorrupt(f"weights version {version} cannot be read: {error!r}") from error
    raise WeightsCorrupt(f"weights version {version} cannot be read: their description makes no sense")


def _assemble(facts: Mapping[str, Any], chunks: list[bytes | None], version: int) -> Weights:
    blob = b"".join(chunk or b"" for chunk in chunks)
    if len(blob) != facts["size_bytes"] or _digest(blob) != facts["digest"]:
        raise WeightsCorrupt(f"weights version {version} fail their digest")
    try:
        return Weights(version, load(blob), facts["updates"], facts["metadata"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise WeightsCorrupt(f"weights version {version} cannot be read: {error}") from error


def _digest(blob: bytes) -> str:
    return hashlib.blake2b(blob, digest_size=16).hexdigest()
