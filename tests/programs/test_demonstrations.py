"""Demonstrations: what is read is what was shown, every batch has its share, and what does not fit is refused."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from stitched import stitch

from clawq.algorithms.td3 import Td3Options, plugin
from clawq.config import Demonstrations, Replay, RunConfig
from clawq.core import DEMONSTRATED
from clawq.errors import CheckpointInvalid, UserError
from clawq.programs import episode_files
from clawq.programs.demonstrations import load_demonstrations
from clawq.programs.episode_hdf5 import Hdf5Writer
from clawq.programs.memory import Machine
from clawq.programs.suitability import check_suitable
from clawq.replay.batches import Batches
from clawq.replay.mixed import Draws, Mixed
from clawq.replay.nstep import Gatherer, gather
from clawq.replay.prioritized import PrioritizedSampler
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler
from clawq.testing.experience import SPEC, Chances, TrueSlot, Truth, ids_of, obs_of
from clawq.testing.point import SPEED, PointEnv, PointOptions, point_spec
from clawq.types import Fragment, FragmentMeta

RETURNS = Returns(3, 0.9, 2.0)


def replay(path: Path, share: float = 0.5, batch_size: int = 16) -> Replay:
    return Replay(demonstrations=Demonstrations(path=str(path), share=share), batch_size=batch_size)


def shown(path: Path, fragments: int = 10, first_id: int = 1) -> Truth:
    """Write a dataset of true episodes (some of which break off); the truth about them."""
    slot = TrueSlot("s", 3, np.random.default_rng(0), count(first_id), chances=Chances(0.15, 0.0))
    truth, made = Truth(), []
    for _ in range(fragments):
        fragment, told = slot.fragment(4)
        truth.insert(fragment, told)
        made.append(fragment)
    with Hdf5Writer(path, SPEC) as writer:
        for episode in stitch(made):
            writer.write(episode)
    return truth


def ids(obs: Any) -> list[int]:
    found: list[int] = ids_of({key: one.numpy() for key, one in obs.items()}).tolist()
    return found


def by_hand(path: Path, change: Callable[[Any], object] = lambda file: None) -> Path:
    """A file as somebody else would write it: two episodes of three steps, actions in the env's own units."""
    with h5py.File(path, "w") as file:
        for number, first in enumerate((10, 20)):
            group = file.create_group(f"episode_{number}")
            for key, column in obs_of(np.arange(first, first + 4)).items():
                group[f"observations/{key}"] = column.astype(np.float64) if key == "state" else column
            group["actions"] = np.linspace(-1, 1, 6).reshape(3, 2)
            group["rewards"] = np.array([1.0, 2.0, 4.0])
            group["terminations"] = np.array([False, False, number == 0])
            group["truncations"] = np.zeros(3, bool)
        change(file)
    return path


def test_what_is_read_is_what_was_shown_at_every_end_and_with_n_step_returns(tmp_path: Path) -> None:
    truth = shown(tmp_path / "shown.hdf5")
    lane = load_demonstrations(replay(tmp_path / "shown.hdf5"), SPEC, RETURNS, "cpu", 0)
    rows = lane.ring.sampleable_rows()
    assert lane.ring.check_valid() == (True, "")
    assert len(rows) == len(truth.steps) == lane.metrics()["demonstrations/env_steps"]
    assert lane.ring.capacity <= 2 * len(rows)
    for n in (1, 3, 10):
        batch = gather(lane.ring, torch.from_numpy(rows), Returns(n, 0.9))
        first, after = ids(batch.obs), ids(batch.next_obs)
        assert set(first) == set(truth.steps)
        expected = [truth.transition(one, n, 0.9) for one in first]
        np.testing.assert_allclose(batch.reward, [one[0] for one in expected], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(batch.discount, [one[1] for one in expected], rtol=1e-6)
        assert after == [one[2] for one in expected]
        np.testing.assert_allclose(batch.action, [truth.steps[one].action for one in first], atol=1e-6)
        assert set(batch.weights_version.tolist()) == {DEMONSTRATED}


def renamed(file: Any) -> None:
    """Numbers as somebody else may write them, and a group that has none."""
    file.move("episode_1", "episode_010")
    file.move("episode_0", "episode_02")
    file.create_group("episode_²")


def attributed(file: Any) -> None:
    """Attributes as somebody else may write them: Minari has a seed of "None"."""
    file["episode_0"].attrs.update(seed="None", success="yes", epoch=[1, 2], ended=[True, False])
    file["episode_1"].attrs["seed"] = h5py.Empty("f")


@pytest.mark.parametrize("change", [lambda file: None, renamed, attributed])
def test_a_file_of_somebody_else_is_read_and_an_episode_without_an_end_bootstraps(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    lane = load_demonstrations(replay(by_hand(tmp_path / "f.h5", change)), SPEC, RETURNS, "cpu", 0)
    batch = gather(lane.ring, torch.from_numpy(lane.ring.sampleable_rows()), Returns(1, 0.5))
    assert ids(batch.obs) == [10, 11, 12, 20, 21, 22]
    assert ids(batch.next_obs) == [11, 12, 13, 21, 22, 23]
    assert batch.discount.tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(batch.action[:3], np.linspace(-1, 1, 6).reshape(3, 2), atol=1e-6)


@pytest.mark.parametrize(
    ("size", "share", "demonstrated"),
    [(16, 0.5, 8), (16, 0.25, 4), (5, 0.5, 3), (256, 0.1, 26), (8, 0.01, 1), (8, 0.99, 7)],
)
def test_every_batch_has_its_share_of_either_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, share: float, demonstrated: int
) -> None:
    shown(tmp_path / "shown.hdf5", first_id=100_000)
    wanted = replay(tmp_path / "shown.hdf5", share, size)
    assert (wanted.demonstrated, wanted.drawn) == (demonstrated, size - demonstrated)
    assert wanted.transitions == wanted.drawn
    lane = load_demonstrations(wanted, SPEC, RETURNS, "cpu", 0)
    ring, slot = ReplayRing(SPEC, 500), TrueSlot("s", 3, np.random.default_rng(0), count(1))
    sampler = PrioritizedSampler(ring, torch.Generator().manual_seed(0))
    own = Batches(ring, sampler, wanted.drawn, lambda: Gatherer(ring, wanted.drawn, RETURNS))
    mixed = Mixed(own, lane.batches)
    told: list[tuple[Any, Any]] = []
    monkeypatch.setattr(sampler, "learned", lambda rows, error: told.append((rows, error)))
    seen: set[int] = set()
    for _ in range(20):
        ring.insert(slot.fragment(4)[0])
        batch = mixed.next()
        kinds = [one >= 100_000 for one in ids(batch.obs)]
        assert kinds == [False] * wanted.drawn + [True] * demonstrated
        assert [one >= 100_000 for one in ids(batch.next_obs)] == kinds
        assert batch.made_by is not None
        assert (batch.made_by == DEMONSTRATED).tolist() == kinds
        assert {len(one) for one in (batch.reward, batch.discount, batch.action, batch.importance_weight)} == {size}
        assert batch.importance_weight[wanted.drawn :].tolist() == [1.0] * demonstrated
        # Each row is what its own lane says
        for rings, part in ((ring, slice(0, wanted.drawn)), (lane.ring, slice(wanted.drawn, None))):
            alone = gather(rings, batch.row[part], RETURNS)
            assert torch.equal(alone.reward, batch.reward[part])
            assert torch.equal(alone.action, batch.action[part])
        mixed.learned(batch, torch.arange(float(size)))
        rows, error = told[-1]
        assert (rows.tolist(), error.tolist()) == (batch.row[: wanted.drawn].tolist(), list(range(wanted.drawn)))
        seen |= {one for one in ids(batch.obs) if one >= 100_000}
    assert len(seen) > min(16 * demonstrated, lane.ring.size) * 0.5


def test_draws_go_on_where_they_were_and_another_file_is_refused(tmp_path: Path) -> None:
    shown(tmp_path / "one.hdf5")
    shown(tmp_path / "other.hdf5", fragments=11)
    one, twin, other = (
        load_demonstrations(replay(tmp_path / name), SPEC, RETURNS, "cpu", 0)
        for name in ("one.hdf5", "one.hdf5", "other.hdf5")
    )
    one.batches.next()
    one.batches.rewind()
    twin.load_state_dict(one.state_dict())
    for _ in range(5):
        assert one.batches.next().row.tolist() == twin.batches.next().row.tolist()
    with pytest.raises(CheckpointInvalid, match="the file is not the one with which this run was trained"):
        other.load_state_dict(one.state_dict())


def replaced(name: str, column: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        if name in file:
            del file[name]
        file[name] = column

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file["episode_1/observations"].__delitem__("grid"), r"episode_1.*grid"),
        (lambda file: file["episode_1"].__delitem__("rewards"), r"episode_1.*rewards"),
        (
            replaced("episode_0/observations/state", np.zeros((4, 5))),
            r"episode_0/observations/state has shape \[4, 5\]",
        ),
        (replaced("episode_0/observations/state", np.zeros((3, 3))), r"needs \[4, 3\]"),
        (replaced("episode_0/observations/picture", np.zeros((4, 2, 2))), r"picture is float64; .* needs uint8"),
        (replaced("episode_0/observations/state", np.full((4, 3), b"x")), r"state is \|S1; .* needs float32"),
        (replaced("episode_1/actions", np.array([[0, 0], [0, 3], [0, 0]])), r"step 1 has 3 at place 1, outside of"),
        (replaced("episode_1/actions", np.zeros((3, 4))), r"actions has shape \[3, 4\]"),
        (replaced("episode_1/rewards", np.array([0, np.nan, 0])), r"episode 1 cannot be learned from: .*nan or inf"),
        (replaced("episode_1/infos/policy_action", np.full((3, 2), 1.5)), r"episode 1 .*actions are stored in"),
        (replaced("episode_1/rewards", np.zeros((3, 1))), r"episode_1/rewards has shape \[3, 1\]"),
        (replaced("episode_1/terminations", np.array([False, True, False])), r"episode_1 ends at step 1 of 0 to 2"),
        (replaced("episode_1/infos", np.zeros(3)), r"episode_1 cannot be used"),
        (lambda file: [file.__delitem__(name) for name in list(file)], "holds no episodes"),
        (lambda file: file["episode_1"].attrs.update(env_fingerprint="0" * 16), "made in another environment than"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_episode_and_the_reason(
    tmp_path: Path, change: Callable[[Any], object], told: str
) -> None:
    path = tmp_path / "f.hdf5"
    by_hand(path, change)
    with pytest.raises(UserError, match=told):
        load_demonstrations(replay(path), SPEC, RETURNS, "cpu", 0)


def test_a_run_is_refused_before_it_is_registered_if_its_demonstrations_are_of_another_environment(
    tmp_path: Path,
) -> None:
    shown(tmp_path / "other.hdf5")
    replay = {"demonstrations": {"path": str(tmp_path / "other.hdf5")}}
    config = RunConfig.model_validate({"name": "t", "environment": {"name": "point"}, "replay": replay})
    with pytest.raises(UserError, match=r"other\.hdf5"):
        check_suitable(config, point_spec(PointOptions()))


def test_a_file_that_is_missing_or_no_hdf5_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither an HDF5 file nor a Minari dataset"):
        load_demonstrations(replay(tmp_path / "nowhere.hdf5"), SPEC, RETURNS, "cpu", 0)
    (tmp_path / "text.hdf5").write_text("hello")
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        load_demonstrations(replay(tmp_path / "text.hdf5"), SPEC, RETURNS, "cpu", 0)


def test_without_its_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(episode_files, "import_module", nothing)
    with pytest.raises(UserError, match=r"needs h5py.*pip install 'clawq\[export\]'"):
        load_demonstrations(replay(by_hand(tmp_path / "f.h5")), SPEC, RETURNS, "cpu", 0)


def test_what_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(1000))
    with pytest.raises(UserError, match=r"would take .*B on cpu, where 1 KB are free; at most 50%"):
        load_demonstrations(replay(by_hand(tmp_path / "f.h5")), SPEC, RETURNS, "cpu", 0)


def test_a_minari_dataset_is_a_folder(tmp_path: Path) -> None:
    truth = shown(tmp_path / "dataset")
    lane = load_demonstrations(replay(tmp_path / "dataset"), SPEC, RETURNS, "cpu", 0)
    assert lane.ring.size == len(truth.steps)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny networks more threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- they help -----------------------------------------------------------------------------------------------------


def played(act: Callable[[Any], Any], envs: int, seed: int, epoch: int = 1) -> tuple[Fragment, float]:
    """One episode of each of N points: a fragment, and the share of them that ended at their goals."""
    env = PointEnv(PointOptions(), envs)
    obs = env.reset([seed + one for one in range(envs)])
    columns: dict[str, list[Any]] = {name: [] for name in ("action", "reward", "terminated", "truncated", "valid")}
    seen = [obs]
    for _ in range(20):
        action = np.clip(act(obs), -1, 1).astype(np.float32)
        result = env.step(env.spec.action.to_env(action))
        columns["action"].append(action)
        for name in ("reward", "terminated", "truncated", "valid"):
            columns[name].append(getattr(result, name))
        obs = result.obs
        seen.append(obs)
    meta = FragmentMeta("0" * 32, "h/w", "s", epoch, 1, env.spec.fingerprint, 0, 0, 20, envs, 20 * envs)
    arrays: dict[str, Any] = {name: np.stack(one) for name, one in columns.items()}
    all_obs = {key: np.stack([one[key] for one in seen]) for key in obs}
    return Fragment(meta, all_obs, final_obs=result.final_obs, **arrays), float(result.success.mean())


def acted(policy: Any, obs: Any) -> Any:
    """What a policy does, without exploring."""
    return policy.act(obs)


def towards(obs: Any) -> Any:
    """An expert, a little clumsy."""
    move = (obs["desired_goal"] - obs["observation"]) / SPEED
    return move + np.random.default_rng(int(1e6 * abs(move).sum())).normal(0, 0.3, move.shape)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(600)
def test_with_demonstrations_a_policy_learns_what_its_own_experience_cannot_teach(tmp_path: Path) -> None:
    spec, rng = point_spec(PointOptions()), np.random.default_rng(0)
    with Hdf5Writer(tmp_path / "expert.hdf5", spec) as writer:
        for episode in stitch([played(towards, 25, 1000)[0]]):
            writer.write(episode)
    # Actors that hardly ever move: what moving is good for, they do not see
    own = [played(lambda obs: rng.normal(0, 0.02, (25, 2)), 25, 25 * epoch, epoch)[0] for epoch in range(1, 5)]
    reached = {}
    for share in (None, 0.5):
        wanted = replay(tmp_path / "expert.hdf5", share, 128) if share else Replay(batch_size=128)
        returns, ring = Returns(1, 0.9), ReplayRing(spec, 5000)
        algorithm = plugin.make_algorithm(spec, Td3Options(hidden=(64, 64)), "cpu", 0)
        for fragment in own:
            ring.insert(fragment)
            obs = {key: torch.from_numpy(column[:-1].reshape(-1, 2)) for key, column in fragment.obs.items()}
            algorithm.observe(obs, torch.ones(500, dtype=torch.bool))
        sampler = UniformSampler(ring, torch.Generator().manual_seed(0))
        own_rows = Batches(ring, sampler, wanted.drawn, partial(Gatherer, ring, wanted.drawn, returns))
        batches: Draws = own_rows
        if share:
            lane = load_demonstrations(wanted, spec, returns, "cpu", 1)
            assert lane.ring.size == 500
            batches = Mixed(own_rows, lane.batches)
        for update in range(1500):
            algorithm.step(batches.next(), update / 1500)
        policy = plugin.make_policy(spec, Td3Options(hidden=(64, 64)))
        policy.load(algorithm.weights())
        with torch.inference_mode():
            reached[share] = played(partial(acted, policy), 50, 50_000)[1]
    assert reached[0.5] >= 0.8, reached
    assert reached[None] <= 0.5, reached
