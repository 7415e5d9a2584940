"""The saver: checkpoints are written beside the learner's loop, one after another, in a thread of their own.

A save that the disk refuses is a warning: older checkpoints are intact, and training goes on. Streams are trimmed only
behind checkpoints that are on disk, so `written` is called with the cursors of each plain one after it was written. (A
scored one may be older than the last plain one: it holds the state that made the evaluated weights.)
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from clawq.errors import CheckpointNotWritten
from clawq.programs.checkpoint import Checkpoints


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A learner's state that may be saved: the weights version it made, and how far streams were taken over."""

    version: int
    state: Mapping[str, Any]
    cursors: Mapping[str, str]


class Saver:
    """Writes snapshots.

    Args:
        checkpoints: where to.
        sync: called before each, in the saver's thread: brings to the disk what a checkpoint points at.
        written: called, in the saver's thread, with the cursors of a plain checkpoint that is on disk.
    """

    def __init__(
        self, checkpoints: Checkpoints, sync: Callable[[], None], written: Callable[[Mapping[str, str]], None]
    ) -> None:
        self._checkpoints, self._sync, self._written = checkpoints, sync, written
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
            self._checkpoints.save(snapshot.state, int(snapshot.state["updates"]), score)
            if score is None:
                self._written(snapshot.cursors)

        self._running.append(self._pool.submit(write))

    def refusals(self, wait: bool = False) -> Iterator[CheckpointNotWritten]:
        """What the disk refused since the last call; raises anything worse.

        Args:
            wait: wait for what is being written.
        """
        while self._running and (wait or self._running[0].done()):
            error = self._running.popleft().exception()
            if isinstance(error, CheckpointNotWritten):
                yield error
            elif error is not None:
                raise error

    def close(self) -> None:
        """End the thread after what it is writing."""
        self._pool.shutdown(wait=True)
