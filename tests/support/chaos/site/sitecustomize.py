"""Kills the process that starts with this folder in PYTHONPATH beside a rename of a checkpoint, once it is told to.

CLAWQ_CHAOS_RENAME is `before` or `after`, CLAWQ_CHAOS_TRIGGER a file: from when it is there, the next rename counts.
It listens to Python's own audit events, so nothing of what is tested is replaced.
"""

import os
import signal
import sys
from typing import Any

_POINT, _TRIGGER = os.environ.get("CLAWQ_CHAOS_RENAME"), os.environ.get("CLAWQ_CHAOS_TRIGGER", "")
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
