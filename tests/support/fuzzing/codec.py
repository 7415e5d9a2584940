"""A whole fragment as it comes from a stream: as it is, and with its checksum made right."""

import itertools
import struct
from typing import Any

import numpy as np
import xxhash

from clawq.errors import CodecError, FragmentTooLarge
from clawq.testing.experience import TrueSlot
from clawq.transport.codec import decode, encode, peek_meta
from clawq.types import Array, Fragment

#: Bytes of the head that say what follows and are checked by themselves: magic, version, zero, checksum.
_HEAD = 16


def one_input(data: bytes) -> None:
    """Decode, and what is accepted must come back equal."""
    for payload in (data, sealed(data)):
        try:
            peek_meta(payload)
            fragment = decode(payload)
        except CodecError:
            continue
        check_sense(fragment)
        check_round_trip(fragment)


def sealed(data: bytes) -> bytes:
    """The same with a head as a hostile writer would make it."""
    body = data[_HEAD:]
    return b"CLQF" + struct.pack("<HHQ", 1, 0, xxhash.xxh3_64_intdigest(body)) + body


def seeds() -> list[bytes]:
    """A few small fragments."""
    made = (fragment(steps, envs) for steps, envs in ((1, 1), (3, 2), (7, 3)))
    return [bytes(encode(one)) for one in made]


def fragment(steps: int, envs: int, seed: int = 0) -> Fragment:
    """A small good fragment."""
    return TrueSlot("slot-1", envs, np.random.default_rng(seed), itertools.count(1)).fragment(steps, 5)[0]


def check_sense(fragment: Fragment) -> None:
    """What later stages rely on."""
    lead = (fragment.meta.steps, fragment.meta.envs)
    assert fragment.reward.shape == fragment.valid.shape == fragment.action.shape[:2] == lead
    assert all(array.shape[:2] == (lead[0] + 1, lead[1]) for array in fragment.obs.values())
    assert all(len(array) == np.count_nonzero(fragment.boundary) for array in fragment.final_obs.values())


def check_round_trip(fragment: Fragment) -> None:
    """decode(encode(x)) == x."""
    try:
        again = decode(bytes(encode(fragment)))
    except FragmentTooLarge:
        return  # float32 in a header becomes float64: only what nobody of us wrote gets larger
    assert repr(again.meta) == repr(fragment.meta)
    for ours, theirs in zip(arrays_of(again), arrays_of(fragment), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


def arrays_of(fragment: Fragment) -> list[Array]:
    """All columns."""
    groups: tuple[Any, ...] = (fragment.obs, fragment.final_obs, fragment.extras)
    named = [array for group in groups for _, array in sorted(group.items())]
    single = [fragment.action, fragment.reward, fragment.terminated, fragment.truncated, fragment.valid]
    return [*named, *single]
