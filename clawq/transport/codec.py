"""Fragments as bytes: a small header, then raw columns. No pickle; every bad byte is told apart from a good fragment.

Layout (little endian):

    0   magic      4 bytes, "CLQF"
    4   version    u16, WIRE_VERSION
    6   zero       u16
    8   checksum   u64, XXH3-64 of everything that follows
    16  header     u32, its length; then the header itself: msgpack
    ..  columns    raw, C order, each at the next multiple of 64 bytes, in the order in which the header names them

The flags terminated (1), truncated (2) and valid (4) share one uint8 column. `decode` gives read-only views into the
payload; it copies nothing but the flags. Sizes are checked before anything is looked at, and nothing is allocated by a
size that the wire claims. Whatever the bytes are, `decode` either returns a consistent fragment or raises
UnsupportedWireVersion or CorruptFragment.

What it does not check: whether the fragment fits the run and its env spec. That is for the reader of the stream.
"""

import struct
from math import prod
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import xxhash

from clawq.errors import CorruptFragment, FragmentTooLarge, UnsupportedWireVersion
from clawq.types import Array, Fragment, FragmentMeta, Obs

#: Grows when a reader of the old layout could not read the new one.
WIRE_VERSION = 1
#: Most bytes of one fragment (DESIGN §1).
MAX_FRAGMENT_BYTES = 4_000_000

_MAGIC = b"CLQF"
_HEAD = struct.Struct("<4sHHQI")
#: The checksum covers what follows it.
_CHECKED_FROM = 16
_ALIGN = 64
_MAX_HEADER_BYTES = 64 * 1024
_MAX_COLUMNS = 256
_DTYPES = {name: np.dtype(name) for name in ("float32", "uint8", "float16", "float64", "int32", "int64")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Bits of the flags column: terminated 1, truncated 2, valid 4.
_ONE, _TWO, _ENDS, _ALL_FLAGS = np.uint8(1), np.uint8(2), np.uint8(3), 7
_LARGEST_INT = 2**63 - 1

Payload: TypeAlias = bytes | bytearray | memoryview


class _Column(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One array: `name` is `action`, `reward`, `flags`, or a key with one of the prefixes below."""

    name: str
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAGMENT_BYTES)], ...], msgspec.Meta(max_length=8)]


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The meta, as a map by its field names, and the columns."""

    meta: FragmentMeta
    columns: Annotated[list[_Column], msgspec.Meta(max_length=_MAX_COLUMNS)]


_OBS, _FINAL, _EXTRA = "obs.", "final.", "extra."
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode(fragment: Fragment) -> bytearray:
    """One fragment as bytes.

    Args:
        fragment: arrays in any memory order; their dtypes must be ones of the wire.

    Raises:
        FragmentTooLarge: over MAX_FRAGMENT_BYTES.
        ValueError: a dtype that the wire does not carry, or a name that is too long.
    """
    columns = _columns_of(fragment)
    described = [(name, _NAMES[array.dtype], array.shape) for name, array in columns]
    header = _encoder.encode((fragment.meta, described))
    if len(header) > _MAX_HEADER_BYTES:
        raise FragmentTooLarge(f"the header of a fragment has {len(header)} bytes; at most {_MAX_HEADER_BYTES} travel")
    offset = _HEAD.size + len(header)
    starts = []
    for _, array in columns:
        offset = _aligned(offset)
        starts.append(offset)
        offset += array.nbytes
    if offset > MAX_FRAGMENT_BYTES:
        raise FragmentTooLarge(
            f"a fragment of {fragment.meta.steps} steps of {fragment.meta.envs} envs has {offset} bytes; at most "
            f"{MAX_FRAGMENT_BYTES} travel in one. Send shorter ones (actors.fragment_bytes) or use fewer envs"
        )
    payload = bytearray(offset)
    payload[_HEAD.size : _HEAD.size + len(header)] = header
    for start, (_, array) in zip(starts, columns, strict=True):
        np.copyto(np.ndarray(array.shape, array.dtype, payload, start), array)
    _HEAD.pack_into(payload, 0, _MAGIC, WIRE_VERSION, 0, 0, len(header))
    checksum = xxhash.xxh3_64_intdigest(memoryview(payload)[_CHECKED_FROM:])
    _HEAD.pack_into(payload, 0, _MAGIC, WIRE_VERSION, 0, checksum, len(header))
    return payload


def decode(payload: Payload, max_bytes: int = MAX_FRAGMENT_BYTES) -> Fragment:
    """The fragment in these bytes, as read-only views into them.

    Args:
        payload: what `encode` made; it must stay unchanged while the fragment is used.
        max_bytes: longer payloads are refused unread.

    Raises:
        UnsupportedWireVersion: made by another version of clawq.
        CorruptFragment: anything else that is not a fragment.
    """
    view = memoryview(payload).toreadonly()
    header, offset = _read_header(view, max_bytes, check=True)
    arrays = _views(view, header.columns, offset)
    return _assemble(header, arrays)


def peek_meta(payload: Payload) -> FragmentMeta:
    """The meta alone, without looking at the columns or verifying the checksum.

    Raises:
        UnsupportedWireVersion, CorruptFragment: as `decode`.
    """
    header, _ = _read_header(memoryview(payload), MAX_FRAGMENT_BYTES, check=False)
    return header.meta


def _columns_of(fragment: Fragment) -> list[tuple[str, Array]]:
    flags = fragment.valid.view(np.uint8) << _TWO
    flags |= fragment.truncated.view(np.uint8) << _ONE
    flags |= fragment.terminated.view(np.uint8)
    columns: list[tuple[str, Array]] = [(_OBS + key, array) for key, array in fragment.obs.items()]
    columns += [("action", fragment.action), ("reward", fragment.reward), ("flags", flags)]
    columns += [(_FINAL + key, array) for key, array in fragment.final_obs.items()]
    columns += [(_EXTRA + key, array) for key, array in fragment.extras.items()]
    for name, array in columns:
        if array.dtype not in _NAMES:
            raise ValueError(f"{name} is {array.dtype}; the wire carries {', '.join(_DTYPES)}")
    return columns


def _check_meta(meta: FragmentMeta) -> None:
    """Raise CorruptFragment unless the numbers make sense by themselves."""
    counts = (meta.epoch, meta.seq, meta.seed, meta.weights_version, meta.produced, meta.created_ms, meta.life)
    if min(counts) < 0 or max(counts) > _LARGEST_INT or min(meta.dropped.values(), default=0) < 0:
        raise CorruptFragment("a number in the header is out of range")
    if not (0 < meta.steps <= MAX_FRAGMENT_BYTES and 0 < meta.envs <= MAX_FRAGMENT_BYTES):
        raise CorruptFragment(f"{meta.steps} steps of {meta.envs} envs")
    for episode in meta.episodes:
        if not (0 <= episode.env < meta.envs and 0 <= episode.length <= _LARGEST_INT):
            raise CorruptFragment("an episode summary is out of range")
    for void in meta.voided:
        if not (0 <= void.env < meta.envs and 0 <= void.seq <= _LARGEST_INT and 0 <= void.t <= _LARGEST_INT):
            raise CorruptFragment("a notice of void rows is out of range")


def _read_header(view: memoryview, max_bytes: int, check: bool) -> tuple[_Header, int]:
    """The validated header and where the columns begin."""
    if view.nbytes > max_bytes:
        raise CorruptFragment(f"{view.nbytes} bytes; a fragment has at most {max_bytes}")
    if view.nbytes < _HEAD.size:
        raise CorruptFragment(f"only {view.nbytes} bytes: cut off")
    magic, version, zero, checksum, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptFragment("it does not begin as a fragment")
    if version != WIRE_VERSION:
        raise UnsupportedWireVersion(
            f"wire version {version}; this clawq reads version {WIRE_VERSION}. Use one version of clawq on all machines"
        )
    end = _HEAD.size + length
    if zero or length > _MAX_HEADER_BYTES or end > view.nbytes:
        raise CorruptFragment(f"a header of {length} bytes in {view.nbytes} bytes: cut off or garbled")
    if check and xxhash.xxh3_64_intdigest(view[_CHECKED_FROM:]) != checksum:
        raise CorruptFragment("the checksum is wrong")
    try:
        header = _decoder.decode(view[_HEAD.size : end])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptFragment(f"the header cannot be read: {error}") from None
    _check_meta(header.meta)
    return header, end


def _views(view: memoryview, columns: list[_Column], offset: int) -> dict[str, Array]:
    """Name -> view, after making sure that the columns fill the payload exactly."""
    arrays: dict[str, Array] = {}
    for column in columns:
        name, shape, dtype = column.name, column.shape, _DTYPES.get(column.dtype)
        if dtype is None or name in arrays:
            raise CorruptFragment(f"column {name!r} is {'there twice' if dtype else f'of dtype {column.dtype!r}'}")
        # Python integers: a product of huge sizes cannot overflow into something that fits. An empty array may still
        # have sizes that numpy cannot represent.
        size = prod(shape)
        start = _aligned(offset)
        offset = start + size * dtype.itemsize
        if offset > view.nbytes or (not size and prod(max(1, n) for n in shape) > MAX_FRAGMENT_BYTES):
            raise CorruptFragment(f"column {name!r} of shape {list(shape)} does not fit into {view.nbytes} bytes")
        arrays[name] = np.ndarray(shape, dtype, view, start) if size else np.empty(shape, dtype)
    if offset != view.nbytes:
        raise CorruptFragment(f"the columns end at {offset}, the bytes at {view.nbytes}")
    return arrays


def _assemble(header: _Header, arrays: dict[str, Array]) -> Fragment:
    lead = (header.meta.steps, header.meta.envs)
    try:
        action, reward, flags = arrays.pop("action"), arrays.pop("reward"), arrays.pop("flags")
    except KeyError as error:
        raise CorruptFragment(f"column {error.args[0]!r} is missing") from None
    obs, final_obs, extras = _split(arrays)
    if action.dtype != np.float32 or reward.dtype != np.float32 or flags.dtype != np.uint8:
        raise CorruptFragment("action and reward must be float32, flags uint8")
    _check_lead("action", action, lead, 3)
    _check_lead("reward", reward, lead, 2)
    _check_lead("flags", flags, lead, 2)
    for key, array in obs.items():
        _check_lead(_OBS + key, array, (lead[0] + 1, lead[1]))
    for key, array in extras.items():
        _check_lead(_EXTRA + key, array, lead)
    if int(flags.max()) > _ALL_FLAGS:
        raise CorruptFragment("a flag that does not exist is set")
    _check_final(final_obs, obs, int(np.count_nonzero(flags & _ENDS)))
    return Fragment(
        meta=header.meta,
        obs=obs,
        action=action,
        reward=reward,
        terminated=_as_bool(flags & _ONE),
        truncated=_as_bool(flags >> _ONE & _ONE),
        valid=_as_bool(flags >> _TWO),
        final_obs=final_obs,
        extras=extras,
    )


def _split(arrays: dict[str, Array]) -> tuple[Obs, Obs, Obs]:
    groups: dict[str, Obs] = {_OBS: {}, _FINAL: {}, _EXTRA: {}}
    for name, array in arrays.items():
        prefix = name[: name.find(".") + 1]
        if prefix not in groups:
            raise CorruptFragment(f"column {name!r} is unknown")
        groups[prefix][name[len(prefix) :]] = array
    return groups[_OBS], groups[_FINAL], groups[_EXTRA]


def _check_lead(name: str, array: Array, lead: tuple[int, ...], ndim: int | None = None) -> None:
    if array.shape[: len(lead)] != lead or (ndim is not None and array.ndim != ndim):
        raise CorruptFragment(f"column {name!r} has shape {list(array.shape)}; it must begin with {list(lead)}")


def _check_final(final_obs: Obs, obs: Obs, boundaries: int) -> None:
    if list(final_obs) != list(obs):
        raise CorruptFragment(f"final observations have keys {list(final_obs)}, observations {list(obs)}")
    for key, array in final_obs.items():
        if array.shape != (boundaries, *obs[key].shape[2:]) or array.dtype != obs[key].dtype:
            raise CorruptFragment(
                f"column {_FINAL + key!r} is {array.dtype}{list(array.shape)} for {boundaries} episode ends"
            )


def _as_bool(zeros_and_ones: Array) -> Array:
    array: Array = zeros_and_ones.view(np.bool_)
    array.flags.writeable = False
    return array


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
