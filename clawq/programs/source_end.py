"""How a run that is followed ends, as one of its readers sees it.

It goes on as long as it is registered (a learner that died is waited for). When it has finished, its streams are
deleted; when it was stopped, they are kept. Either way the reader is done once nothing is left to read.
"""

import time
from typing import Any, Literal

from clawq.transport.control import ControlRecord, RunRegistry
from clawq.transport.keys import RunKeys

#: The run counts as read to its end when nothing came for so long after it had ended, seconds.
DRAINED_S = 2.0

How = Literal["finished", "stopped"]


class SourceEnd:
    """Looks for the end.

    Args:
        data: client of the data server.
        broker: client of the broker.
        run_id: of the run.
        tag: of the run.

    Attributes:
        how: how it ended, once nothing is left to read.
        finishing: its actors were told to stop: no more experience is made, and it may wait for its readers.
    """

    def __init__(self, data: Any, broker: Any, run_id: str, tag: str) -> None:
        self._control, self._registry = ControlRecord(data, RunKeys(tag)), RunRegistry(broker)
        self._run_id, self._tag = run_id, tag
        self._quiet_s: float | None = None
        self.how: How | None = None
        self.finishing = False

    def look(self, unread: int) -> None:
        """Look again.

        Args:
            unread: fragments that the reader knows of and has not read.
        """
        ended, now_s = self._ended(), time.monotonic()
        if ended is None or unread:
            self._quiet_s = None
        elif self._quiet_s is None:
            self._quiet_s = now_s
        elif now_s - self._quiet_s >= DRAINED_S:
            self.how = ended

    def _ended(self) -> How | None:
        control, record = self._control.read(), self._registry.get(self._run_id)
        self.finishing = control is not None and control.stop
        if record is not None and record.tag == self._tag:
            return None
        # What a finished run leaves is deleted, but for a record that says stop in epoch 0.
        finished = control is None or (control.stop and control.config_epoch == 0)
        return "finished" if finished else "stopped" if control is not None and control.stop else None
