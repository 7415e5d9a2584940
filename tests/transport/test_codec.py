import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from clawq.errors import CodecError, CorruptFragment, FragmentTooLarge, UnsupportedWireVersion
from clawq.testing.experience import SPEC, TrueSlot
from clawq.transport import codec
from clawq.transport.codec import MAX_FRAGMENT_BYTES, WIRE_VERSION, decode, encode, peek_meta
from clawq.types import Array, EpisodeSummary, Fragment, FragmentMeta, Provenance, Voided


def made(steps: int = 7, envs: int = 3, seed: int = 0) -> Fragment:
    slot = TrueSlot("slot-1", envs, np.random.default_rng(seed), itertools.count(1))
    fragment, _ = slot.fragment(steps, weights_version=5, voided=(Voided(envs - 1, 2, 3),))
    episodes = (EpisodeSummary(0, 50, -12.5, 1.0), EpisodeSummary(envs - 1, 7, 3.0, float("nan")))
    meta = replace(fragment.meta, dropped={"full": 12, "stale": 1}, episodes=episodes, created_ms=1_700_000_000_000)
    extras = {"log_prob": np.arange(steps * envs, dtype=np.float32).reshape(steps, envs)}
    return replace(fragment, meta=meta, extras=extras)


GOOD = bytes(encode(made()))


def hand_reach(steps: int = 64, envs: int = 16) -> Fragment:
    """As real HandReachDense-v3 rollouts: obs 63 + 15 + 15, action 20, episodes of 50 steps."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    truncated = np.zeros((steps, envs), bool)
    truncated[49::50] = True
    ends = int(truncated.sum())
    sizes = {"observation": 63, "achieved_goal": 15, "desired_goal": 15}
    episodes = tuple(EpisodeSummary(env % envs, 50, -9.5, 0.0) for env in range(ends))
    meta = FragmentMeta("ab" * 16, "host/w", "host-w-0", 1_795_969_696_284, 9, "0" * 16, 1, 8, steps, envs, 9999)
    return Fragment(
        replace(meta, episodes=episodes),
        {key: normal(steps + 1, envs, size) for key, size in sizes.items()},
        normal(steps, envs, 20),
        normal(steps, envs),
        np.zeros((steps, envs), bool),
        truncated,
        np.ones((steps, envs), bool),
        {key: normal(ends, size) for key, size in sizes.items()},
    )


def columns_of(fragment: Fragment) -> Iterator[tuple[str, Array]]:
    for group in ("obs", "final_obs", "extras"):
        for key, array in getattr(fragment, group).items():
            yield f"{group}.{key}", array
    for name in ("action", "reward", "terminated", "truncated", "valid"):
        yield name, getattr(fragment, name)


def assert_same(got: Fragment, expected: Fragment) -> None:
    assert repr(got.meta) == repr(expected.meta)  # repr, because nan is not equal to itself
    ours, theirs = dict(columns_of(got)), dict(columns_of(expected))
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@given(steps=st.integers(1, 20), envs=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_what_is_encoded_comes_back_equal(steps: int, envs: int, seed: int) -> None:
    fragment = made(steps, envs, seed)
    payload = encode(fragment)
    assert_same(decode(bytes(payload)), fragment)
    assert repr(peek_meta(payload)) == repr(fragment.meta)


def test_a_fragment_without_episode_ends_has_empty_final_observations() -> None:
    fragment = made(1, 1)
    quiet = replace(
        fragment,
        terminated=np.zeros((1, 1), bool),
        truncated=np.zeros((1, 1), bool),
        final_obs={key: np.empty((0, *spec.shape), spec.dtype) for key, spec in SPEC.obs.items()},
    )
    assert_same(decode(encode(quiet)), quiet)


def test_nan_and_inf_travel_unchanged_because_the_reader_decides() -> None:
    fragment = made()
    fragment.reward[0, 0], fragment.reward[1, 1] = np.nan, -np.inf
    assert_same(decode(encode(fragment)), fragment)


def test_columns_in_any_memory_order_are_packed_right() -> None:
    fragment = made()
    strided = replace(
        fragment,
        action=np.asfortranarray(fragment.action),
        reward=np.repeat(fragment.reward, 2, axis=1)[:, ::2],
        valid=np.asfortranarray(fragment.valid),
    )
    assert bytes(encode(strided)) == bytes(encode(fragment))


def test_decoded_columns_are_read_only_views_of_the_payload_even_of_a_mutable_one() -> None:
    payload = encode(made())
    whole = np.frombuffer(payload, np.uint8)
    fragment = decode(payload)
    for name, array in columns_of(fragment):
        assert not array.flags.writeable, name
        if name not in ("terminated", "truncated", "valid"):
            assert np.shares_memory(array, whole), name


def test_a_dtype_that_the_wire_does_not_carry_is_refused_when_packing() -> None:
    fragment = made()
    with pytest.raises(ValueError, match=r"extra\.x is complex128"):
        encode(replace(fragment, extras={"x": np.zeros((7, 3), complex)}))


def test_an_oversize_fragment_is_refused_with_what_to_do() -> None:
    with pytest.raises(FragmentTooLarge, match="fragment_bytes"):
        encode(hand_reach(steps=640))


def test_another_wire_version_is_told_from_garbage() -> None:
    other = bytearray(GOOD)
    struct.pack_into("<H", other, 4, WIRE_VERSION + 1)
    for read in (decode, peek_meta):
        with pytest.raises(UnsupportedWireVersion, match="one version of clawq"):
            read(other)
    assert UnsupportedWireVersion.reason == "wire_version"
    assert CorruptFragment.reason == "corrupt"


def test_every_single_flipped_bit_is_noticed() -> None:
    payload = bytearray(encode(made(2, 1)))
    for bit in range(len(payload) * 8):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            decode(payload)
        payload[bit // 8] ^= 1 << bit % 8
    decode(payload)


@pytest.mark.parametrize("length", [0, 1, 15, 19, 20, 100, len(GOOD) - 1, len(GOOD) + 1])
def test_cut_off_and_overlong_payloads_are_corrupt(length: int) -> None:
    with pytest.raises(CorruptFragment):
        decode((GOOD + b"\0")[:length])


def test_a_payload_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(CorruptFragment, match="at most 100"):
        decode(GOOD, max_bytes=100)
    with pytest.raises(CorruptFragment, match="at most"):
        peek_meta(bytes(MAX_FRAGMENT_BYTES + 1))


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_never_raise_anything_but_codec_errors(garbage: bytes) -> None:
    for payload in (garbage, GOOD[:4] + garbage, GOOD[:20] + garbage, sealed(garbage, b"")):
        with pytest.raises(CodecError):
            decode(payload)


def sealed(header: bytes, columns: bytes) -> bytes:
    """Any header with a right length and checksum, as only a malicious or broken writer would make it."""
    body = struct.pack("<I", len(header)) + header + columns
    return GOOD[:8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body


def split(payload: bytes) -> tuple[Any, bytes]:
    """The header as plain objects, and what follows it."""
    (length,) = struct.unpack_from("<I", payload, 16)
    return msgspec.msgpack.decode(payload[20 : 20 + length]), payload[20 + length :]


def resealed(header: Any) -> bytes:
    """GOOD with another header in front of its columns (which move to their new aligned place)."""
    (length,) = struct.unpack_from("<I", GOOD, 16)
    first = -(-(20 + length) // 64) * 64
    encoded = msgspec.msgpack.encode(header)
    return sealed(encoded, bytes(-(20 + len(encoded)) % 64) + GOOD[first:])


def test_the_forged_header_of_these_tests_is_otherwise_right() -> None:
    header, _ = split(GOOD)
    assert_same(decode(resealed(header)), made())


numbers = st.integers(-(2**63), 2**64 - 1)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
shapes = st.lists(st.integers(0, 2**40) | st.integers(0, 9), max_size=9)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_forged_header_gives_a_codec_error_or_a_consistent_fragment(data: st.DataObject) -> None:
    (meta, columns), _ = split(GOOD)
    if data.draw(st.booleans()):
        meta[data.draw(st.sampled_from(sorted(meta)))] = data.draw(anything)
    else:
        column = data.draw(st.sampled_from(columns))
        part = data.draw(st.integers(0, 2))
        names = st.sampled_from(["action", "flags", "obs.x", "final.state", "extra.y", ".", "float64", "object", "|O"])
        column[part] = data.draw(anything | (shapes if part == 2 else names))
    try:
        fragment = decode(resealed([meta, columns]))
    except CodecError:
        return
    lead = (fragment.meta.steps, fragment.meta.envs)
    assert fragment.reward.shape == fragment.valid.shape == lead
    assert all(len(array) == np.count_nonzero(fragment.boundary) for array in fragment.final_obs.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("envs", -1), ("steps", 8), ("envs", 2**62), ("epoch", -1), ("seq", 2**63),
        ("created_ms", 2**64 - 1), ("dropped", {"full": -1}), ("dropped", [1]), ("slot", 7), ("weights_version", 1.5),
        ("run", None),
        ("episodes", [{"env": 99, "length": 1, "episode_return": 0.0, "success": 0.0}]),
        ("voided", [{"env": 0, "seq": -1, "t": 0}]),
    ],
)  # fmt: skip
def test_a_meta_out_of_range_is_corrupt(field: str, value: Any) -> None:
    (meta, columns), _ = split(GOOD)
    meta[field] = value
    with pytest.raises(CorruptFragment):
        decode(resealed([meta, columns]))


def test_a_huge_claimed_shape_allocates_nothing() -> None:
    (meta, columns), _ = split(GOOD)
    columns[0][2] = [4_000_000] * 8
    with pytest.raises(CorruptFragment, match="fit"):
        decode(resealed([meta, columns]))
    columns[0][2] = [0] + [4_000_000] * 7
    with pytest.raises(CorruptFragment, match="fit"):
        decode(resealed([meta, columns]))


def test_a_flag_that_does_not_exist_is_corrupt() -> None:
    fragment = made()
    fragment.valid.view(np.uint8)[0, 0] = 3
    with pytest.raises(CorruptFragment, match="flag"):
        decode(encode(fragment))


def test_a_hand_fragment_costs_at_most_480_bytes_per_transition() -> None:
    assert len(encode(hand_reach())) <= 480 * 64 * 16


def test_a_header_of_an_older_version_has_no_provenance_and_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fragment = made(3, 2, 0)
    fragment = replace(fragment, meta=replace(fragment.meta, made_by=Provenance("host", "point", "0.2", "abc123")))
    assert decode(bytes(encode(fragment))).meta.made_by == fragment.meta.made_by
    # Given a writer that knows nothing of it, and one that knows something more
    plain = codec._encoder
    known = [name for name in FragmentMeta.__dataclass_fields__ if name != "made_by"]
    for extra in ({}, {"made_by": {"host": "h", "of_the_future": 1}, "of_the_future": [1]}):

        class Older:
            @staticmethod
            def encode(header: Any, extra: Any = extra) -> bytes:
                return plain.encode(({name: getattr(header[0], name) for name in known} | extra, header[1]))

        monkeypatch.setattr(codec, "_encoder", Older)
        found = decode(bytes(encode(fragment))).meta
        assert found.made_by == Provenance(host="h" if extra else "")
        assert repr(replace(found, made_by=fragment.meta.made_by)) == repr(fragment.meta)
