"""Does harm to a process that starts with this folder in PYTHONPATH.

CLAWQ_CHAOS_RENAME=before|after: it is killed beside a rename of a checkpoint, the next one from when the file
CLAWQ_CHAOS_TRIGGER is there. It listens to Python's own audit events, so nothing of what is tested is replaced.

CLAWQ_CHAOS_CLOCK=SECONDS: its wall clock is ahead by that.
"""

import os
import signal
import sys
import time
from typing import Any

_POINT, _TRIGGER = os.environ.get("CLAWQ_CHAOS_RENAME"), os.environ.get("CLAWQ_CHAOS_TRIGGER", "")
_AHEAD_S = int(os.environ.get("CLAWQ_CHAOS_CLOCK", "0"))
_renamed: list[str] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    due = bool(_renamed)
    if event == "os.rename" and str(arguments[1]).endswith(".ckpt") and os.path.exists(_TRIGGER):
        _renamed.append(str(arguments[1]))
        due = _POINT == "before"
    # After it: at the next thing that is opened, which is the folder, to be synced.
    elif event != "open":
        return
    if due:
        os.kill(os.getpid(), signal.SIGKILL)


if _POINT:
    sys.addaudithook(_listen)

if _AHEAD_S:
    _true_s, _true_ns = time.time, time.time_ns
    time.time = lambda: _true_s() + _AHEAD_S
    time.time_ns = lambda: _true_ns() + _AHEAD_S * 10**9
