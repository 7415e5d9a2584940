"""Small texts that stand for much: `python bombs.py FOLDER` reads them all in little memory, and ends well if it can.

Each must be refused with our error, in bounded time, before memory is taken for what it claims: the process may take
300 MB more than it has when everything is imported.
"""

import json
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from fuzzing import check_text
from fuzzing import codec as good

from clawq.config_file import load_config
from clawq.errors import (
    ArchiveDamaged,
    ClawqError,
    CodecError,
    ConfigError,
    RecordUnreadable,
    ScheduleInvalid,
    SnapshotInvalid,
    WeightsCorrupt,
)
from clawq.programs.schedule import end_line, read_schedule
from clawq.replay.snapshot import load_manifest, manifest_name
from clawq.transport import codec, control, segment_index, segments, signing, stream, weights

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MORE_BYTES, LONGEST_S = 300_000_000, 10.0


def refused(what: object, error: type[ClawqError], call: Callable[..., Any], *arguments: Any) -> None:
    """The call must raise that, with few words, soon."""
    started_s = time.process_time()
    try:
        call(*arguments)
    except error as caught:
        check_text(caught, 2000)
    else:
        raise AssertionError(f"{what!r} was taken")
    took_s = time.process_time() - started_s
    assert took_s < LONGEST_S, (what, took_s)


def fragments(folder: Path) -> None:
    """Headers that claim more than there is."""
    payload = bytes(codec.encode(good.fragment(3, 2)))
    length = struct.unpack_from("<I", payload, 16)[0]

    def sealed(raw: bytes, claimed: int | None = None) -> bytes:
        return good.sealed(bytes(16) + struct.pack("<I", len(raw) if claimed is None else claimed) + raw)

    def with_shape(shape: list[int]) -> bytes:
        meta, columns = msgspec.msgpack.decode(payload[20 : 20 + length])
        columns[0][2] = shape
        return sealed(msgspec.msgpack.encode([meta, columns]))

    bombs = {
        "a header of 4 GB": sealed(b"x", 2**32 - 1),
        "10^9 rows": with_shape([10**9, 2, 3]),
        "an empty array of 10^46 rows": with_shape([0, *[4_000_000] * 7]),
        "sizes that overflow": with_shape([2**31, 2**31, 4]),
        "negative sizes": with_shape([-1, 2, 3]),
        "nesting": sealed(b"\x91" * 60_000),
        "an array of 2^32 - 1": sealed(b"\xdd" + b"\xff" * 4),
        "a map of 2^32 - 1": sealed(b"\x92\xdf" + b"\xff" * 4),
        "a text of 4 GB": sealed(b"\x92\xdb" + b"\xff" * 4),
        "a map of 20 000 keys": sealed(b"\x92\xde\x4e\x20" + b"\xa1x\x00" * 20_000),
    }
    for what, bomb in bombs.items():
        refused(what, CodecError, codec.decode, bomb)


def records(folder: Path) -> None:
    """JSON and numbers in Redis and in files."""
    wide = json.dumps({f"k{index}": index for index in range(100_000)}).encode()
    texts = [b'{"a":' * 1_000_000, b"[" * 5_000_000, b"9" * 1_000_000, b"NaN", b"Infinity", b"\xff" * 1000, wide]
    texts.append(b'"' + b"x" * 5_000_000 + b'"')
    for text in texts:
        assert control._run_record(text) is None
        assert control._heartbeat(text) is None
        assert text is wide or control._event(b"1-1", {b"kind": b"k", b"facts": text}) is None
        assert stream._taken(text) == (0, 0)
        assert stream.parse_trimmed(text) == ((0, 0), 0)
        assert stream.parse_ordinal(text) == 0
        for position in range(4):
            fields: list[bytes | None] = [b"1"] * len(signing.CONTROL_FIELDS)
            fields[position] = text
            refused(text[:20], RecordUnreadable, signing.ControlSeal("0" * 32, signing.NoSeal()).parse, fields)
        refused(text[:20], WeightsCorrupt, weights._facts, text, 3)
        name = manifest_name(0, text)
        (folder / name).write_bytes(text)
        refused(text[:20], SnapshotInvalid, load_manifest, folder, name)
        if text is not wide:
            line = b"session " + text + b"\n"
            (folder / "schedule.log").write_bytes(b"clawq-schedule 1 base=0\n" + line + end_line(line))
            refused(text[:20], ScheduleInvalid, lambda: list(read_schedule(folder / "schedule.log")))


def published(folder: Path) -> None:
    """Weights that claim sizes."""
    for size in (2**62, -1, 5 * 10**9):
        facts = {
            "version": 3,
            "updates": 1,
            "metadata": {},
            "digest": "a",
            "size_bytes": size,
            "chunks": -(-size >> 20),
        }
        refused(size, WeightsCorrupt, weights._facts, json.dumps(facts).encode(), 3)
    claims: tuple[dict[str, Any], ...] = (
        {"shape": [10**9, 10**9], "data_offsets": [0, 4]},
        {"shape": [2**63], "data_offsets": [0, 2**62]},
        {"shape": [-1], "data_offsets": [0, 4]},
        {"shape": [2**40, 2**40, 0], "data_offsets": [0, 0]},
    )
    for claim in claims:
        head = json.dumps({"w": {"dtype": "F32", **claim}}).encode()
        for blob in (struct.pack("<Q", len(head)) + head + bytes(4), struct.pack("<Q", 2**60) + head):
            facts = {"size_bytes": len(blob), "digest": weights._digest(blob), "updates": 1, "metadata": {}}
            refused(claim, WeightsCorrupt, weights._assemble, facts, [blob], 3)


def archived(folder: Path) -> None:
    """Compressed bodies that are much larger than they are long, or say so."""
    packer = zstd.ZstdCompressor(level=1)
    flood = b"".join(packer.compress(bytes(1 << 20)) for _ in range(400)) + packer.flush()
    assert len(flood) < 100_000
    says = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**60) + b"\x01\x00\x00"
    window = b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00"
    head = segments.pack_header(segments.SegmentHeader("0" * 32, 1, 5))
    path = folder / "segment-000000000001.clq"
    for body, size in ((flood, 400 << 20), (flood, 100), (flood, 2**32 - 1), (says, 2**32 - 1), (window, 100)):
        checksum, name = xxhash.xxh3_64_intdigest(body), b"slot-1"
        fields = segments._FIELDS.pack(b"CLQR", segments.ZSTD, 0, len(name), len(body), size, 5, 7, 0, 0, checksum)
        check = segments._CHECK.pack(segments._check(fields, name))
        path.write_bytes(head + fields + check + name + body)
        fd = os.open(path, os.O_RDONLY)
        for record in segment_index.build(path).records():
            refused(size, ArchiveDamaged, segments.read_payload, fd, record)
        os.close(fd)


def configurations(folder: Path) -> None:
    """Anchors, nesting, numbers and texts without end."""

    def laughs(first: str, each: str) -> str:
        lines = [f"a0: &a0 {first}"]
        lines += [f"a{at}: &a{at} {each.format(','.join([f'*a{at - 1}'] * 9))}" for at in range(1, 12)]
        return "\n".join(lines)

    file = folder / "bomb.yaml"
    anchors = [laughs("[x]", "[{}]"), laughs("{x: 1}", "{{<<: [{}]}}"), laughs("x" * 1000, "[{}]"), "a: &a [*a]"]
    nested = ["[" * 39_000, "{" * 39_000, "- " * 19_000, "? " * 19_000]
    numbers = ["a: 0x" + "f" * 39_000, "a: " + "9" * 39_000, "a: .inf", "a: .nan"]
    texts = ["a: " + "x" * 10_000_000, 'a: "\\ud800"', "!!python/object/apply:os.system [x]"]
    for text in [*anchors, *nested, *numbers, *texts]:
        file.write_text(text)
        refused(text[:40], ConfigError, load_config, file)
    refused("/dev/zero", ConfigError, load_config, "/dev/zero")
    file.write_text("name: a\nenvironment: {name: point}\n")
    overrides = ["a=" + "[" * 39_000, "a=0x" + "f" * 39_000, ".".join(["a"] * 100_000) + "=1", "seed=" + "9" * 5000]
    overrides += ["name=\udcff", "replay.capacity=1000000000000000000000", "seed=.nan", "a=" + laughs("[x]", "[{}]")]
    for override in overrides:
        refused(override[:40], ConfigError, load_config, file, [override])


def main(folder: Path) -> None:
    """All of them."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MORE_BYTES, taken + MORE_BYTES))
    for kind in (fragments, records, published, archived, configurations):
        kind(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
