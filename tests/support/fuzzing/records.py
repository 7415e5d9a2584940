"""The other texts in Redis: runs, readers, heartbeats, events, board, positions, claims and weights."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import save

from clawq.errors import WeightsCorrupt
from clawq.transport import books, claims, control, registry, stream, texts, weights

_PARSERS: tuple[Callable[[bytes], Any], ...] = (
    control._run_record,
    control._heartbeat,
    lambda text: control._event(b"1-1", {b"kind": text[:9], b"facts": text}),
    lambda text: registry._records({b"copy": text, text: text}),
    lambda text: texts.readable({b"a": text, text: text}, control._board_value),
    lambda text: texts.readable({b"a": text}, books._position),
    claims._holder_of,
    stream.parse_trimmed,
    stream._taken,
    stream.parse_ordinal,
    lambda text: texts.parse_cursors({text: text}),
)


def one_input(data: bytes) -> None:
    """Read it as each of them, and as weights."""
    for parse in _PARSERS:
        parse(data)
    run = control._run_record(data)
    if run is not None:
        assert control.RunRecord.from_json(json.loads(json.dumps(run.to_json()))) == run
        assert run.keys.control
        assert run.learner_text
    _weights_described(data)
    _weights_held(data)


def _weights_described(meta: bytes) -> None:
    try:
        facts = weights._facts(meta, 3)
    except WeightsCorrupt:
        return
    assert 0 <= facts["size_bytes"] <= weights.MAX_WEIGHTS_BYTES


def _weights_held(blob: bytes) -> None:
    """The arrays under a right digest, as a hostile writer would make it."""
    digest = hashlib.blake2b(blob, digest_size=16).hexdigest()
    facts = {"size_bytes": len(blob), "digest": digest, "updates": 1, "metadata": {}}
    try:
        weights._assemble(facts, [blob], 3)
    except WeightsCorrupt:
        return


def seeds() -> list[bytes]:
    """One of each."""
    run = control.RunRecord("hand-1", "0" * 32, {"name": "hand"}, {}, "running", 5, {"host": "h", "pid": 7})
    beat = control.Heartbeat("h/w", 3, 1, "h", 77, 1234)
    facts = {"version": 3, "updates": 1, "metadata": {}, "size_bytes": 9, "digest": "ab", "chunks": 1}
    reader = {"required": True, "since_ms": 5, "what": "a copy", "found": ["slot-1"]}
    plain = [run.to_json(), vars_of(beat), facts, reader, {"token": "t", "holder": "me"}, [3, "5-7", 0], 1.5, "text"]
    arrays: dict[str, Any] = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float16)}
    return [*(json.dumps(one).encode() for one in plain), b"5-7 12", b"17", save(arrays)]


def vars_of(beat: control.Heartbeat) -> dict[str, Any]:
    """Its fields."""
    return {name: getattr(beat, name) for name in beat.__dataclass_fields__}
