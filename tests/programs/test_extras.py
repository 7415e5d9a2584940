"""What a policy says beside its actions reaches the algorithm, row by row; with a small algorithm that needs it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from room import Room
from waiting import Until

from clawq import plugins
from clawq.config import Section, Source, Sync
from clawq.core import Batch, Explorer, SequenceBatch
from clawq.errors import UserError
from clawq.programs.daemon import may_begin_at_random
from clawq.programs.parts import make_examiner
from clawq.programs.suitability import check_suitable
from clawq.specs import ArraySpec, EnvSpec
from clawq.testing.point import PointOptions, point_spec
from clawq.types import FloatArray, Metrics, Obs

MakeRoom = Callable[..., Room]
load = plugins.load


def log_prob(version: Any, obs: Mapping[str, Any]) -> Any:
    """What the policy of a version says of what it sees: no two rows are alike."""
    return version * 1000.0 + 500.0 + sum(column.sum(-1) for column in obs.values())


class OnPolicy:
    """Learner and policy at once; each update makes another `scale`, which is what the policy's log_prob shows."""

    td_error = None

    def __init__(self) -> None:
        self.scale = 1.0
        self.batches = self.rows = 0
        self.kinds: set[type] = set()

    def observe(self, obs: Mapping[str, Any], valid: Any) -> None:
        """Nothing is normalised."""

    def step(self, batch: Batch, progress: float) -> Metrics:
        self.batches += 1
        self.kinds.add(type(batch))
        told, value = batch.extras["log_prob"], batch.extras["value"]
        happened = batch.mask if isinstance(batch, SequenceBatch) else torch.ones(told.shape, dtype=torch.bool)
        for scale in told[happened] // 1000.0:
            assert 1.0 <= scale <= self.scale
        seen = log_prob(0.0, batch.obs)[happened]
        torch.testing.assert_close(told[happened] % 1000.0, seen % 1000.0, atol=2e-3, rtol=0)
        torch.testing.assert_close(value[happened][:, 1], 2 * seen, atol=1e-3, rtol=0)
        self.rows += int(happened.sum())
        self.scale += 1.0
        return {}

    def weights(self) -> dict[str, Any]:
        return {"scale": torch.tensor([self.scale])}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])

    # --- the actor's side

    def load(self, weights: Mapping[str, Any]) -> None:
        self.scale = float(np.asarray(weights["scale"])[0])

    def act(self, obs: Obs) -> FloatArray:
        return np.zeros((len(log_prob(0.0, obs)), 2), np.float32)

    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        shown = log_prob(0.0, obs).astype(np.float32)
        told = np.asarray(log_prob(self.scale, obs), np.float32)
        return self.act(obs), {"log_prob": told, "value": np.stack([shown, 2 * shown], -1)}


class OnPolicyPlugin:
    Options = Section
    samplers = ("fifo", "sequence")

    def extras(self, spec: EnvSpec, options: Any) -> dict[str, ArraySpec]:
        return {"log_prob": ArraySpec(()), "value": ArraySpec((2,))}

    def make_algorithm(self, spec: EnvSpec, options: Any, device: str, seed: int) -> OnPolicy:
        return OnPolicy()

    def make_policy(self, spec: EnvSpec, options: Any) -> OnPolicy:
        return OnPolicy()


@pytest.fixture
def make_on_policy(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> MakeRoom:
    """Rooms with that algorithm, and no exploration beside it."""

    def find(group: str, name: str) -> Any:
        return OnPolicyPlugin() if (group, name) == ("algorithms", "on-policy") else load(group, name)

    monkeypatch.setattr(plugins, "load", find)
    monkeypatch.setattr("clawq.programs.policy_loader.load", find)
    chosen: dict[str, Any] = {
        "algorithm": {"name": "on-policy", "options": {}},
        "exploration": {"noise_min": 0.0, "noise_max": 0.0},
    }
    return lambda **sections: make_room(**chosen, **sections)


@pytest.mark.parametrize("sampler", ["fifo", "sequence"])
def test_what_the_policy_said_beside_an_action_is_in_its_row_over_resumes_too(
    make_on_policy: MakeRoom, sampler: str
) -> None:
    ratio = 1 if sampler == "fifo" else 4
    room = make_on_policy(
        replay={"sampler": sampler, "capacity": 5000, "batch_size": 16, "sequence": {"length": 4}},
        rate_limit={"samples_per_insert": ratio, "min_size_to_sample": 16},
    )
    trainer = room.trainer()
    room.actor("a")
    trainer.train(Until(lambda: trainer.parts.updater.updates >= 5))
    algorithm: Any = trainer.parts.updater.algorithm
    assert algorithm.kinds == {SequenceBatch if sampler == "sequence" else Batch}
    assert algorithm.rows >= 5 * 16
    # Nothing was done at random before the first update, and nothing refused
    assert trainer.parts.consumer.counts.rejected == {}
    trainer.checkpoint(wait=True)
    room.abandon(trainer)
    second = room.trainer(resume=True)
    before = second.parts.updater.updates
    second.train(Until(lambda: second.parts.updater.updates >= before + 5))
    assert second.parts.ring.check_valid() == (True, "")
    assert second.parts.consumer.counts.rejected == {}


def test_what_is_done_without_the_policy_is_neither_asked_for_nor_taken(make_on_policy: MakeRoom) -> None:
    run = make_on_policy(replay={"sampler": "fifo", "capacity": 5000, "batch_size": 16}).run
    assert make_examiner(run).check.extras == {"log_prob": ArraySpec(()), "value": ArraySpec((2,))}
    # Only for an algorithm that needs none do actors begin before its learner has weights
    assert not may_begin_at_random(run.config, run.spec)
    other = run.config.model_copy(update={"algorithm": run.config.algorithm.model_copy(update={"name": "td3"})})
    assert may_begin_at_random(other, run.spec)
    assert not may_begin_at_random(other.model_copy(update={"sync": Sync(quota_steps=8, actors=1)}), run.spec)
    assert not may_begin_at_random(other.model_copy(update={"source": Source(run="r1")}), run.spec)


def test_demonstrations_have_no_extras_and_are_refused(make_on_policy: MakeRoom, tmp_path: Path) -> None:
    sampler = {"sampler": "fifo", "batch_size": 4, "demonstrations": {"path": str(tmp_path / "shown.hdf5")}}
    config = make_on_policy(replay=sampler).run.config
    with pytest.raises(UserError, match=r"replay\.demonstrations: the algorithm on-policy needs log_prob, value of"):
        check_suitable(config, point_spec(PointOptions.model_validate(config.environment.options)))
