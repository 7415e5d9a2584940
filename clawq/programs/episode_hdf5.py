"""Episodes as HDF5 in Minari's layout: writing and reading.

A group `episode_<n>` for each episode with `observations/<key>` [L+1, ...], `actions` [L, A] in the env's own units,
`rewards`, `terminations`, `truncations` [L], and `infos/`: `policy_action` (what the policy chose, in [-1, 1]),
`weights_version`, and the policy's extras. Attributes say where it comes from. A path that ends in .hdf5 or .h5 gets
the file alone; any other one becomes a folder, a whole dataset for `minari.MinariDataset(FOLDER)`.

An episode that the log breaks off has `complete` = False, and its last `truncations` is True, so that nobody takes its
end for a terminal state. Reading is for such files of anybody.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from clawq.errors import UserError
from clawq.programs.episode_files import Partial, need
from clawq.programs.episodes import Episode
from clawq.specs import ArraySpec, EnvSpec
from clawq.types import Array, FloatArray, FragmentMeta, Provenance

#: Version of Minari's layout that is written; checked with Minari 0.5.4.
MINARI_VERSION = "0.5.0"
#: Endings of a single HDF5 file.
HDF5_SUFFIXES = (".hdf5", ".h5")
#: How far outside its bounds an action may lie, in ranges: rounding.
BOUND_SLACK = 1e-4
_EPISODE = re.compile(r"episode_([0-9]{1,18})")
_ATTRIBUTES = ("slot", "epoch", "seq", "worker", "seed")
T = TypeVar("T", str, int, bool, float)


class Hdf5Writer(Partial):
    """Writes HDF5; see the module's text."""

    def __init__(self, path: Path, spec: EnvSpec) -> None:
        super().__init__(path)
        h5py = need("h5py", "HDF5")
        self._spec, self._alone = spec, path.suffix in HDF5_SUFFIXES
        if not self._alone:
            self.partial.mkdir()
        self._disk = _Disk(self.partial if self._alone else self.partial / "main_data.hdf5")
        self._file = h5py.File(self._disk, "w", track_order=True)
        self._file.attrs["env_spec_clawq"] = json.dumps(spec.to_json())

    def write(self, episode: Episode) -> None:
        """Add one episode."""
        group = self._file.create_group(f"episode_{self.episodes}")
        for name, column in _hdf5_columns(episode, self._spec).items():
            # Small columns are cheaper whole; chunks of compressed bytes pay for long ones.
            options = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if column.nbytes > 4096 else {}
            group.create_dataset(name, data=column, **options)
        meta, made_by = episode.meta, episode.meta.made_by
        facts: dict[str, Any] = {name: getattr(meta, name) for name in _ATTRIBUTES}
        facts |= {"id": self.episodes, "total_steps": episode.steps, "env": episode.env, "success": episode.success}
        facts |= {"complete": episode.complete, "whole": episode.whole, "ended": episode.ended}
        facts |= {"host": made_by.host, "clawq_version": made_by.version, "commit": made_by.commit}
        facts |= {"created_ms": meta.created_ms, "run": meta.run, "env_fingerprint": meta.env}
        group.attrs.update(facts)
        self._disk.check()
        self.steps += episode.steps
        self.episodes += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.attrs.update({"total_episodes": self.episodes, "total_steps": self.steps})
        self._file.close()
        self._disk.close()
        if error is not None or self._disk.refused is not None:
            self.drop()
        if error is not None:
            return
        if self._disk.refused is not None:
            raise UserError(f"the export cannot be written: {self._disk.refused.strerror}")
        if not self._alone:
            metadata = {
                "total_episodes": self.episodes,
                "total_steps": self.steps,
                "data_format": "hdf5",
                "jpeg_encoding": False,
                "observation_space": json.dumps(_observation_space(self._spec)),
                "action_space": json.dumps(_action_space(self._spec)),
                "minari_version": MINARI_VERSION,
                "dataset_id": f"clawq/{_plain(self._spec.name)}-v0",
                "description": f"exported by clawq from {self._spec.name}",
            }
            (self.partial / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        self.finish()


class _Disk:
    """The file under an HDF5 file. What the disk refuses is kept here: HDF5 crashes at its end after a failed write.

    Attributes:
        refused: why the disk refused; from then on nothing is written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._at = self._end = 0
        self.refused: OSError | None = None

    def check(self) -> None:
        """Raise what the disk refused."""
        if self.refused is not None:
            raise self.refused

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.seek(self._at)
            done = 0 if self.refused is None else len(view)
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.refused = error
        self._at += len(view)
        self._end = max(self._end, self._at)
        return len(view)

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._at)
        got = self._file.readinto(view) or 0
        view[got:] = bytes(len(view) - got)
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        try:
            if self.refused is None:
                self._file.truncate(self._end)
        except OSError as error:
            self.refused = error
        return self._end

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._file.close()


def _hdf5_columns(episode: Episode, spec: EnvSpec) -> dict[str, Array]:
    truncated = np.array(episode.truncated)
    if not episode.ended:
        truncated[-1] = True
    return {
        **{f"observations/{key}": column for key, column in episode.obs.items()},
        "actions": spec.action.to_env(episode.action),
        "rewards": episode.reward,
        "terminations": episode.terminated,
        "truncations": truncated,
        "infos/policy_action": episode.action,
        "infos/weights_version": episode.weights_version,
        **{f"infos/{name}": column for name, column in episode.extras.items()},
    }


def _observation_space(spec: EnvSpec) -> dict[str, Any]:
    return {"type": "Dict", "subspaces": {key: _box(array) for key, array in spec.obs.items()}}


def _box(array: ArraySpec) -> dict[str, Any]:
    least, most = (0, 255) if array.dtype == "uint8" else (-np.inf, np.inf)
    low, high = (np.full(array.shape, bound).tolist() for bound in (least, most))
    return {"type": "Box", "dtype": array.dtype, "shape": list(array.shape), "low": low, "high": high}


def _action_space(spec: EnvSpec) -> dict[str, Any]:
    bounds = {"low": list(spec.action.low), "high": list(spec.action.high)}
    return {"type": "Box", "dtype": "float32", "shape": [spec.action.size], **bounds}


def _plain(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-._" else "-" for char in name)


def read_hdf5(path: Path, spec: EnvSpec) -> Iterator[Episode]:
    """The episodes of an HDF5 file or Minari dataset, exported by clawq or made by anybody in that layout.

    Args:
        path: a file, or a folder with `main_data.hdf5` in it or in its `data` folder.
        spec: of the environment that they must fit. A dataset whose observations are one array fits a spec of one key.

    Actions are taken from `infos/policy_action`, or else scaled back from the env's units to [-1, 1].

    Raises:
        UserError: it cannot be read, or does not fit; the text says which episode and what.
    """
    with opened(path) as episodes:
        for where, group in episodes:
            yield _read_episode(group, where, spec)


@contextmanager
def opened(path: Path) -> Iterator[Iterator[tuple[str, Any]]]:
    """The episodes of a file or dataset, not read yet: (where it is, its group) of each; raises as `read_hdf5`."""
    h5py, file = need("h5py", "HDF5"), find_hdf5(path)
    try:
        with h5py.File(file, "r") as content:
            found = sorted((int(number[1]), name) for name in content if (number := _EPISODE.fullmatch(name)))
            if not found:
                raise UserError(f"{file} holds no episodes (groups named episode_0, episode_1 ...)")
            yield ((f"{file}: {name}", content[name]) for _, name in found)
    except OSError as error:
        raise UserError(f"{file} cannot be read as HDF5: {error}") from None


def find_hdf5(path: Path) -> Path:
    """The HDF5 file that is meant; UserError if there is none."""
    for file in (path, path / "main_data.hdf5", path / "data" / "main_data.hdf5"):
        if file.is_file():
            return file
    raise UserError(f"{path} is neither an HDF5 file nor a Minari dataset (a folder with main_data.hdf5)")


def _read_episode(group: Any, where: str, spec: EnvSpec) -> Episode:
    try:
        rewards = np.asarray(group["rewards"], np.float32)
        observations, infos = group["observations"], group.get("infos", {})
        obs = {key: _of_kind(np.asarray(_leaf(observations, key, spec)), key, spec) for key in spec.obs}
        if "policy_action" in infos:
            action = np.asarray(infos["policy_action"], np.float32)
        else:
            action = to_policy(_within_bounds(np.asarray(group["actions"], np.float32), spec), spec)
        terminated = np.asarray(group["terminations"], np.bool_)
        truncated = np.asarray(group["truncations"], np.bool_)
        version = infos.get("weights_version")
        versions = np.zeros(len(rewards), np.int64) if version is None else np.asarray(version, np.int64)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where} cannot be used: {error}") from None
    steps = len(rewards)
    expected = {f"observations/{key}": ((steps + 1, *one.shape), obs[key]) for key, one in spec.obs.items()}
    expected |= {"actions": ((steps, spec.action.size), action), "terminations": ((steps,), terminated)}
    expected |= {"rewards": ((steps,), rewards)}
    expected |= {"truncations": ((steps,), truncated), "infos/weights_version": ((steps,), versions)}
    for leaf, (shape, array) in expected.items():
        if steps < 1 or array.shape != shape:
            raise UserError(f"{where}/{leaf} has shape {list(array.shape)}; {spec.name} needs {list(shape)}")
    early = np.flatnonzero((terminated | truncated)[:-1])
    if len(early):
        raise UserError(f"{where} ends at step {early[0]} of 0 to {steps - 1}; cut it there, nothing comes behind")
    attrs = _Facts(group.attrs)
    meta = FragmentMeta(
        run=attrs.get("run", ""),
        worker=attrs.get("worker", ""),
        slot=attrs.get("slot", ""),
        epoch=attrs.get("epoch", 0),
        seq=attrs.get("seq", 0),
        env=attrs.get("env_fingerprint", ""),
        seed=attrs.get("seed", 0),
        weights_version=int(versions[0]),
        steps=steps,
        envs=1,
        produced=0,
        created_ms=attrs.get("created_ms", 0),
        made_by=Provenance(attrs.get("host", ""), spec.name, attrs.get("clawq_version", "")),
    )
    ended = attrs.get("ended", bool(terminated[-1] or truncated[-1]))
    return Episode(
        meta=meta,
        env=attrs.get("env", 0),
        obs={key: obs[key].astype(one.dtype) for key, one in spec.obs.items()},
        action=action,
        reward=rewards,
        terminated=terminated,
        truncated=truncated if ended else truncated & False,
        weights_version=versions,
        extras={},
        whole=attrs.get("whole", True),
        ended=ended,
        success=attrs.get("success", float("nan")),
    )


class _Facts:
    """Attributes of an episode; what others wrote there of another kind (a seed of "None") counts as not there."""

    def __init__(self, attrs: Any) -> None:
        self._attrs = attrs

    def get(self, name: str, default: T) -> T:
        """The attribute, if it is of the default's type."""
        try:
            given = self._attrs.get(name, default)
            return default if np.ndim(given) else type(default)(given)
        except (OSError, OverflowError, TypeError, ValueError):
            return default


def _of_kind(array: Array, key: str, spec: EnvSpec) -> Array:
    """The array, if it can be had in the spec's dtype without changing its meaning; ValueError otherwise."""
    wanted = spec.obs[key].dtype
    if array.dtype != wanted and not (wanted == "float32" and array.dtype.kind in "fiu"):
        raise ValueError(f"observations/{key} is {array.dtype}; {spec.name} needs {wanted}")
    return array


def _within_bounds(action: FloatArray, spec: EnvSpec) -> FloatArray:
    """Env actions [L, A], if they are inside the env's bounds (but for rounding); ValueError otherwise."""
    low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
    if action.ndim != 2 or action.shape[1] != spec.action.size:
        raise ValueError(f"actions has shape {list(action.shape)}; {spec.name} takes {spec.action.size} numbers a step")
    slack = BOUND_SLACK * (high - low)
    outside = np.argwhere((action < low - slack) | (action > high + slack))
    if len(outside):
        t, place = outside[0].tolist()
        raise ValueError(
            f"actions of step {t} has {action[t, place]:g} at place {place}, outside of {spec.name}'s "
            f"[{low[place]:g}, {high[place]:g}]"
        )
    return action


def _leaf(observations: Any, key: str, spec: EnvSpec) -> Any:
    """The array of a key; a dataset without keys is the one key of the spec."""
    if hasattr(observations, "keys"):
        return observations[key]
    if len(spec.obs) == 1:
        return observations
    raise KeyError(f"its observations are one array; {spec.name} has {', '.join(spec.obs)}")


def to_policy(action: FloatArray, spec: EnvSpec) -> FloatArray:
    """Env actions [..., A] -> policy space [-1, 1]; the inverse of `ActionSpec.to_env` within the bounds."""
    low, high = np.asarray(spec.action.low, np.float32), np.asarray(spec.action.high, np.float32)
    unit = (action - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
    scaled: FloatArray = np.clip(2.0 * unit - 1.0, -1.0, 1.0).astype(np.float32)
    return scaled
