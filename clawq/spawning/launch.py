"""`python -m clawq.spawning.launch MODULE`: run a clawq program so that it cannot outlive its parent.

What it does before the program: asks the kernel for SIGKILL when the parent ends (and ends at once if the parent is
gone already), and lets SIGUSR1 write the stacks of all threads to stderr, so that whoever kills a hung program can
first see where it hung. Then it runs MODULE in this same interpreter, as `python -m MODULE` would.

The parent-death signal follows the *thread* that spawned us (see `clawq.spawning.spawner`). It does not reach our own
children; those are ended by whoever kills our session.
"""

import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import sys

#: The spawner writes its pid here, so that a parent that ended before we could ask is noticed.
PARENT_VARIABLE = "CLAWQ_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when its parent does. Linux only; elsewhere control sockets must do."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Bind this process to its parent, then become the named module."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(int(parent) if parent is not None else None)
    with contextlib.suppress(AttributeError, ValueError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
