"""The saver: checkpoints are written beside the learner's loop, one after another, in a thread of their own.

A save that the disk refuses is a warning: older checkpoints are intact, and training goes on. Streams are trimmed only
behind checkpoints that are on disk, so `written` is called with the cursors of each plain one after it was written. (A
scored one may be older than the last plain one: it holds the state that made the evaluated weights. Where that is the
last plain one, up to fragments that were committed since, only its score is written.)

Where the replay ring has snapshots, one is written before each plain checkpoint, and its chunks as soon as they are
complete. A checkpoint is written only after the snapshot that it names; if that is refused, so is the checkpoint.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from clawq.errors import CheckpointNotWritten
from clawq.programs.checkpoint import Checkpoints
from clawq.replay.snapshot_writer import Cut, SnapshotWriter


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A learner's state that may be saved: the weights version it made, how far streams were taken over, and the ring.

    `ring` is None where the ring has no snapshots, or for a state that was saved with its ring before.
    """

    version: int
    state: Mapping[str, Any]
    cursors: Mapping[str, str]
    ring: Cut | None = None


class Saver:
    """Writes snapshots.

    Args:
        checkpoints: where to.
        sync: called before each, in the saver's thread: brings to the disk what a checkpoint points at.
        written: called, in the saver's thread, with the cursors of a plain checkpoint that is on disk.
        rings: writes snapshots of the ring; None = there are none.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        sync: Callable[[], None],
        written: Callable[[Mapping[str, str]], None],
        rings: SnapshotWriter | None = None,
    ) -> None:
        self._checkpoints, self._sync, self._written, self._rings = checkpoints, sync, written, rings
        #: Step of the last plain checkpoint that is on disk; None before the first.
        self._newest_step: int | None = None
        #: Step of a checkpoint -> its ring's snapshot.
        self._ring_of: dict[int, str] = {}
        self._ahead: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="clawq-checkpoint")
        self._running: deque[Future[None]] = deque()

    @property
    def busy(self) -> bool:
        """Whether something is being written, or was and `refusals` was not asked since."""
        return bool(self._running)

    def save(self, snapshot: Snapshot, score: float | None = None) -> None:
        """Write it soon; with a score it competes for the best one."""

        def write() -> None:
            self._sync()
            step = int(snapshot.state["updates"])
            if score is not None and step == self._newest_step:
                # No update was made since, but fragments may have been committed, and trimming has followed them: what
                # is on disk must not go back.
                self._checkpoints.rescore(step, score)
                return
            if self._rings is not None and snapshot.ring is not None:
                self._ring_of[step] = self._rings.write(snapshot.ring)
            self._checkpoints.save(snapshot.state, step, score, self._ring_of.get(step, ""))
            if self._rings is not None:
                kept = self._checkpoints.rings()
                self._ring_of = {one: name for one, name in self._ring_of.items() if name in kept}
                self._rings.keep(kept)
            if score is None:
                self._newest_step = step
                self._written(snapshot.cursors)

        self._running.append(self._pool.submit(write))

    def write_ahead(self) -> None:
        """Write the chunks of the ring that are complete; to be called now and then."""
        if self._rings is None or self._ahead is not None:
            return
        settled = self._rings.due()
        if settled is not None:
            self._ahead = self._pool.submit(self._rings.advance, settled)

    def refusals(self, wait: bool = False) -> Iterator[CheckpointNotWritten]:
        """What the disk refused since the last call; raises anything worse.

        Args:
            wait: wait for what is being written.
        """
        done = []
        if self._ahead is not None and (wait or self._ahead.done()):
            done.append(self._ahead.exception())
            self._ahead = None
        while self._running and (wait or self._running[0].done()):
            done.append(self._running.popleft().exception())
        for error in done:
            if isinstance(error, CheckpointNotWritten):
                yield error
            elif error is not None:
                raise error

    def close(self) -> None:
        """End the thread after what it is writing."""
        self._pool.shutdown(wait=True)
