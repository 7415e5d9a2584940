"""`python -m clawq.spawning.launch MODULE`: run a clawq program so that it cannot outlive its parent.

What it does before the program: asks the kernel for SIGKILL when the parent ends (and ends at once if the parent is
gone already), and lets SIGUSR1 write the stacks of all threads to stderr, so that whoever kills a hung program can
first see where it hung. Then it runs MODULE in this same interpreter, as `python -m MODULE` would.

Before anything else it waits until its parent has registered it (CLAWQ_RELEASE_FD, see `clawq.registry`): so there is
no moment at which a program of ours runs and the watchdog does not know it.

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

from clawq import progress

#: The spawner writes its pid here, so that a parent that ended before we could ask is noticed.
PARENT_VARIABLE = "CLAWQ_PARENT_PID"
#: The file descriptor on which the spawner sends one byte when this process may begin.
RELEASE_VARIABLE = "CLAWQ_RELEASE_FD"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when its parent does. Linux only; elsewhere control sockets must do."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def wait_for_release(release_fd: int) -> None:
    """Wait until the parent lets us go; end if it is gone instead."""
    released = os.read(release_fd, 1)
    os.close(release_fd)
    if not released:
        os._exit(1)


def main() -> None:
    """Bind this process to its parent, then become the named module."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    die_with_parent(int(parent) if parent is not None else None)
    release = os.environ.pop(RELEASE_VARIABLE, None)
    if release is not None:
        wait_for_release(int(release))
    progress.mine()
    # What this process starts shows no progress in our name.
    os.environ.pop(progress.PROGRESS_VARIABLE, None)
    with contextlib.suppress(AttributeError, ValueError):
        # A crash in native code leaves where it was in the log.
        faulthandler.enable(all_threads=False)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
