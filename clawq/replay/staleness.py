"""The staleness contract: how old experience may be, and what becomes of what is older.

Policy lag = the learner's weights version − the version under which a fragment was made. It is counted where it
matters, when a gradient uses a row, and nothing here is about time: a learner that stands still makes nothing stale.

    target   what actors pace themselves to, through the unread window (clawq.control.regulator): nothing is wasted
    hard     what the learner holds to, whatever actors do:
               drop      older fragments are refused, and rows that have grown older are masked in the ring; counted
               reweight  all is used; a row's importance weight is multiplied by decay^(lag − hard) where lag > hard

An off-policy learner can do with any lag, so both are off unless they are asked for. `StalenessRule` is the contract,
pure; `Ageing` holds a ring to it and measures. Both decide by versions alone, so a learner that is fed its schedule
again decides the same again.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from clawq.core import DEMONSTRATED, Batch
from clawq.errors import ConfigError
from clawq.replay.rate_limiter import Unlimited
from clawq.replay.ring import VERSION, ReplayRing
from clawq.types import Array, FloatArray, Metrics

OnStale = Literal["drop", "reweight"]
#: Updates over which the lag at use is reported.
LAGS_AVERAGED = 1000


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """See the module's text.

    Args:
        target: lag at insertion that actors are paced to, in weights versions, ≥ 1; None = none.
        hard: largest lag that is used as it is, ≥ 0; None = any.
        on_stale: what becomes of what is older than `hard`.
        decay: for `reweight`: the factor of each version beyond `hard`, in (0, 1).
    """

    target: int | None = None
    hard: int | None = None
    on_stale: OnStale = "drop"
    decay: float = 0.9

    def __post_init__(self) -> None:
        mistakes = []
        if self.target is not None and self.target < 1:
            mistakes.append(f"target: {self.target}; must be 1 or more, or null (weights take time to reach actors)")
        if self.hard is not None and self.hard < 0:
            mistakes.append(f"hard: {self.hard}; must be 0 or more, or null for any lag")
        if not 0.0 < self.decay < 1.0:
            mistakes.append(f"decay: {self.decay}; must be between 0 and 1")
        if mistakes:
            raise ConfigError("staleness", mistakes)

    def admit(self, fragment_version: int, learner_version: int) -> bool:
        """May a fragment made under `fragment_version` still become experience?

        Experience of untrained actors (version 0) is judged like any other. A version newer than the learner's own
        (a learner resumed from an older checkpoint) has no lag.
        """
        oldest = self.oldest(learner_version)
        return oldest is None or fragment_version >= oldest

    def oldest(self, learner_version: int) -> int | None:
        """The oldest version whose rows may be sampled; None = any."""
        if self.hard is None or self.on_stale != "drop":
            return None
        return learner_version - self.hard

    def factors(self, lags: Array) -> FloatArray | None:
        """What importance weights are multiplied by, float32 like `lags` [B]; None = nothing changes."""
        if self.hard is None or self.on_stale != "reweight":
            return None
        beyond = lags - self.hard
        if beyond.max(initial=0) <= 0:
            return None
        factors: FloatArray = np.power(self.decay, np.maximum(beyond, 0)).astype(np.float32)
        return factors


class Ageing:
    """Holds the rows of a ring, and the batches drawn from it, to the rule.

    Args:
        ring: whose rows grow old.
        limiter: told when masking has left nothing to sample: the ring fills anew, instead of both sides waiting.
        rule: may be replaced while the learner runs.

    Attributes:
        expired: rows masked in the ring since they had grown too old (they may have been learned from before).
    """

    def __init__(self, ring: ReplayRing, limiter: Unlimited, rule: StalenessRule) -> None:
        self._ring, self._limiter, self._rule = ring, limiter, rule
        self._judged: tuple[int, int | None] | None = None
        self._version = 0
        self.expired = 0
        self._lags = _Lags(LAGS_AVERAGED)

    @property
    def rule(self) -> StalenessRule:
        """The contract; another one is followed at once."""
        return self._rule

    @rule.setter
    def rule(self, rule: StalenessRule) -> None:
        self._rule = rule
        self.advance(self._version)

    def advance(self, version: int) -> int:
        """Mask what is too old for a learner that is at `version` from now on; returns how many rows.

        One pass over the versions of the ring (about 2 ms for 1e6 rows), once for each new version.
        """
        self._version, oldest = version, self._rule.oldest(version)
        if oldest is None or self._judged == (version, oldest):
            return 0
        self._judged = (version, oldest)
        old = self._ring.all_links[:, VERSION] < oldest
        slots = np.flatnonzero(old & self._ring.valid_slots)
        if not len(slots):
            return 0
        masked = self._ring.mask(slots)
        self.expired += masked
        if self._ring.size == 0:
            self._limiter.rebase(0)
        return masked

    def weigh(self, batch: Batch, version: int) -> Batch:
        """The batch as it may be used by a learner at `version`; its lags are noted.

        On a GPU nothing is waited for: versions are read from the host's copy.
        """
        versions = batch.made_by
        if versions is None:
            return batch
        lags = np.maximum(version - versions, 0)
        hard = self._rule.hard
        own = lags[versions != DEMONSTRATED]
        self._lags.note(own, 0 if hard is None else int(np.count_nonzero(own > hard)))
        factors = self._rule.factors(lags)
        if factors is None:
            return batch
        weight = batch.importance_weight
        return replace(batch, importance_weight=weight * torch.from_numpy(factors).to(weight.device))

    def metrics(self) -> Metrics:
        """Lag at use over the last updates, the share of stale rows among them, and rows masked so far."""
        return {**self._lags.metrics(), "expired_rows": float(self.expired)}

    def state_dict(self) -> dict[str, int]:
        """The count of masked rows."""
        return {"expired": self.expired}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting; everything is judged anew."""
        self.expired, self._judged = int(state.get("expired", 0)), None


class _Lags:
    """Lags at use over the last `most` batches: a few numbers each, in a ring of their own."""

    def __init__(self, most: int) -> None:
        self._numbers = np.zeros((most, 3))
        self._count = 0

    def note(self, lags: Array, stale: int) -> None:
        self._numbers[self._count % len(self._numbers)] = lags.mean(), lags.max(), stale / len(lags)
        self._count += 1

    def metrics(self) -> Metrics:
        if not self._count:
            return {}
        kept = self._numbers[: min(self._count, len(self._numbers))]
        mean, _, stale = kept.mean(axis=0)
        return {"lag_at_use/mean": float(mean), "lag_at_use/max": float(kept[:, 1].max()), "stale_share": float(stale)}


__all__ = ["Ageing", "OnStale", "StalenessRule"]
