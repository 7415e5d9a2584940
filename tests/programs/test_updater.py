"""Updates that are not finite: skipped, kept, counted, and in the end refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clawq.algorithms.td3 import Td3Options, plugin
from clawq.core import Batch
from clawq.errors import TooManyNonFinite
from clawq.programs.updater import KEPT_BATCHES, Updater
from clawq.testing.point import PointOptions, point_spec


def batch(reward: float = 0.5) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def obs() -> dict[str, torch.Tensor]:
        return {key: torch.randn(8, 2, generator=generator) for key in point_spec(PointOptions()).obs}

    return Batch(
        obs=obs(),
        action=torch.rand(8, 2, generator=generator) * 2 - 1,
        reward=torch.full((8,), reward),
        discount=torch.full((8,), 0.9),
        next_obs=obs(),
        importance_weight=torch.ones(8),
        row=torch.arange(8),
        weights_version=torch.ones(8, dtype=torch.int64),
        extras={},
    )


@pytest.fixture
def algorithm() -> Any:
    return plugin.make_algorithm(point_spec(PointOptions()), Td3Options(hidden=(8,)), "cpu", seed=0)


def test_C47_a_nan_update_is_skipped_its_batch_kept_and_training_goes_on(algorithm: Any, tmp_path: Path) -> None:
    updater = Updater(algorithm, tmp_path / "nonfinite", max_in_a_row=3)
    for _ in range(4):
        updater.update(batch(), 0.0)
    before = algorithm.weights()
    updater.update(batch(float("nan")), 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in algorithm.weights().items())
    assert (updater.updates, updater.skipped) == (4, 1)
    (kept,) = (tmp_path / "nonfinite").iterdir()
    assert load_file(kept)["reward"].isnan().all()
    updater.update(batch(), 0.0)
    assert updater.updates == 5


def test_C47_three_in_a_row_end_the_learner_with_a_report(algorithm: Any, tmp_path: Path) -> None:
    updater = Updater(algorithm, tmp_path / "nonfinite", max_in_a_row=3)
    # Two, then a good one: the count begins anew
    for reward in (float("nan"), float("nan"), 0.5, float("inf"), float("nan")):
        updater.update(batch(reward), 0.0)
    with pytest.raises(TooManyNonFinite, match=r"3 updates in a row were not finite .* the batches are in"):
        updater.update(batch(float("nan")), 0.0)


def test_only_the_newest_batches_are_kept(algorithm: Any, tmp_path: Path) -> None:
    updater = Updater(algorithm, tmp_path / "nonfinite", max_in_a_row=100)
    for _ in range(KEPT_BATCHES + 3):
        updater.update(batch(float("nan")), 0.0)
    names = sorted(path.name for path in (tmp_path / "nonfinite").iterdir())
    assert len(names) == KEPT_BATCHES
    assert names[-1].endswith(f"-{KEPT_BATCHES + 3:04d}.safetensors")
