"""The snapshots of a run's replay ring: whether it has any, where they are, and how they come back.

They lie in `checkpoints/ring`. A checkpoint names the one that belongs to it (checkpoint.py), a resume copies its rows
to where they were. What is damaged or missing there is told, and left to whoever reads the log for the rest.
"""

from collections.abc import Callable
from pathlib import Path

from clawq.errors import SnapshotInvalid
from clawq.programs.checkpoint import Checkpoint
from clawq.programs.run import Run
from clawq.replay.ring import ReplayRing
from clawq.replay.snapshot import Gap, Owner, check_fits, load_manifest, restore_rows
from clawq.replay.snapshot_writer import SnapshotWriter


def open_snapshots(run: Run, ring: ReplayRing, stream_bytes: int) -> SnapshotWriter | None:
    """What writes the ring's snapshots; None if the configuration wants none."""
    wanted = run.config.learner.snapshot
    # A Redis that nobody named may be one that ends with the run: then nothing of the ring is in streams.
    streams_hold_it = run.config.redis.data_url is not None and ring.state.size_bytes <= stream_bytes
    if wanted == "never" or (wanted == "auto" and streams_hold_it):
        return None
    return SnapshotWriter(ring, folder_of(run), owner_of(run))


def folder_of(run: Run) -> Path:
    """Where the snapshots of a run's ring are."""
    return run.checkpoints / "ring"


def owner_of(run: Run) -> Owner:
    """Whose they are."""
    return Owner(run.id, run.tag, run.spec.fingerprint)


def whole_ring(run: Run) -> Callable[[Checkpoint], None]:
    """A check for `Checkpoints.load_latest`: the snapshot that a checkpoint names is there (its files are not read)."""

    def check(found: Checkpoint) -> None:
        if found.ring:
            load_manifest(folder_of(run), found.ring)

    return check


def copy_back(
    run: Run, name: str, snapshots: SnapshotWriter | None, say: Callable[[str], None], ring: ReplayRing
) -> list[Gap]:
    """Copy the rows of a snapshot into a ring that was given its layout; returns what did not come back.

    Args:
        run: whose.
        name: of the snapshot, as the checkpoint says.
        snapshots: goes on from there.
        say: told of what is damaged or missing.
        ring: its positions say what is wanted.

    Raises:
        SnapshotInvalid: it is another run's, or of another shape.
    """
    folder = folder_of(run)
    try:
        manifest = load_manifest(folder, name)
    except SnapshotInvalid as error:
        say(f"the replay ring has no snapshot to come back from: {error}")
        return [Gap(ring.oldest, ring.head, str(error))]
    check_fits(manifest, ring, owner_of(run), folder / name)
    gaps = restore_rows(ring, folder, manifest)
    if snapshots is not None:
        snapshots.adopt(manifest, gaps)
    for gap in gaps:
        say(f"{gap.end - gap.first} rows of the replay ring are not in its snapshot: {gap.why}")
    return gaps


__all__ = ["copy_back", "folder_of", "open_snapshots", "owner_of", "whole_ring"]
