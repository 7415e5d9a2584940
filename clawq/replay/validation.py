"""Is this fragment fit for the ring? Pure checks of a decoded fragment against the run and its spec.

Order: identity (the header says what the stream entry says), run, env fingerprint, schema, then the values. Only rows
marked valid are held to finite values and to the action range: what an actor has marked invalid may hold anything.
A faulty fragment is refused whole; the consumer counts it under the fault's reason and keeps it as a dead letter.

Does not judge age (staleness) or repetition (marks).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from clawq.core import Entry
from clawq.errors import CodecError, SpecMismatch
from clawq.specs import ArraySpec, EnvSpec, check_array
from clawq.types import Array, BoolArray, Fragment, FragmentMeta, Obs

#: How far outside [-1, 1] a stored action may be: float32 rounding of a clip that an actor made in its own way.
ACTION_EPS = 1e-4


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a fragment was refused.

    Attributes:
        reason: short name under which it is counted: wire_version, corrupt, identity, run, env, schema, non_finite,
            action_range; stale.
        detail: for people: what was expected and what was found.
        meta: the header, where it can be believed in spite of the fault.
    """

    reason: str
    detail: str
    meta: FragmentMeta | None = None


def check_schema(spec: EnvSpec, extras: Mapping[str, ArraySpec], fragment: Fragment) -> None:
    """Raise SpecMismatch unless every array of the fragment has the shape and dtype that spec and header demand.

    Args:
        spec: what the env shows and takes.
        extras: per-step policy outputs that must be there (others are ignored): name -> spec without T, N.
        fragment: T = `meta.steps` ≥ 1, N = `meta.envs` ≥ 1.
    """
    meta = fragment.meta
    if meta.steps < 1 or meta.envs < 1:
        raise SpecMismatch("meta", "at least one step of one env", f"steps {meta.steps}, envs {meta.envs}")
    lead = (meta.steps, meta.envs)
    _expect_obs("obs", spec, fragment.obs, (meta.steps + 1, meta.envs))
    _expect("action", fragment.action, (*lead, spec.action.size), "float32")
    _expect("reward", fragment.reward, lead, "float32")
    for name in ("terminated", "truncated", "valid"):
        _expect(name, getattr(fragment, name), lead, "bool")
    _expect_obs("final_obs", spec, fragment.final_obs, (int(np.count_nonzero(fragment.boundary)),))
    for name, one in extras.items():
        if name not in fragment.extras:
            raise SpecMismatch(f"extras.{name}", str(one), f"only {sorted(fragment.extras)}")
        _expect(f"extras.{name}", fragment.extras[name], lead + one.shape, one.dtype)


def _expect_obs(leaf: str, spec: EnvSpec, obs: Obs, lead: tuple[int, ...]) -> None:
    if list(obs) != list(spec.obs):
        raise SpecMismatch(leaf, f"keys {list(spec.obs)}", f"keys {list(obs)}")
    for key, one in spec.obs.items():
        _expect(f"{leaf}.{key}", obs[key], lead + one.shape, one.dtype)


def _expect(leaf: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    # Twice for every fragment: compared as they are, and put into words only if they differ.
    if array.shape != shape or array.dtype != np.dtype(dtype):
        check_array(leaf, array, ArraySpec(shape, dtype))


@dataclass(frozen=True, slots=True)
class FragmentCheck:
    """What the fragments of one run must be.

    Attributes:
        spec: the env spec of the run.
        run_tag: 32 hex digits.
        extras: per-step policy outputs that the algorithm needs.
    """

    spec: EnvSpec
    run_tag: str
    extras: Mapping[str, ArraySpec] = field(default_factory=dict)

    def fault(self, entry: Entry, fragment: Fragment) -> Fault | None:
        """The first thing that is wrong with the fragment found in `entry`, or None."""
        return (
            self._origin_fault(entry, fragment)
            or self._schema_fault(fragment)
            or non_finite_fault(fragment, self.extras)
            or action_fault(fragment)
        )

    def _origin_fault(self, entry: Entry, fragment: Fragment) -> Fault | None:
        meta = fragment.meta
        says, is_at = (meta.slot, meta.epoch, meta.seq), (entry.slot, entry.epoch, entry.seq)
        if says != is_at:
            return Fault("identity", f"header says slot, epoch, seq {says}, the stream entry is {is_at}")
        if meta.run != self.run_tag:
            return Fault("run", f"made for run {meta.run}, this is run {self.run_tag}")
        if meta.env != self.spec.fingerprint:
            return Fault(
                "env",
                f"worker {meta.worker} runs another environment: fingerprint {meta.env}, the run's {self.spec.name} "
                f"is {self.spec.fingerprint}; are simulator and plugin versions the same on both hosts?",
            )
        return None

    def _schema_fault(self, fragment: Fragment) -> Fault | None:
        try:
            check_schema(self.spec, self.extras, fragment)
        except SpecMismatch as error:
            return Fault("schema", str(error))
        meta = fragment.meta
        for notice in meta.voided:
            # About its own fragment: a sender that began a new epoch cannot name rows of the old one any better.
            if not (0 <= notice.env < meta.envs and 1 <= notice.seq <= meta.seq and notice.t >= 0):
                return Fault("schema", f"voided: {notice} is not about rows of this slot up to seq {meta.seq}")
        return None


@dataclass(frozen=True, slots=True)
class Examiner:
    """From the bytes of an entry to a fragment that is fit for the ring.

    Attributes:
        decode: payload -> fragment; raises CodecError.
        check: what the run's fragments must be.
    """

    decode: Callable[[bytes], Fragment]
    check: FragmentCheck

    def examine(self, entry: Entry) -> Fragment | Fault:
        """The fragment, or what is wrong with it."""
        try:
            fragment = self.decode(entry.payload)
        except CodecError as error:
            return Fault(error.reason, str(error))
        return self.check.fault(entry, fragment) or fragment


def non_finite_fault(fragment: Fragment, extras: Iterable[str] = ()) -> Fault | None:
    """Is there nan or inf in what a valid row teaches: its obs, action, reward, extras, or the obs that it led to?"""
    bad = _non_finite_rows(fragment.reward, 2) | _non_finite_rows(fragment.action, 2)
    for name in extras:
        bad = bad | _non_finite_rows(fragment.extras[name], 2)
    boundary = fragment.boundary
    for key, array in fragment.obs.items():
        rows = _non_finite_rows(array, 2)
        if np.any(rows):
            bad = bad | rows[:-1] | (rows[1:] & ~boundary)
        final = _non_finite_rows(fragment.final_obs[key], 1)
        if np.any(final):
            bad = np.broadcast_to(bad, boundary.shape).copy()
            bad[boundary] |= final
    wrong = np.argwhere(np.broadcast_to(bad, boundary.shape) & fragment.valid)
    if len(wrong) == 0:
        return None
    t, env = wrong[0].tolist()
    text = f"{len(wrong)} valid rows hold nan or inf, the first at t {t}, env {env}"
    return Fault("non_finite", text, fragment.meta)


def action_fault(fragment: Fragment) -> Fault | None:
    """An action of a valid row outside policy space [-1, 1]."""
    if float(np.abs(fragment.action).max(initial=0.0)) <= 1.0 + ACTION_EPS:
        return None
    outside = (np.abs(fragment.action) > 1.0 + ACTION_EPS).any(axis=-1) & fragment.valid
    if not outside.any():
        return None
    t, env = np.argwhere(outside)[0].tolist()
    worst = float(np.abs(fragment.action[t, env]).max())
    text = f"actions are stored in [-1, 1]; found {worst:g} at t {t}, env {env}"
    return Fault("action_range", text, fragment.meta)


def _non_finite_rows(array: Array, lead: int) -> BoolArray:
    """Which rows hold nan or inf? Bool over the first `lead` axes, or a single False if none does (the usual case)."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return np.zeros((1,) * lead, np.bool_)
    bad: BoolArray = np.any(~np.isfinite(array).reshape(*array.shape[:lead], -1), axis=-1)
    return bad
