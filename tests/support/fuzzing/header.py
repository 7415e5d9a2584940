"""The msgpack header of a fragment, under a right checksum and before good columns."""

import struct

from clawq.transport.codec import encode
from fuzzing import codec

_GOOD = bytes(encode(codec.fragment(3, 2)))
_LENGTH = struct.unpack_from("<I", _GOOD, 16)[0]
_COLUMNS = _GOOD[-(-(20 + _LENGTH) // 64) * 64 :]


def one_input(data: bytes) -> None:
    """Decode a fragment with that header."""
    spare = bytes(-(20 + len(data)) % 64)
    codec.one_input(bytes(16) + struct.pack("<I", len(data)) + data + spare + _COLUMNS)


def seeds() -> list[bytes]:
    """The header of a good fragment."""
    return [_GOOD[20 : 20 + _LENGTH]]
