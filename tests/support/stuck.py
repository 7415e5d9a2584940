"""An algorithm plugin that is td3 and hangs in an update: in C, with the interpreter's lock, so that no thread moves.

CLAWQ_TEST_STUCK_AT: the update of a process in which it hangs; 0 = it crashes in native code when it is made instead.
CLAWQ_TEST_STUCK_ONCE: a file; once it is there, the next ones do not hang any more.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

from clawq.algorithms.td3 import Td3Plugin
from clawq.specs import EnvSpec


class StuckPlugin(Td3Plugin):
    """Entry point `td3-stuck`."""

    def make_algorithm(self, spec: EnvSpec, options: Any, device: str, seed: int) -> Any:
        learner: Any = super().make_algorithm(spec, options, device, seed)
        step, left = learner.step, int(os.environ["CLAWQ_TEST_STUCK_AT"])
        once = os.environ.get("CLAWQ_TEST_STUCK_ONCE")
        if left == 0:
            crash_on_purpose()

        def stuck_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not (once and Path(once).exists()):
                if once:
                    Path(once).touch()
                while True:
                    # A signal ends the sleep, not the loop.
                    ctypes.PyDLL(None).sleep(600)
            return step(*args, **kwargs)

        learner.step = stuck_step
        return learner


def crash_on_purpose() -> None:
    """As a library does in which memory was overwritten."""
    os.abort()


plugin = StuckPlugin()


def install(folder: Path) -> None:
    """Make `td3-stuck` an installed plugin; `folder` must be on the path of whoever shall find it."""
    metadata = folder / "stuck-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[clawq.algorithms]\ntd3-stuck = stuck:plugin\n")
