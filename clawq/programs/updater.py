"""The updater: one gradient update at a time, guarded against non-finite numbers.

An update that meets a NaN or infinity changes no weights (the algorithm promises that): the batch is kept on disk for
inspection, the event is counted, and after `max_in_a_row` of them the learner gives up with a report instead of
training on in silence.
"""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from clawq.core import Algorithm, Batch
from clawq.errors import NonFiniteUpdate, TooManyNonFinite
from clawq.types import Metrics

log = logging.getLogger(__name__)

#: Batches of skipped updates that are kept; the oldest go first.
KEPT_BATCHES = 10


class Updater:
    """Runs `algorithm.step` and keeps count.

    Args:
        algorithm: what learns.
        folder: where the batches of skipped updates go.
        max_in_a_row: skipped updates in a row after which TooManyNonFinite is raised.
    """

    def __init__(self, algorithm: Algorithm, folder: Path, max_in_a_row: int) -> None:
        self.algorithm = algorithm
        self.updates = 0
        self.skipped = 0
        self.policy_lag = 0.0
        self.metrics: Metrics = {}
        self._folder = folder
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def update(self, batch: Batch, progress: float) -> bool:
        """One update; a non-finite one is skipped, its batch kept. Whether it was made.

        Raises TooManyNonFinite when too many are skipped in a row.
        """
        try:
            self.metrics = self.algorithm.step(batch, progress)
        except NonFiniteUpdate as error:
            self._skip(batch, error)
            return False
        self.updates += 1
        self._in_a_row = 0
        return True

    def _skip(self, batch: Batch, error: NonFiniteUpdate) -> None:
        self.skipped += 1
        self._in_a_row += 1
        try:
            log.warning("%s; its batch is in %s", error, self._keep(batch))
        except (OSError, SafetensorError) as unwritten:
            log.warning("%s; its batch could not be kept: %s", error, unwritten)
        if self._in_a_row >= self._max_in_a_row:
            raise TooManyNonFinite(
                f"{self._in_a_row} updates in a row were not finite (last: {error}). The weights are as they were "
                f"before them; the batches are in {self._folder}. Usual causes: learning rate too large, reward_scale "
                "too large, or a simulator that sends absurd values."
            ) from error

    def _keep(self, batch: Batch) -> Path:
        self._folder.mkdir(exist_ok=True)
        tensors: dict[str, torch.Tensor] = {
            "action": batch.action,
            "reward": batch.reward,
            "discount": batch.discount,
            "row": batch.row,
            "weights_version": batch.weights_version,
        }
        tensors |= {f"obs.{key}": value for key, value in batch.obs.items()}
        tensors |= {f"next_obs.{key}": value for key, value in batch.next_obs.items()}
        path = self._folder / f"batch-{self.updates:09d}-{self.skipped:04d}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        for old in sorted(self._folder.glob("batch-*.safetensors"))[:-KEPT_BATCHES]:
            old.unlink()
        return path
