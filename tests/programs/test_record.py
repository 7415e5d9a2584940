import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from clawq.algorithms.td3 import plugin as td3
from clawq.errors import UserError
from clawq.programs.animation import GifWriter, open_animation
from clawq.programs.record import BAND, HOLD, captioned, record
from clawq.testing.point import PointOptions, point_spec

SPEC = point_spec(PointOptions())


@pytest.fixture
def request_for(tmp_path: Path) -> dict[str, Any]:
    for seed, name in enumerate(("untrained", "trained")):
        algorithm = td3.make_algorithm(SPEC, td3.Options(hidden=(8, 8)), "cpu", seed)
        save_file({k: v.numpy() for k, v in algorithm.weights().items()}, tmp_path / f"{name}.safetensors")
    config = {
        "name": "test",
        "environment": {"name": "point"},
        "algorithm": {"name": "td3", "options": {"hidden": [8, 8]}},
    }
    return {
        "run": {"id": "test", "tag": "0" * 32, "config": config, "spec": SPEC.to_json()},
        "trained": str(tmp_path / "trained.safetensors"),
        "untrained": str(tmp_path / "untrained.safetensors"),
        "out": str(tmp_path / "hand.gif"),
        "episodes": 2,
        "seed": 5,
    }


def test_an_environment_that_cannot_draw_says_what_to_do(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawq.programs.record.load", lambda kind, name: object())
    with pytest.raises(UserError, match=r"'point' cannot draw: it has no make_rendered.* record\.animation: false"):
        record(request_for)


def test_trained_and_untrained_are_shown_side_by_side(request_for: dict[str, Any], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "clawq.programs.record"],
        input=json.dumps(request_for),
        capture_output=True,
        text=True,
        timeout=50,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert answer["file"] == str(tmp_path / "hand.gif")
    assert answer["frames"] == 2 * (20 // 2 + HOLD)
    assert {side: len(returns) for side, returns in answer["returns"].items()} == {"trained": 2, "untrained": 2}
    with Image.open(answer["file"]) as gif:
        assert gif.size == (2 * 96, 96 + BAND)
        assert gif.n_frames == answer["frames"]  # type: ignore[attr-defined]
        assert gif.info["loop"] == 0
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_one_side_alone_can_be_shown(request_for: dict[str, Any]) -> None:
    answer = record({**request_for, "untrained": None, "episodes": 1})
    with Image.open(answer["file"]) as gif:
        assert gif.size[0] == 96


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"out": "hand.avi"}, r"\.gif or \.mp4"),
        ({"trained": None, "untrained": None}, "whose weights"),
    ],
)
def test_senseless_requests_are_refused(request_for: dict[str, Any], change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        record({**request_for, **change})


def test_a_gif_shows_every_picture_as_it_was(tmp_path: Path) -> None:
    pictures = []
    for k in range(5):
        picture = np.zeros((40, 60, 3), np.uint8)
        picture[:, :30] = (200, 30, 30)
        picture[5 + k : 15 + k, 10 * k : 10 * k + 8] = (30, 220, 90)
        pictures.append(picture)
    pictures.insert(3, pictures[2])  # one that did not change
    writer = GifWriter(tmp_path / "a.gif", 12.5)
    for picture in pictures:
        writer.add(picture)
    writer.close()
    writer.close()
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 6  # type: ignore[attr-defined]
        for k, picture in enumerate(pictures):
            gif.seek(k)
            assert gif.info["duration"] == 80
            np.testing.assert_allclose(np.asarray(gif.convert("RGB")), picture, atol=3)


def test_C63_memory_does_not_grow_with_the_length_of_an_animation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def peak_bytes(count: int) -> int:
        writer = open_animation(tmp_path / f"{count}.gif", 12.5)
        tracemalloc.start()
        for _ in range(count):
            writer.add(rng.integers(0, 255, (120, 160, 3), np.uint8))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        writer.close()
        return peak

    assert peak_bytes(120) < 1.5 * peak_bytes(12)


def test_a_caption_stands_above_the_picture() -> None:
    picture = np.full((10, 200, 3), 7, np.uint8)
    shown = captioned(picture, "trained")
    assert shown.shape == (10 + BAND, 200, 3)
    np.testing.assert_array_equal(shown[BAND:], picture)
    assert len(np.unique(shown[:BAND])) > 3
