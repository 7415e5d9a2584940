"""Resuming: the newest checkpoint that can be used, what of it fits the configuration, and the ring as it was.

The configuration wins wherever it may: limits, learning rates, budget, evaluation, sampler, n-step, the capacity of the
ring. What it cannot change is what the checkpoint is *of*: the environment's spaces, and whatever the algorithm refuses
to load (its networks' shapes); then every changed key is named, with its old and new value.

The ring comes back from its snapshot if it has one (`clawq.programs.ring_snapshots`), else from the fragments
themselves (`clawq.replay.rebuild`), wherever the log has them; what is in neither is told in env steps, and
recorded in the schedule.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from clawq.core import Entry
from clawq.errors import ArchiveDamaged, CheckpointInvalid, LogGone, UserError
from clawq.programs.archiving import open_log
from clawq.programs.checkpoint import Checkpoints
from clawq.programs.learning import Fetch
from clawq.programs.parts import Parts
from clawq.programs.ring_snapshots import copy_back, whole_ring
from clawq.programs.run import Run
from clawq.replay.layout import Layout
from clawq.replay.rebuild import Missing, Rebuild, describe
from clawq.replay.ring import ReplayRing
from clawq.replay.snapshot import Gap
from clawq.replay.traces import Traces
from clawq.replay.validation import Examiner

#: What a checkpoint must say of itself to be understood.
STATE_FORMAT = 2
#: Sections of the configuration that learning depends on.
LEARNING = ("seed", "algorithm", "replay", "rate_limit", "staleness", "sync")


def find_state(checkpoints: Checkpoints, run: Run, say: Callable[[str], None]) -> Mapping[str, Any] | None:
    """The state of the newest checkpoint that can be read; says which ones could not. None if there is none yet.

    Raises CheckpointInvalid if it is another run's, or of another environment spec.
    """
    loaded = checkpoints.load_latest(whole_ring(run))
    if loaded is None:
        say(f"{run.id} was stopped before its first checkpoint; it begins anew")
        return None
    for path, why in loaded.skipped:
        say(f"checkpoint {path.name} cannot be used ({why}); taking the one before it")
    state: Mapping[str, Any] = loaded.state
    if state.get("tag") != run.tag:
        raise CheckpointInvalid(f"{loaded.path} is of run {state.get('run')}, not of {run.id}")
    if state.get("env") != run.spec.fingerprint:
        raise CheckpointInvalid(f"{loaded.path} was made with another environment spec than {run.spec.name} has now")
    if state.get("format") != STATE_FORMAT:
        raise CheckpointInvalid(
            f"{loaded.path} holds a state of format {state.get('format')}; this clawq reads format {STATE_FORMAT}. "
            "Resume it with the version of clawq that made it, or start a new run"
        )
    return {**state, "snapshot": loaded.ring}


def ring_state(ring: ReplayRing) -> dict[str, Any]:
    """What a checkpoint holds of a ring: everything but its rows."""
    layout = ring.layout()
    return {"layout": layout.state_dict(), "traces": Traces.of(ring, layout).state_dict()}


def bring_back_ring(
    parts: Parts,
    state: Mapping[str, Any],
    entries: Iterable[Entry],
    fetch: Fetch,
    examiner: Examiner,
    copy: Callable[[ReplayRing], list[Gap]] | None = None,
) -> list[Missing]:
    """Fill the (empty) ring with what it held at the checkpoint; what could not be found is returned.

    Args:
        parts: of the new learner.
        state: `ring_state`, from the checkpoint.
        entries: what the streams hold at or before the checkpoint's cursors, in any order.
        fetch: where to look for what they do not hold.
        examiner: decodes and checks.
        copy: copies rows from the ring's snapshot, if it has one; the rest is looked for as ever.
    """
    layout = Layout.of_state(state["layout"])
    rebuild = Rebuild(parts.ring, layout, Traces.of_state(state["traces"]))
    if copy is not None:
        rebuild.copied((gap.first, gap.end) for gap in copy(parts.ring))
    rebuild.put_back(entries, examiner)
    found = (fetch(*key) for key in rebuild.open)
    rebuild.put_back((entry for entry in found if entry is not None), examiner)
    return rebuild.finish()


def copier(
    run: Run, parts: Parts, state: Mapping[str, Any], say: Callable[[str], None]
) -> Callable[[ReplayRing], list[Gap]] | None:
    """Copies rows from the snapshot that belongs to a checkpoint; None if it has none."""
    name = state["snapshot"]
    return partial(copy_back, run, name, parts.snapshots, say) if name else None


def archived(run: Run) -> Fetch:
    """Gives entries from the run's archive, None for what it does not hold."""
    log = open_log(run, None)

    def fetch(slot: str, epoch: int, seq: int) -> Entry | None:
        try:
            return log.get(slot, epoch, seq)
        except (LogGone, ArchiveDamaged):
            return None

    return fetch


def rebase_limiter(parts: Parts, state: Mapping[str, Any], missing: list[Missing]) -> None:
    """Tell the limiter what the ring really holds, if that is less than it was, or is asked for more than before."""
    least = parts.config.rate_limit.min_size_to_sample
    before = state["config"]["rate_limit"]["min_size_to_sample"]
    if missing or parts.ring.size < int(state["ring"]["layout"]["size"]) or least != before:
        parts.limiter.rebase(parts.ring.size)


def describe_ring(ring: ReplayRing, missing: list[Missing]) -> str:
    """What came back, for people."""
    return f"{ring.size} env steps are in the ring again{describe(missing)}"


def refusal(error: CheckpointInvalid, before: Mapping[str, Any], now: Mapping[str, Any]) -> UserError:
    """The algorithm cannot take over its state: name what was changed."""
    changed = changes({"algorithm": before["algorithm"]}, {"algorithm": now["algorithm"]})
    named = "".join(f"\n  - {line}" for line in changed) or "\n  - nothing in `algorithm`; its version may differ"
    return UserError(
        f"the checkpoint does not fit the configuration: {error}. Changed since:{named}\n"
        "Set it back, or start a new run with it."
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """One line for each value that differs: `key.path: was old, is new`."""
    lines: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changes(old, new, f"{path}{key}.")
        elif old != new:
            lines.append(f"{path}{key}: was {old}, is {new}")
    return lines


def learning_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The like, of what learning depends on."""
    old, new = ({key: config.get(key) for key in LEARNING} for config in (before, now))
    return changes(old, new)
