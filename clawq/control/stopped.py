"""Pool processes that somebody has stopped (SIGSTOP) and not let go on: killed after a while; the pool replaces them.

A stopped process answers nothing and never ends; with prefork that is a slot gone for good. (A stopped main process is
the supervisor's affair, a stopped actor makes no progress, which its lease notices.) One that a debugger holds is in
another state, and left alone.
"""

import contextlib

#: For so long a pool process may be stopped, seconds.
STOPPED_S = 15.0


class StoppedChildren:
    """The direct children of this process, looked at now and then."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}

    def look(self, now_s: float) -> int:
        """Kill those that have been stopped for too long; how many that were."""
        import psutil

        stopped = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.status() == psutil.STATUS_STOPPED:
                    stopped.append(child)
        self._since_s = {child.pid: self._since_s.get(child.pid, now_s) for child in stopped}
        late = [child for child in stopped if now_s - self._since_s[child.pid] > STOPPED_S]
        for child in late:
            with contextlib.suppress(psutil.Error):
                child.kill()
        return len(late)


__all__ = ["STOPPED_S", "StoppedChildren"]
