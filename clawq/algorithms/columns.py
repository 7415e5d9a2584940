"""Which columns of one concatenated observation row the policy and the critic see.

A flat observation (key -> [B, ...]) is concatenated once into rows [B, S]: the policy's keys first, then the keys that
only the critic sees. So the rows are normalised once, the policy's input is a prefix (a view, no copy), and the
critic's is a few runs of columns. Integer images are taken as plain numbers.

In a goal environment the normaliser's statistics are of goals that were desired and of goals that were achieved, since
hindsight puts the latter into the former's place. By the desired ones alone a coordinate in which they are all alike
(the height of a table) would be blown up until a network could tell many of hindsight's goals from real ones, and what
is learned from those need not hold for these.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clawq.specs import EnvSpec


class Columns:
    """Layout of the concatenated rows of one env spec.

    Attributes:
        keys: the concatenated keys, in order.
        size: S.
        policy_size: width of the policy's input: the first columns.
        critic_size: width of the critic's observation input.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.keys = spec.policy_keys + tuple(key for key in spec.critic_keys if key not in spec.policy_keys)
        self.size = sum(spec.obs[key].size for key in self.keys)
        self.policy_size, self.critic_size = spec.policy_size, spec.critic_size
        self._critic_runs = _runs(spec, self.keys)
        achieved, desired = spec.goal_keys or ("", "")
        #: The keys with the achieved goal in the desired one's place.
        self._hindsight_keys = tuple(achieved if key == desired else key for key in self.keys)

    def views(self, obs: Mapping[str, Any]) -> Tensor:
        """Observations [R, ...] as a batch may show them, float32 [R, V, S]: as they are, and with hindsight's goal."""
        as_it_is = self.rows(obs)
        if self._hindsight_keys == self.keys:
            return as_it_is.unsqueeze(1)
        return torch.stack((as_it_is, self._concatenate(self._hindsight_keys, obs).float()), 1)

    def rows(self, obs: Mapping[str, Any], out: Tensor | None = None) -> Tensor:
        """Concatenate observations [B, ...] to float32 rows [B, S]; into `out` if it is given."""
        rows = self._concatenate(self.keys, obs, out)
        return rows.float() if out is None else rows

    @staticmethod
    def _concatenate(keys: tuple[str, ...], obs: Mapping[str, Any], out: Tensor | None = None) -> Tensor:
        parts = [obs[key].reshape(obs[key].shape[0], -1) for key in keys]
        return torch.cat(parts, 1, out=out)

    def write_critic(self, rows: Tensor, out: Tensor) -> None:
        """Copy the critic's columns of rows [B, S] to the first columns of `out` [B, critic_size + ...]."""
        for source, target, width in self._critic_runs:
            out[:, target : target + width] = rows[:, source : source + width]


def _runs(spec: EnvSpec, keys: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """(source column, target column, width) of the critic's keys, neighbours joined."""
    starts, at = {}, 0
    for key in keys:
        starts[key] = at
        at += spec.obs[key].size
    runs: list[tuple[int, int, int]] = []
    target = 0
    for key in spec.critic_keys:
        width = spec.obs[key].size
        if runs and runs[-1][0] + runs[-1][2] == starts[key]:
            source, first, joined = runs.pop()
            runs.append((source, first, joined + width))
        else:
            runs.append((starts[key], target, width))
        target += width
    return runs
