"""Safekeeping: when a learner's state goes to disk, and what is told when the disk refuses or is too slow.

A checkpoint is due by time, by what arrived since the last one (streams are trimmed only behind checkpoints), and
sooner while the streams need the room that it would make. It is written beside the loop (`clawq.programs.saver`).
"""

import time

from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.programs.saver import Saver, Snapshot

#: Share of the stream budget after which a checkpoint is due: streams are trimmed only behind checkpoints, and actors
#: that write faster than that must not fill the server meanwhile.
CHECKPOINT_SHARE = 0.25
#: Between two checkpoints while the streams are full and nothing but that makes room, seconds.
PRESSED_INTERVAL_S = 2.0
#: A disk that is slower than the experience is told this often, seconds; it is one if a snapshot lacks so much of the
#: ring. Of a full ring the oldest few are always overwritten on the way.
SLOW_DISK_INTERVAL_S, SLOW_DISK_SHARE = 60.0, 0.1


class Safekeeping:
    """Decides when, and tells.

    Args:
        parts: of the learner.
        notices: for people.

    Attributes:
        saver: writes.
    """

    def __init__(self, parts: Parts, notices: Notices) -> None:
        self.saver = Saver(parts.checkpoints, parts.recorder.sync, parts.link.checkpointed, parts.snapshots)
        self._parts, self._notices = parts, notices
        self._saved_s, self._saved_bytes = time.monotonic(), 0

    def due(self, now_s: float) -> bool:
        """Whether it is time for a checkpoint."""
        since_s = now_s - self._saved_s
        return since_s >= self._parts.config.learner.checkpoint_interval_s or self._much_to_save(since_s)

    def _much_to_save(self, since_s: float) -> bool:
        link = self._parts.link
        if link.pressed and since_s >= PRESSED_INTERVAL_S:
            return True
        return self._parts.intake.payload_bytes - self._saved_bytes >= CHECKPOINT_SHARE * link.stream_budget_bytes

    def save(self, snapshot: Snapshot) -> None:
        """Write a plain checkpoint soon."""
        self._saved_s, self._saved_bytes = time.monotonic(), self._parts.intake.payload_bytes
        self.saver.save(snapshot)

    def look(self, wait: bool = False) -> None:
        """Write ahead what may be, and tell what the disk refused; raises anything worse.

        Args:
            wait: wait for what is being written.
        """
        self.saver.write_ahead()
        self._tell_slow_disk()
        for error in self.saver.refusals(wait):
            self._notices.tell(str(error))
            self._parts.link.notify("checkpoint_failed", error=str(error))

    def _tell_slow_disk(self) -> None:
        rings = self._parts.snapshots
        if rings is not None and rings.skipped > SLOW_DISK_SHARE * self._parts.ring.size:
            self._notices.tell_now_and_then(
                "snapshot",
                f"the disk is slower than the experience: {rings.skipped} rows of the replay ring were overwritten "
                "before they were in the snapshot; a resume would miss them (learner.snapshot=never does without)",
                SLOW_DISK_INTERVAL_S,
            )
