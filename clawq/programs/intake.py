"""The intake: fragments from the consumer into the replay ring, as the rate limiter allows.

Runs on the learner's own thread, between updates, never during one. It is the only place where experience becomes part
of the learner's state: the ring, the normaliser, the limiter and the committed cursors change together here.
"""

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from clawq.core import Algorithm
from clawq.programs.recorder import Recorder
from clawq.replay.consumer import Consumer
from clawq.replay.ledger import STALE
from clawq.replay.quarantine import QUARANTINED
from clawq.replay.rate_limiter import Unlimited
from clawq.replay.ring import ReplayRing
from clawq.replay.rounds import Supply
from clawq.replay.staging import Staged
from clawq.types import Array, Fragment, FragmentMeta, Metrics

#: Training episodes whose mean is reported.
EPISODES_AVERAGED = 100
#: Fragments over which policy lag is reported.
LAGS_AVERAGED = 50


class Intake:
    """Commits staged fragments.

    Args:
        consumer: gives them.
        ring: where they go.
        limiter: says when.
        algorithm: shown each.
        recorder: of the schedule.
        supply: in which order fragments are committed; None = as the consumer gives them.
        refuses: says which are in quarantine.

    Attributes:
        env_steps: valid env steps committed over the whole run.
        fragments: fragments committed by this process.
        payload_bytes: what they took in the streams.
        blocked: the limiter keeps staged fragments from being committed.
        waiting: the last `commit` left something that could have been committed but for `most` or the limiter.
    """

    def __init__(
        self,
        consumer: Consumer,
        ring: ReplayRing,
        limiter: Unlimited,
        algorithm: Algorithm,
        recorder: Recorder,
        supply: Supply | None = None,
        refuses: Callable[[FragmentMeta], bool] = lambda meta: False,
    ) -> None:
        self._refuses = refuses
        self._recorder = recorder
        self._supply = supply or consumer
        self._consumer, self._ring, self._limiter, self._algorithm = consumer, ring, limiter, algorithm
        #: Taken from the consumer, with their valid env steps.
        self._pending: deque[tuple[Staged, int]] = deque()
        self._episodes: deque[tuple[float, int, float]] = deque(maxlen=EPISODES_AVERAGED)
        self._lags: deque[int] = deque(maxlen=LAGS_AVERAGED)
        self.env_steps = 0
        self.fragments = self.payload_bytes = 0
        self.blocked = self.waiting = False

    @property
    def held_bytes(self) -> int:
        """Payload bytes that were read and are not committed."""
        return sum(len(staged.entry.payload) for staged, _ in self._pending) + self._consumer.staged[1]

    @property
    def pending(self) -> int:
        """Fragments taken from the consumer and not committed."""
        return len(self._pending)

    def commit(self, most: int, version: int) -> int:
        """Commit up to `most` fragments; returns how many. Never waits.

        What has grown too old meanwhile, or is in quarantine, is refused.

        Args:
            most: fragments.
            version: the learner's weights version now, from which policy lag is counted.
        """
        done = 0
        self.blocked = False
        while done < most:
            if not self._pending:
                self._take(most)
            if not self._pending:
                break
            staged, steps = self._pending[0]
            if not self._consumer.staleness.admit(staged.fragment.meta.weights_version, version):
                # It grew too old while it waited here.
                self._pending.popleft()
                self._refuse(staged, STALE)
                continue
            if self._refuses(staged.fragment.meta):
                self._pending.popleft()
                self._refuse(staged, QUARANTINED)
                continue
            if not self._limiter.can_insert(steps):
                self.blocked = True
                break
            self._pending.popleft()
            self._lags.append(version - staged.fragment.meta.weights_version)
            self._commit_one(staged, steps, version)
            done += 1
        self.waiting = bool(self._pending) or self._consumer.staged[0] > 0
        return done

    def _take(self, most: int, timeout_s: float = 0.0) -> None:
        # Counted once: a fragment that the limiter holds back is asked about before every update.
        for staged in self._supply.take(most, timeout_s):
            self._pending.append((staged, valid_steps(staged.fragment)))

    def _commit_one(self, staged: Staged, steps: int, version: int) -> None:
        entry = staged.entry
        self.insert(staged.fragment, steps)
        self._consumer.commit(staged)
        self._recorder.committed(entry.slot, entry.epoch, entry.seq, version, staged.inherited)
        self.fragments += 1
        self.payload_bytes += len(entry.payload)
        self._episodes.extend((e.episode_return, e.length, e.success) for e in staged.fragment.meta.episodes)

    def insert(self, fragment: Fragment, steps: int) -> None:
        """All that a fragment with `steps` valid env steps changes in what is learned; a replay does just this."""
        self._observe(fragment)
        self._ring.insert(fragment)
        self._limiter.inserted(steps)
        self.env_steps += steps

    def _refuse(self, staged: Staged, reason: str) -> None:
        meta = staged.fragment.meta
        for notice in meta.voided:
            self._ring.void(meta.slot, meta.epoch, notice.env, notice.seq, notice.t)
            self._recorder.voided(meta.slot, meta.epoch, notice)
        self._consumer.refuse(staged, reason)

    def _observe(self, fragment: Fragment) -> None:
        """Show the algorithm's normaliser each valid row [T, N] once."""
        rows = fragment.valid.size
        obs = {key: _rows(column[:-1], rows) for key, column in fragment.obs.items()}
        self._algorithm.observe(obs, _rows(fragment.valid, rows))

    def wait(self, timeout_s: float) -> None:
        """Wait for a fragment to be staged, at most that long (a plain pause while the limiter holds one back)."""
        if self._pending:
            time.sleep(timeout_s)
        else:
            self._take(1, timeout_s)

    def metrics(self) -> Metrics:
        """Policy lag of the last fragments; means over the last training episodes, exploration included."""
        lags = self._lags
        lag = (
            {"policy_lag/min": min(lags), "policy_lag/mean": sum(lags) / len(lags), "policy_lag/max": max(lags)}
            if lags
            else {}
        )
        return {**lag, **self._episode_metrics()}

    def _episode_metrics(self) -> Metrics:
        if not self._episodes:
            return {}
        returns, lengths, successes = (np.array(column, np.float64) for column in zip(*self._episodes, strict=True))
        metrics = {"episode/return": float(returns.mean()), "episode/length": float(lengths.mean())}
        known = successes[~np.isnan(successes)]
        success = float(known.mean()) if known.size else math.nan
        return metrics if math.isnan(success) else metrics | {"episode/success": success}


def valid_steps(fragment: Fragment) -> int:
    """Valid env steps of a fragment."""
    return int(np.count_nonzero(fragment.valid))


def _rows(column: Array, rows: int) -> torch.Tensor:
    """[T, N, ...] -> a tensor [T·N, ...] of its own (decoded columns are read-only, which tensors cannot be)."""
    return torch.from_numpy(column.reshape(rows, *column.shape[2:]).copy())
