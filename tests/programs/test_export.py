"""Exported files hold what really happened, and come back as it was."""

import itertools
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from true_episodes import assert_true

from clawq.core import Entry
from clawq.errors import UserError
from clawq.programs.episode_hdf5 import Hdf5Writer, read_hdf5, to_policy
from clawq.programs.episodes import Episode
from clawq.programs.export import Exported, export, open_writer
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.testing.experience import RUN, SPEC, Chances, TrueSlot, Truth
from clawq.transport.codec import decode, encode
from clawq.types import FragmentMeta

EXAMINER = Examiner(decode, FragmentCheck(SPEC, RUN))


def log_and_truth(fragments: int = 60) -> tuple[list[Entry], Truth]:
    """A log of three slots with gaps, repetitions and refused fragments, and what is true of it."""
    rng, ids, truth = np.random.default_rng(1), itertools.count(1), Truth()
    slots = [TrueSlot(f"s{i}", 3, rng, ids, bool(i % 2), Chances(0.1, 0.03)) for i in range(3)]
    entries = []
    for version in range(fragments):
        slot = slots[version % 3]
        fragment, told = slot.fragment(int(rng.integers(1, 9)), version)
        entry = Entry(slot.name, slot.epoch, slot.seq, bytes(encode(fragment)))
        if version % 13 == 5:
            entry = Entry(slot.name, slot.epoch, slot.seq, entry.payload[:-3] + b"\xff\x00\xff")
        elif version % 17 == 3:
            continue
        else:
            truth.insert(fragment, told)
        entries.append(entry)
    return entries, truth


def exported(path: Path, kind: str, entries: list[Entry], **options: object) -> Exported:
    with open_writer(kind, path, SPEC) as writer:
        return export(iter(entries), EXAMINER, writer, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["all.hdf5", "dataset"])
def test_what_is_written_as_hdf5_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    entries, truth = log_and_truth()
    done = exported(tmp_path / name, "hdf5", entries)
    episodes = list(read_hdf5(tmp_path / name, SPEC))
    assert_true(episodes, truth)
    assert done.refused == {"corrupt": 5}
    assert (done.episodes, done.steps) == (len(episodes), sum(episode.steps for episode in episodes))
    assert done.incomplete == sum(not episode.complete for episode in episodes) > 0
    assert {episode.meta.slot for episode in episodes} == {"s0", "s1", "s2"}
    assert all(episode.meta.run == RUN and episode.meta.env == SPEC.fingerprint for episode in episodes)


def test_what_is_written_as_parquet_is_one_row_for_each_transition(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    entries, truth = log_and_truth()
    done = exported(tmp_path / "all.parquet", "parquet", entries)
    table = parquet.read_table(tmp_path / "all.parquet")
    assert table.num_rows == done.steps == sum(step.valid for step in truth.steps.values())
    assert_true(_episodes_of(table), truth)
    assert b"clawq.env_spec" in table.schema.metadata


def _episodes_of(table: object) -> Iterator[Episode]:
    columns = {name: np.array(table[name].to_pylist()) for name in table.column_names}  # type: ignore[attr-defined, index]
    for number in np.unique(columns["episode"]):
        rows = columns["episode"] == number
        obs = {}
        for key, one in SPEC.obs.items():
            now, after = columns[f"observation.{key}"][rows], columns[f"next_observation.{key}"][rows]
            np.testing.assert_array_equal(now[1:], after[:-1])
            both = np.concatenate([now, after[-1:]]).astype(one.dtype)
            obs[key] = both.reshape(-1, *one.shape)
        terminated, truncated = columns["terminated"][rows], columns["truncated"][rows]
        yield Episode(
            meta=FragmentMeta("", "", "", 0, 0, "", 0, 0, 1, 1, 0),
            env=0,
            obs=obs,
            action=columns["policy_action"][rows].astype(np.float32),
            reward=columns["reward"][rows],
            terminated=terminated,
            truncated=truncated,
            weights_version=columns["weights_version"][rows],
            extras={},
            whole=True,
            ended=bool(terminated[-1] or truncated[-1]),
        )


def test_incomplete_episodes_may_be_left_out_and_an_end_be_set(tmp_path: Path) -> None:
    entries, _ = log_and_truth()
    all_of_it = exported(tmp_path / "a.hdf5", "hdf5", entries)
    done = exported(tmp_path / "b.hdf5", "hdf5", entries, keep_incomplete=False)
    episodes = list(read_hdf5(tmp_path / "b.hdf5", SPEC))
    assert episodes
    assert all(episode.complete for episode in episodes)
    assert done.steps + done.skipped_steps == all_of_it.steps
    few = exported(tmp_path / "c.hdf5", "hdf5", entries, max_steps=30)
    assert 30 <= few.steps < all_of_it.steps
    assert few.stopped == "30 steps were wanted"


def test_an_episode_that_breaks_off_does_not_end_in_a_terminal_state(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    entries, _ = log_and_truth()
    exported(tmp_path / "a.hdf5", "hdf5", entries)
    with h5py.File(tmp_path / "a.hdf5") as file:
        broken = [group for group in file.values() if not group.attrs["ended"]]
        assert broken
        assert all(group["truncations"][-1] and not group["terminations"][-1] for group in broken)


def test_an_export_that_fails_leaves_nothing_and_one_that_exists_is_not_touched(tmp_path: Path) -> None:
    entries, _ = log_and_truth()

    def breaking() -> Iterator[Entry]:
        yield from entries[:20]
        raise KeyboardInterrupt

    for kind, name in (("hdf5", "a"), ("hdf5", "a.h5"), ("parquet", "a.parquet")):
        with pytest.raises(KeyboardInterrupt), open_writer(kind, tmp_path / name, SPEC) as writer:
            export(breaking(), EXAMINER, writer)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match="exists already"):
            open_writer(kind, tmp_path / name, SPEC)
        (tmp_path / name).unlink()


def test_a_disk_that_is_full_is_told_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    entries, _ = log_and_truth()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for kind, name in (("hdf5", "a"), ("hdf5", "a.h5"), ("parquet", "a.parquet")):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
            with pytest.raises(UserError, match=r"the export cannot be written: .*[Ff]ile too large"):
                exported(tmp_path / name, kind, entries)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, kind in (("h5py", "hdf5"), ("pyarrow", "parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=rf"needs {module}, .*clawq\[export\]"):
            open_writer(kind, tmp_path / "x", SPEC)
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "text.hdf5").write_text("no")
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        list(read_hdf5(tmp_path / "text.hdf5", SPEC))
    with pytest.raises(UserError, match="neither an HDF5 file nor a Minari dataset"):
        list(read_hdf5(tmp_path / "absent", SPEC))
    with h5py.File(tmp_path / "empty.hdf5", "w"):
        pass
    with pytest.raises(UserError, match="holds no episodes"):
        list(read_hdf5(tmp_path / "empty.hdf5", SPEC))
    entries, _ = log_and_truth()
    exported(tmp_path / "a.hdf5", "hdf5", entries)
    other = EnvSpec("other", {"state": ArraySpec((4,))}, SPEC.action, ("state",), ("state",))
    with pytest.raises(UserError, match=r"episode_0/observations/state has shape \[\d+, 3\]; other needs \[\d+, 4\]"):
        list(read_hdf5(tmp_path / "a.hdf5", other))
    other = EnvSpec("other", {"touch": ArraySpec((3,))}, SPEC.action, ("touch",), ("touch",))
    with pytest.raises(UserError, match="touch"):
        list(read_hdf5(tmp_path / "a.hdf5", other))


def test_demonstrations_of_others_are_read_with_their_own_actions(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    spec = EnvSpec("box", {"obs": ArraySpec((2,))}, ActionSpec((-2.0, 0.0), (2.0, 10.0)), ("obs",), ("obs",))
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        group = file.create_group("episode_0")
        group["observations"] = np.arange(8, dtype=np.float64).reshape(4, 2)
        group["actions"] = np.array([[-2.0, 0.0], [2.0, 10.0], [0.0, 2.5]])
        group["rewards"] = np.array([0.0, 1.0, 2.0])
        group["terminations"] = np.array([False, False, True])
        group["truncations"] = np.array([False, False, False])
    [episode] = read_hdf5(tmp_path, spec)
    np.testing.assert_allclose(episode.action, np.array([[-1, -1], [1, 1], [0, -0.5]], np.float32))
    assert episode.complete
    assert episode.obs["obs"].dtype == np.float32
    chosen = np.random.default_rng(0).uniform(-1, 1, (50, 2)).astype(np.float32)
    np.testing.assert_allclose(to_policy(spec.action.to_env(chosen), spec), chosen, atol=1e-6)


def test_a_writer_without_episodes_makes_an_empty_dataset(tmp_path: Path) -> None:
    with Hdf5Writer(tmp_path / "a", SPEC):
        pass
    assert (tmp_path / "a" / "metadata.json").exists()
