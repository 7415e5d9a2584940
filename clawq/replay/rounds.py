"""Rounds: which fragments the learner takes next when all actors collect the same quota under each weights version.

    open(version) -> add(staged) ... -> ready(now)? -> close() -> the fragments to commit, in a fixed order

A round is complete when every seat has brought its quota of steps under the round's version. If it has a deadline, then
once the learner has waited for so long a quorum of the round's env steps is enough. What arrives for an older round
(from a slow actor, or from before a learner was resumed) is late: it goes in with the next round that closes, first in
the order, unless the staleness contract refuses it; it is counted either way. An actor that restarts begins its quota
anew under a new epoch: a seat's share is complete with the first that makes up the quota, from however many lives, and
what comes beyond it is used like everything else.

    order: weights version, seat, epoch, seq. Whatever order fragments arrive in, they are committed in this one.

Bounded: a round that holds more than twice its env steps (late ones included) closes without waiting any further.
Pure: time comes in with the calls, and is that of the learner's waiting, since a learner that trains misses nothing.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clawq.replay.ledger import life_of
from clawq.replay.staging import Staged
from clawq.types import Metrics

#: A round closes at the latest when it holds this many times its env steps.
MOST_HELD = 2
#: Fragments taken from the consumer at a time.
_TAKEN = 64
#: Seats that are named when they are waited for; of more the number is told.
_NAMED = 5
_COUNTERS = ("closed", "short", "late", "replaced")


@dataclass(frozen=True, slots=True)
class Terms:
    """What makes a round complete.

    Attributes:
        seats: who takes part: names of their streams.
        quota_steps: steps T that each seat brings.
        envs: N of each.
        deadline_s: wait after which a quorum is enough; None = all are waited for.
        quorum: share of the round's env steps, in (0, 1].
    """

    seats: Sequence[str]
    quota_steps: int
    envs: int
    deadline_s: float | None = None
    quorum: float = 1.0

    @property
    def round_steps(self) -> int:
        """Env steps of a whole round."""
        return len(self.seats) * self.quota_steps * self.envs


class Rounds:
    """The round that is being collected, and what is held for it.

    Args:
        terms: see Terms.

    Attributes:
        version: weights version of the open round, 0 before the first.
        closed: rounds that were closed.
        short: of these, how many went on without some actor's quota.
        late: fragments used in a later round than the one they were made for.
        replaced: actors that went on in the seat of another, or of an earlier life of theirs.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.version = self.closed = self.short = self.late = self.replaced = 0
        self._held: list[Staged] = []
        self._held_steps = 0
        self._brought: Counter[str] = Counter()
        self._lives = dict.fromkeys(terms.seats, 0)
        self._since_s: float | None = None

    def open(self, version: int) -> None:
        """A round begins: actors collect under `version` from now on. What is held becomes late."""
        self.version, self._since_s = version, None
        self._brought.clear()
        for staged in self._held:
            self._count(staged)

    def add(self, staged: Staged) -> None:
        """A fragment arrived."""
        self._held.append(staged)
        meta = staged.fragment.meta
        self._held_steps += meta.steps * meta.envs
        self._count(staged)
        if meta.slot in self._lives:
            known, life = self._lives[meta.slot], life_of(meta)
            self.replaced += known not in (0, life)
            self._lives[meta.slot] = life

    def _count(self, staged: Staged) -> None:
        meta = staged.fragment.meta
        if meta.weights_version == self.version:
            self._brought[meta.slot] += meta.steps

    def waited_s(self, now_s: float) -> float:
        """Seconds for which the learner has waited for this round; call it whenever it waits."""
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s

    def ready(self, now_s: float) -> bool:
        """May the round close now?"""
        if not self.version:
            return False
        if not self.missing() or self._held_steps > MOST_HELD * self.terms.round_steps:
            return True
        deadline_s = self.terms.deadline_s
        return deadline_s is not None and self.waited_s(now_s) >= deadline_s and self._share() >= self.terms.quorum

    def missing(self) -> dict[str, int]:
        """Seat -> steps that it has not brought yet, of those that have not brought all."""
        quota = self.terms.quota_steps
        return {seat: quota - self._brought[seat] for seat in self.terms.seats if self._brought[seat] < quota}

    def _share(self) -> float:
        whole = len(self.terms.seats) * self.terms.quota_steps
        return 1.0 - sum(self.missing().values()) / whole

    def close(self) -> list[Staged]:
        """The fragments to commit, in order."""
        self.closed += 1
        self.short += bool(self.missing())
        held, self._held, self._held_steps = sorted(self._held, key=_place), [], 0
        self.late += sum(staged.fragment.meta.weights_version != self.version for staged in held)
        self._brought.clear()
        return held

    def describe_missing(self) -> str:
        """Who has not brought its quota, for people: `seat-001 (32 of 128 steps)`."""
        missing, quota = self.missing(), self.terms.quota_steps
        named = [f"{seat} ({quota - left} of {quota} steps)" for seat, left in list(missing.items())[:_NAMED]]
        if len(missing) > _NAMED:
            named.append(f"{len(missing) - _NAMED} more")
        return ", ".join(named)

    def state_dict(self) -> dict[str, int]:
        """The counters; what is held is read from the streams again."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        for name in _COUNTERS:
            setattr(self, name, int(state.get(name, 0)))

    def check_valid(self) -> tuple[bool, str]:
        """Do the sums agree? (True, "") or (False, what is wrong)."""
        metas = [staged.fragment.meta for staged in self._held]
        if self._held_steps != sum(meta.steps * meta.envs for meta in metas):
            return False, f"{self._held_steps} env steps held do not add up"
        brought: Counter[str] = Counter()
        for meta in metas:
            if meta.weights_version == self.version:
                brought[meta.slot] += meta.steps
        if brought != self._brought:
            return False, f"brought {self._brought}, but {brought} are held"
        return True, ""


class Supply(Protocol):
    """Where staged fragments come from: a consumer, or rounds of one."""

    def take(self, most: int = 1, timeout_s: float = 0.0) -> list[Staged]:
        """Up to `most` fragments in the order in which they are to be committed; waits for the first."""
        ...


class RoundSupply:
    """Hands on the fragments of closed rounds, and holds those of the open one.

    Args:
        consumer: where they come from.
        rounds: decides which are next.
    """

    def __init__(self, consumer: Supply, rounds: Rounds) -> None:
        self._consumer, self.rounds = consumer, rounds
        self._released: deque[Staged] = deque()

    def take(self, most: int = 1, timeout_s: float = 0.0) -> list[Staged]:
        """See Supply; waits for fragments of the open round only if there is none to hand on."""
        for staged in self._consumer.take(_TAKEN, 0.0 if self._released else timeout_s):
            self.rounds.add(staged)
        return [self._released.popleft() for _ in range(min(most, len(self._released)))]

    def release(self) -> None:
        """Close the open round and hand it on."""
        self._released.extend(self.rounds.close())

    def metrics(self) -> Metrics:
        """Counts, by the names of clawq.metrics.CATALOGUE."""
        rounds = self.rounds
        return {
            "rounds": rounds.closed,
            "short_rounds": rounds.short,
            "late_fragments": rounds.late,
            "replaced_actors": rounds.replaced,
        }


def _place(staged: Staged) -> tuple[int, str, int, int]:
    meta = staged.fragment.meta
    return meta.weights_version, meta.slot, staged.entry.epoch, staged.entry.seq


__all__ = ["MOST_HELD", "RoundSupply", "Rounds", "Supply", "Terms"]
