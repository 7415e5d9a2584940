"""Weights and control records that the run's learner did not seal are not believed where a key is set."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clawq.errors import UserError, WeightsCorrupt
from clawq.transport.claims import Claim
from clawq.transport.control import ControlRecord, end_run
from clawq.transport.keys import RunKeys, new_tag
from clawq.transport.signing import host_seal
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsPublisher, WeightsReader

ARRAYS = {"w": np.arange(3, dtype=np.float32)}


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This host's key."""
    return new_key(tmp_path / "key", monkeypatch)


def new_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file.write_text(f"{file.name}: " + "k" * 40)
    file.chmod(0o600)
    monkeypatch.setenv("CLAWQ_SIGNING_KEY_FILE", str(file))
    return file


class Learner:
    """Publishes under a claim."""

    def __init__(self, client: Any, keys: RunKeys) -> None:
        self.keys = keys
        self.claim = Claim.take(client, keys.claim("learner"), "test", 60)
        self.control = ControlRecord(client, keys, self.claim)
        self.publisher = WeightsPublisher(client, keys, self.claim, keep=5)

    def begin(self) -> "Learner":
        self.control.write(stop=False, window_bytes=1000, config_epoch=1)
        self.publisher.publish(ARRAYS, 1, 0)
        return self


def refused(client: Any, keys: RunKeys) -> bool:
    """Whether an actor, old or new, does not believe the control record."""
    return ControlRecord(client, keys).read() is None


def test_what_the_learner_seals_is_believed_by_readers_and_actors(
    data_client: Any, run_keys: RunKeys, key: Path
) -> None:
    learner = Learner(data_client, run_keys).begin()
    learner.publisher.publish(ARRAYS, 2, 1)
    learner.control.write(window_bytes=2000)
    control = ControlRecord(data_client, run_keys).read()
    assert control is not None
    assert (control.head, control.stop, control.window_bytes) == (2, False, 2000)
    fetched = WeightsReader(data_client, run_keys).fetch_newer(1)
    assert fetched is not None
    np.testing.assert_array_equal(fetched.arrays["w"], ARRAYS["w"])
    writer = StreamWriter.open(data_client, run_keys, "s", "test")
    assert writer.poll() == control
    writer.close()
    ControlRecord(data_client, run_keys).request_stop()
    stopped = ControlRecord(data_client, run_keys).read()
    assert stopped is not None
    assert stopped.stop
    end_run(data_client, run_keys, learner.claim)
    assert ControlRecord(data_client, run_keys).read() is not None, "the tombstone is sealed as well"


def test_unsigned_weights_and_control_records_are_refused(
    data_client: Any, run_keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    Learner(data_client, run_keys).begin()
    assert not refused(data_client, run_keys)
    new_key(tmp_path / "key", monkeypatch)
    assert refused(data_client, run_keys)
    assert "not signed, and this host demands that" in caplog.text
    with pytest.raises(WeightsCorrupt, match="version 1 are refused: not signed"):
        WeightsReader(data_client, run_keys).fetch(1)
    writer = StreamWriter.open(data_client, run_keys, "s", "test")
    assert writer.poll() is None, "the actor waits"
    writer.close()


def test_what_was_sealed_with_another_key_is_refused(
    data_client: Any, run_keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(tmp_path / "theirs", monkeypatch)
    Learner(data_client, run_keys).begin()
    new_key(tmp_path / "ours", monkeypatch)
    assert refused(data_client, run_keys)
    with pytest.raises(WeightsCorrupt, match="not of this run's learner"):
        WeightsReader(data_client, run_keys).fetch(1)


@pytest.mark.parametrize(
    ("field", "value"), [("stop", 1), ("head", 9), ("window_bytes", 1), ("config_epoch", 7), ("serial", 10**15)]
)
def test_a_control_record_with_one_field_forged_is_refused(
    data_client: Any, run_keys: RunKeys, key: Path, field: str, value: int
) -> None:
    learner = Learner(data_client, run_keys).begin()
    data_client.hset(run_keys.control, field, value)
    assert refused(data_client, run_keys)
    learner.control.write(stop=False, window_bytes=1000, config_epoch=1, head=1)
    assert not refused(data_client, run_keys)


def test_an_older_control_record_is_refused_by_who_has_seen_a_newer_one(
    data_client: Any, run_keys: RunKeys, key: Path
) -> None:
    learner, actor = Learner(data_client, run_keys).begin(), ControlRecord(data_client, run_keys)
    learner.control.write(stop=True)
    old = data_client.hgetall(run_keys.control)
    learner.control.write(stop=False)
    assert actor.read() is not None
    data_client.hset(run_keys.control, mapping=old)
    assert actor.read() is None


def test_a_seal_of_another_run_or_version_is_none_of_this_one(data_client: Any, run_keys: RunKeys, key: Path) -> None:
    learner, other = Learner(data_client, run_keys).begin(), RunKeys(new_tag())
    learner.publisher.publish({"w": ARRAYS["w"] + 1}, 2, 1)
    for name in ("control", "weights"):
        source, target = (keys.control if name == "control" else keys.weights(1) for keys in (run_keys, other))
        data_client.copy(source, target)
    try:
        assert refused(data_client, other)
        with pytest.raises(WeightsCorrupt, match="refused"):
            WeightsReader(data_client, other).fetch(1)
        # The old version in the place of the new one, as it is and with its number changed.
        data_client.copy(run_keys.weights(1), run_keys.weights(2), replace=True)
        with pytest.raises(WeightsCorrupt, match="makes no sense"):
            WeightsReader(data_client, run_keys).fetch(2)
        meta = json.loads(data_client.hget(run_keys.weights(2), "meta"))
        data_client.hset(run_keys.weights(2), "meta", json.dumps({**meta, "version": 2}))
        with pytest.raises(WeightsCorrupt, match="refused"):
            WeightsReader(data_client, run_keys).fetch(2)
    finally:
        data_client.delete(other.control, other.weights(1))


def test_weights_whose_bytes_were_changed_under_a_right_seal_fail_their_digest(
    data_client: Any, run_keys: RunKeys, key: Path
) -> None:
    Learner(data_client, run_keys).begin()
    blob = bytearray(data_client.hget(run_keys.weights(1), "c0"))
    blob[-1] ^= 1
    data_client.hset(run_keys.weights(1), "c0", bytes(blob))
    with pytest.raises(WeightsCorrupt, match="digest"):
        WeightsReader(data_client, run_keys).fetch(1)


def test_a_key_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    env = {"CLAWQ_SIGNING_KEY_FILE": str(file)}
    with pytest.raises(UserError, match="cannot be read"):
        host_seal(env)
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(UserError, match="holds 5 characters; a key has 32 or more"):
        host_seal(env)
    file.chmod(0o640)
    with pytest.raises(UserError, match="others can read it"):
        host_seal(env)
