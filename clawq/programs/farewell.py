"""Farewell: a finished run waits for its required readers before its streams are deleted.

A required reader is one that somebody wants to have everything. So when nothing else is left to do, the learner waits
until each of them has checkpointed all that the streams hold, or has left, or was dropped (`clawq reader drop`). It
shows whom it waits for, and tells again and again for how many fragments, and what to do.

It does not wait for ever: when no reader got on for `patience_s` (`learner.wait_for_readers_s`), or when somebody who
has asked for the end asks once more, it gives up, and says what is lost.
"""

import threading
import time
from collections.abc import Callable, Mapping

from clawq.errors import TransportError
from clawq.programs.stopping import Stop
from clawq.transport.outstanding import Outstanding
from clawq.transport.registry import ReaderRecord

#: Between two looks at the readers, seconds.
LOOK_S = 0.5
#: Between two times that it is told for whom the run waits, seconds.
TELL_S = 20.0


class Farewell:
    """Waits.

    Args:
        outstanding: knows what the readers lack.
        patience_s: how long without any reader getting on; None = for ever, 0 = it does not wait.
        run_id: for people.
        archive: fragments are kept on disk too.
    """

    def __init__(self, outstanding: Outstanding, patience_s: float | None, run_id: str, archive: bool = False) -> None:
        self._outstanding, self._patience_s, self._run_id, self._archive = outstanding, patience_s, run_id, archive

    def wait(
        self, stop: threading.Event, show: Callable[[str], None], tell: Callable[[str], None], look: Callable[[], None]
    ) -> dict[str, int]:
        """Wait for all; returns, of each reader that was given up, how many fragments it has not checkpointed.

        Args:
            stop: set by whoever wants the end; see Stop.
            show: told the stage, for people.
            tell: told a line for people.
            look: called now and then, looks after everything else.
        """
        stop = stop if isinstance(stop, Stop) else Stop()
        with stop.heeding():
            return self._wait(stop, show, tell, look)

    def _wait(
        self, stop: Stop, show: Callable[[str], None], tell: Callable[[str], None], look: Callable[[], None]
    ) -> dict[str, int]:
        before: Mapping[str, Mapping[str, str]] = {}
        moved_s, told_s, wanted = time.monotonic(), -TELL_S, stop.is_set()
        left: dict[str, int] = {}
        while True:
            look()
            now_s = time.monotonic()
            try:
                readers = self._outstanding.readers()
            except TransportError as error:
                # Nobody gets on without Redis, and nobody loses anything.
                show(f"waiting for Redis: {error}")
                moved_s = now_s
                stop.again.wait(LOOK_S)
                if stop.again.is_set():
                    return self._give_up(left, tell)
                continue
            if not readers:
                return {}
            kept = {one.name: dict(one.kept) for one in readers}
            if kept != before:
                before, moved_s = kept, now_s
            over = stop.again.is_set() or (self._patience_s is not None and now_s - moved_s >= self._patience_s)
            if over or now_s - told_s >= TELL_S or stop.is_set() != wanted:
                left, told_s, wanted = self._left(readers), now_s, stop.is_set()
                if over:
                    return self._give_up(left, tell)
                tell(waiting_text(readers, left, self._run_id))
            show("waiting for " + " and ".join(f"reader {one.name}" for one in readers))
            stop.again.wait(LOOK_S)

    def _left(self, readers: list[ReaderRecord]) -> dict[str, int]:
        return {one.name: self._outstanding.fragments(one) for one in readers}

    def _give_up(self, left: Mapping[str, int], tell: Callable[[str], None]) -> dict[str, int]:
        kept = "; the archive has them" if self._archive else ""
        for name, fragments in left.items():
            tell(
                f"gave up waiting for reader {name}: {fragments} fragments that it has not checkpointed are lost with "
                f"the run's streams{kept}"
            )
        return dict(left)


def waiting_text(readers: list[ReaderRecord], left: Mapping[str, int], run_id: str) -> str:
    """For whom the run waits, and what to do about it."""
    behind = " and ".join(
        f"reader {one.name}{'' if one.holder else ' (which is not there)'}, which has {left[one.name]} fragments to "
        "checkpoint"
        for one in readers
    )
    return (
        f"the run is finished and waits for required {behind}. `clawq reader drop {run_id} {readers[0].name}` gives up "
        "its claim; Ctrl-C when the end was asked for already gives up all, and loses what they lack"
    )
