"""Episodes as Parquet: one row for each transition.

Columns: `episode`, `t`, `observation.<key>`, `next_observation.<key>`, `action` (the env's own units), `policy_action`
(what the policy chose, in [-1, 1]), `reward`, `terminated`, `truncated`, `weights_version`, `extra.<name>`, and where
it comes from. Arrays are flat lists of fixed size; their shapes are in the schema's metadata (`clawq.env_spec`).
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from clawq.errors import UserError
from clawq.programs.episode_files import Partial, need
from clawq.programs.episodes import Episode
from clawq.specs import EnvSpec
from clawq.types import Array

#: Rows of one row group: what is held in memory.
_ROWS = 20_000


class ParquetWriter(Partial):
    """Writes Parquet; see the module's text."""

    def __init__(self, path: Path, spec: EnvSpec) -> None:
        super().__init__(path)
        self._arrow, self._parquet = need("pyarrow", "Parquet"), need("pyarrow.parquet", "Parquet")
        self._spec = spec
        self._writer: Any = None
        self._extras: list[str] = []
        self._held: list[Any] = []
        self._held_rows = 0

    def write(self, episode: Episode) -> None:
        """Add one episode."""
        if self._writer is None:
            # One schema for the whole file: the extras of the first episode.
            self._extras = sorted(episode.extras)
        table = self._arrow.table(self._columns(episode))
        if self._writer is None:
            about = {"clawq.env_spec": json.dumps(self._spec.to_json())}
            schema = table.schema.with_metadata(about)
            self._writer = self._parquet.ParquetWriter(self.partial, schema, compression="zstd")
        self._held.append(table.cast(self._writer.schema))
        self._held_rows += episode.steps
        self.steps += episode.steps
        self.episodes += 1
        if self._held_rows >= _ROWS:
            self._flush()

    def _columns(self, episode: Episode) -> dict[str, Any]:
        arrow, meta, steps = self._arrow, episode.meta, episode.steps
        columns: dict[str, Any] = {
            "episode": arrow.array(np.full(steps, self.episodes, np.int64)),
            "t": arrow.array(np.arange(steps, dtype=np.int32)),
        }
        for key, column in episode.obs.items():
            columns[f"observation.{key}"] = self._lists(column[:-1])
            columns[f"next_observation.{key}"] = self._lists(column[1:])
        columns["action"] = self._lists(self._spec.action.to_env(episode.action))
        columns["policy_action"] = self._lists(episode.action)
        columns["reward"] = arrow.array(episode.reward)
        columns["terminated"] = arrow.array(episode.terminated)
        columns["truncated"] = arrow.array(episode.truncated)
        columns["weights_version"] = arrow.array(episode.weights_version)
        for name in self._extras:
            extra = episode.extras.get(name)
            columns[f"extra.{name}"] = self._lists(extra) if extra is not None else arrow.nulls(steps)
        columns["complete"] = arrow.array(np.full(steps, episode.complete))
        columns["env"] = arrow.array(np.full(steps, episode.env, np.int32))
        columns["epoch"] = arrow.array(np.full(steps, meta.epoch, np.int64))
        columns["seq"] = arrow.array(np.full(steps, meta.seq, np.int64))
        columns["seed"] = arrow.array(np.full(steps, meta.seed, np.int64))
        for name, text in {"slot": meta.slot, "worker": meta.worker, "host": meta.made_by.host}.items():
            columns[name] = arrow.array([text] * steps, arrow.string())
        return columns

    def _lists(self, column: Array) -> Any:
        """[L, ...] -> a column of lists (flat; the shape is in the spec), or of numbers for [L]."""
        if column.ndim == 1:
            return self._arrow.array(column)
        flat = np.ascontiguousarray(column).reshape(-1)
        return self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(flat), int(np.prod(column.shape[1:])))

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(self._arrow.concat_tables(self._held))
        self._held, self._held_rows = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
            if self._writer is not None:
                self._writer.close()
        except OSError as refused:
            self.drop()
            if error is None:
                raise UserError(f"the export cannot be written: {refused.strerror or refused}") from None
            return
        if error is not None or self._writer is None:
            # Without an episode there is no schema, and no file.
            self.drop()
            return
        self.finish()
