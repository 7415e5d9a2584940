import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clawq.errors import CheckpointInvalid, CheckpointNotWritten, LearnerError
from clawq.programs.checkpoint import Checkpoints, check_plain, load, read_header


def make_state(seed: int = 0, size: int = 1000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "networks": {"actor": torch.randn(size, generator=generator)},
        "moments": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "rng": generator.get_state(),
        "marks": {"host-w-0": (17, 4)},
        "cursors": {"host-w-0": "17-4"},
        "updates": seed,
        "betas": (0.9, 0.999),
        "words": ["a", None, True, 2**60, b"\x00"],
    }


def steps(checkpoints: Checkpoints) -> list[int]:
    return [read_header(path).step for path in checkpoints.paths()]


def test_a_state_comes_back_bit_identically(tmp_path: Path) -> None:
    state = make_state(5)
    path = Checkpoints(tmp_path / "made" / "here").save(state, step=12, score=-0.5)
    found = load(path)
    assert (found.step, found.score, found.path, found.skipped) == (12, -0.5, path, ())
    assert torch.equal(found.state["networks"]["actor"], state["networks"]["actor"])
    assert torch.equal(found.state["rng"], state["rng"])
    for key in ("marks", "cursors", "updates", "betas", "words"):
        assert found.state[key] == state[key], key
    assert list(found.state["moments"]) == [0, 1]


def test_the_first_line_is_text_for_people(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(make_state(), step=12, score=0.75)
    line = path.read_bytes().split(b"\n", 1)[0].decode()
    assert line.startswith("clawq-checkpoint 1 step=12 score=0.75 size=")


def test_an_empty_folder_has_no_latest_and_no_best(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        checkpoints = Checkpoints(folder)
        assert checkpoints.load_latest() is None
        assert checkpoints.best() is None
    assert not (tmp_path / "missing").exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    scores = {1: None, 2: -1.0, 3: 5.0, 4: math.nan, 5: 1.0, 9: None, 100: 2.0}
    for step, score in scores.items():
        checkpoints.save(make_state(step), step, score)
    assert steps(checkpoints) == [3, 9, 100]
    best = checkpoints.best()
    assert best is not None
    assert read_header(best).step == 3
    checkpoints.save(make_state(101), 101, 6.0)
    assert steps(checkpoints) == [100, 101]
    assert Checkpoints(tmp_path).best() == checkpoints.paths()[-1], "the score is in the file, not in memory"


def test_of_equal_scores_the_newer_is_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(make_state(), step, 1.0)
    assert checkpoints.best() == checkpoints.paths()[-1]


def test_a_checkpoint_just_written_stays_even_if_others_have_larger_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (50, 10):
        checkpoints.save(make_state(), step)
    assert steps(checkpoints) == [10, 50]


def test_the_same_step_again_replaces_the_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(1), 7)
    path = checkpoints.save(make_state(2), 7)
    assert checkpoints.paths() == [path]
    assert load(path).state["updates"] == 2


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def flip(raw: bytes) -> bytes:
    return raw[:1000] + bytes([raw[1000] ^ 1]) + raw[1001:]


def flip_header(raw: bytes) -> bytes:
    return raw.replace(b"blake2b=", b"blake2b=0", 1)[: len(raw)]


@pytest.mark.parametrize(
    "damage", [cut, flip, flip_header, lambda _: b"", lambda raw: raw[:100], lambda raw: raw + b"x"]
)
def test_a_damaged_newest_is_stepped_over_and_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(make_state(1), 1)
    bad = checkpoints.save(make_state(2), 2)
    bad.write_bytes(damage(bad.read_bytes()))
    found = checkpoints.load_latest()
    assert found is not None
    assert (found.path, found.step, found.state["updates"]) == (good, 1, 1)
    ((path, reason),) = found.skipped
    assert path == bad
    assert str(bad) in reason


def test_when_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        path = checkpoints.save(make_state(), step, score=1.0)
        path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(CheckpointInvalid, match="no checkpoint can be used") as caught:
        checkpoints.load_latest()
    assert str(caught.value).count("the digest is wrong") == 2
    # And what to do: a copy, its log, or a new run
    for words in (f"Put sound copies into {tmp_path}", f"`clawq replay {tmp_path.parent}`", "or begin anew: `clawq up"):
        assert words in str(caught.value)


def test_a_header_without_a_whole_body_does_not_stop_saving(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / "step-000000000001.ckpt").write_bytes(b"\xff\xfe garbage")
    checkpoints.save(make_state(), 2)
    assert steps(checkpoints) == [2]


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04 not ours", b"\xff" * 300, b"clawq-checkpoint 1 step=x" + b" " * 300])
def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "step-000000000001.ckpt"
    path.write_bytes(raw)
    with pytest.raises(CheckpointInvalid, match="not a clawq checkpoint"):
        load(path)
    with pytest.raises(CheckpointInvalid, match="cannot be read: No such file"):
        load(tmp_path / "missing.ckpt")


def test_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(make_state(), 1)
    path.write_bytes(path.read_bytes().replace(b"clawq-checkpoint 1 ", b"clawq-checkpoint 9 ", 1))
    with pytest.raises(CheckpointInvalid, match="format 9; this clawq reads format 1"):
        load(path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch harmed",))


def test_C56_code_in_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clawq.programs.checkpoint.check_plain", lambda state: None)
    path = Checkpoints(tmp_path).save({"x": Harmful()}, 1)
    with pytest.raises(CheckpointInvalid, match="not readable by torch"):
        load(path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": np.float32(1)}}, r"state\['a'\]\['b'\]: float32"),
        ({"a": [1, np.zeros(2)]}, r"state\['a'\]\[1\]: ndarray"),
        ({"a": {(1, 2): 3}}, "neither str nor int"),
        ({"a": {1, 2}}, "set"),
        ({"a": Path("x")}, "Path"),
    ],
)
def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path: Path, state: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        Checkpoints(tmp_path).save(state, 1)
    assert list(tmp_path.iterdir()) == []


def test_everything_that_is_plain_passes() -> None:
    check_plain(make_state())


def test_left_over_partial_files_are_swept_by_the_next_save_only(tmp_path: Path) -> None:
    left = tmp_path / "step-000000000003.tmp"
    left.write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load_latest() is None
    assert left.exists(), "a reader must not touch what a writer may be writing"
    checkpoints.save(make_state(), 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000004.ckpt"]


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from clawq.errors import CheckpointNotWritten
from clawq.programs.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
checkpoints.save({"x": torch.zeros(10)}, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoints.save({"x": torch.zeros(100_000)}, 2)
except CheckpointNotWritten as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert "step-000000000002.ckpt was not written: File too large. Older checkpoints are intact." in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001.ckpt"]
    found = Checkpoints(tmp_path).load_latest()
    assert found is not None
    assert found.step == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_space_left_is_a_typed_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(), 1)
    (tmp_path / "step-000000000002.tmp").symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_sweep", lambda self: None)
        with pytest.raises(CheckpointNotWritten, match="No space left on device"):
            checkpoints.save(make_state(), 2)
    assert issubclass(CheckpointNotWritten, LearnerError)
    assert steps(checkpoints) == [1]
    checkpoints.save(make_state(), 3)
    assert steps(checkpoints) == [1, 3]


WRITER = """
import sys
from pathlib import Path
import torch
from clawq.programs.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
step = 0
while True:
    step += 1
    checkpoints.save({"x": torch.full((200_000,), float(step))}, step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_writer_killed_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path: Path, kills: int) -> None:
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            written = [int(writer.stdout.readline()) for _ in range(3)]
            writer.send_signal(signal.SIGKILL)
        found = Checkpoints(tmp_path).load_latest()
        assert found is not None
        assert found.skipped == ()
        assert found.step >= written[-1]
        assert (found.state["x"] == found.step).all()
