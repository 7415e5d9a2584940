"""Made-up experience that is known step by step: fragments of recognisable obs, and what is true of them.

`TrueSlot` plays an actor: it makes fragments with random episode ends, invalid rows, both ways of autoreset, and obs
whose first number is unique over all slots that share a counter. `Truth` remembers what a learner was given as linked
lists of steps, and says slowly and obviously what an n-step transition is. For tests; numpy only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from clawq.specs import ActionSpec, ArraySpec, EnvSpec
from clawq.types import Array, Fragment, FragmentMeta, Obs, Voided

#: Obs keys of different ranks and dtypes, one action of two numbers.
SPEC = EnvSpec(
    name="testing:experience",
    obs={"state": ArraySpec((3,)), "grid": ArraySpec((2, 2)), "picture": ArraySpec((2, 2), "uint8")},
    action=ActionSpec((-1.0, -1.0), (1.0, 1.0)),
    policy_keys=("state",),
    critic_keys=("state",),
)
RUN = "0123456789abcdef0123456789abcdef"


def obs_of(ids: Array) -> Obs:
    """The obs that carry these ids: [...] -> key -> [..., shape]; `ids_of` is the inverse."""
    ids = np.asarray(ids, np.int64)
    state = np.stack((ids, ids + 0.25, -ids), axis=-1).astype(np.float32)
    picture = np.stack((ids & 255, ids >> 8 & 255, ids >> 16 & 255, ids & 255), axis=-1).astype(np.uint8)
    grid = np.stack((state, state + 1, state + 2, -state), axis=-1)[..., 0, :].reshape(*ids.shape, 2, 2)
    return {"state": state, "grid": grid, "picture": picture.reshape(*ids.shape, 2, 2)}


def ids_of(obs: Mapping[str, Array]) -> Array:
    """The ids in obs [B, ...]; AssertionError if the keys or numbers of a row do not belong together."""
    ids = np.asarray(obs["state"])[..., 0].astype(np.int64)
    for key, array in obs_of(ids).items():
        np.testing.assert_array_equal(np.asarray(obs[key]), array)
    return ids


@dataclass(slots=True, eq=False)
class TrueStep:
    """One env step: ids of the obs before and after, what happened, and the step after it where one is known."""

    obs: int
    action: Array
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    next_obs: int
    weights_version: int
    following: "TrueStep | None" = None


@dataclass(frozen=True, slots=True)
class Chances:
    """How often things happen, per env step: an episode ends (half of them by time), a row is not valid."""

    end: float = 0.2
    invalid: float = 0.1


@dataclass(slots=True)
class TrueSlot:
    """An actor of N envs.

    Attributes:
        name: of the slot.
        envs: N.
        rng: all randomness.
        ids: gives ids; share it between slots.
        next_step: autoreset takes a step of its own, whose row is not valid (Gymnasium's NEXT_STEP).
        chances: see `Chances`.
        epoch: incarnation.
    """

    name: str
    envs: int
    rng: np.random.Generator
    ids: Iterator[int]
    next_step: bool = False
    chances: Chances = field(default_factory=Chances)
    epoch: int = 1
    seq: int = 0
    produced: int = 0
    now: list[int] = field(default_factory=list)
    resetting: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart(range(self.envs))

    def restart(self, envs: "range | list[int]") -> None:
        """Abandon the episodes of these envs and begin new ones."""
        self.now = self.now or [0] * self.envs
        self.resetting = self.resetting or [False] * self.envs
        for env in envs:
            self.now[env], self.resetting[env] = next(self.ids), False

    def begin_epoch(self) -> None:
        """Play a new actor in the same slot."""
        self.epoch, self.seq, self.produced = self.epoch + 1, 0, 0
        self.restart(range(self.envs))

    def fragment(
        self, steps: int, weights_version: int = 0, voided: tuple[Voided, ...] = ()
    ) -> tuple[Fragment, list[list[TrueStep]]]:
        """Act for T steps: the fragment, and its true steps [T][N]."""
        before = []
        told: list[list[TrueStep]] = []
        final: list[int] = []
        for _ in range(steps):
            before.append(list(self.now))
            row = [self._step(env, weights_version, final) for env in range(self.envs)]
            for last, step in zip(told[-1] if told else [], row, strict=False):
                join(last, step)
            told.append(row)
        before.append(list(self.now))
        self.seq, self.produced = self.seq + 1, self.produced + steps * self.envs

        def column(name: str, dtype: str) -> Array:
            return np.array([[getattr(step, name) for step in row] for row in told], dtype)

        meta = FragmentMeta(
            RUN, "host/worker", self.name, self.epoch, self.seq, SPEC.fingerprint, 7, weights_version,
            steps, self.envs, self.produced, voided=voided,
        )  # fmt: skip
        made = Fragment(
            meta,
            obs_of(np.array(before)),
            column("action", "float32"),
            column("reward", "float32"),
            column("terminated", "bool"),
            column("truncated", "bool"),
            column("valid", "bool"),
            obs_of(np.array(final, np.int64)),
        )
        return made, told

    def _step(self, env: int, version: int, final: list[int]) -> TrueStep:
        ended = not self.resetting[env] and bool(self.rng.random() < self.chances.end)
        by_time = ended and bool(self.rng.random() < 0.5)
        valid = not self.resetting[env] and bool(self.rng.random() >= self.chances.invalid)
        action = self.rng.uniform(-1, 1, 2).astype(np.float32)
        reward = float(np.float32(self.rng.normal()))
        after = next(self.ids)
        step = TrueStep(self.now[env], action, reward, ended and not by_time, by_time, valid, after, version)
        self.resetting[env] = ended and self.next_step
        if ended:
            final.append(after)
        # SAME_STEP: the next row begins the next episode. NEXT_STEP: it shows the last obs once more.
        self.now[env] = next(self.ids) if ended and not self.next_step else after
        return step


def join(last: TrueStep, step: TrueStep) -> None:
    """Note that `step` came after `last` in the same env, if it is of the same episode."""
    if not (last.terminated or last.truncated) and last.next_obs == step.obs:
        last.following = step


class Truth:
    """Everything that a learner was given, by the id of the obs."""

    def __init__(self) -> None:
        self.steps: dict[int, TrueStep] = {}
        self._told: dict[tuple[str, int, int], list[list[TrueStep]]] = {}

    def insert(self, fragment: Fragment, told: list[list[TrueStep]]) -> None:
        """Remember a fragment: void what it declares void, and join it to its neighbour if that is here."""
        meta = fragment.meta
        for notice in meta.voided:
            self.void(meta.slot, meta.epoch, notice)
        for last, step in zip(self._told.get((meta.slot, meta.epoch, meta.seq - 1), [[]])[-1], told[0], strict=False):
            join(last, step)
        self._told[meta.slot, meta.epoch, meta.seq] = told
        # The row of an autoreset step shows an obs for the second time; it is never valid.
        self.steps.update({step.obs: step for row in told for step in row if step.valid})

    def void(self, slot: str, epoch: int, notice: Voided) -> None:
        """Make all rows of that env from (seq, t) on, as far as they were inserted, invalid."""
        for (of_slot, of_epoch, seq), rows in self._told.items():
            if (of_slot, of_epoch) == (slot, epoch) and seq >= notice.seq:
                for t, row in enumerate(rows):
                    if (seq > notice.seq or t >= notice.t) and notice.env < len(row):
                        row[notice.env].valid = False

    def transition(self, obs: int, n: int, gamma: float) -> tuple[float, float, int]:
        """Reward, discount and bootstrap obs of the n-step transition that begins at that obs (Sutton & Barto §7.1)."""
        step, reward, taken = self.steps[obs], 0.0, 0
        assert step.valid
        while True:
            reward += gamma**taken * step.reward
            taken += 1
            after = step.following
            if taken == n or after is None or not after.valid:
                return reward, gamma**taken * (not step.terminated), step.next_obs
            step = after
