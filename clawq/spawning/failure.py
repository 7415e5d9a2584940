"""How an exec'ed program ended badly: one word to count it under, one sentence, the end of its log.

Exit statuses of our programs: 0 told to end, 2 a mistake of the user, 3 Redis, 70 a bug or an error of the environment,
86 the simulator cannot go on in this process (`SimulatorFailed`; a simulator's own code may exit with it as well).
"""

import contextlib
import signal
from pathlib import Path

from clawq.errors import ActorFailed, SimulatorFailed

#: The word for a simulator that cannot go on in its process; a new process may do better.
SIMULATOR = "simulator"
_KERNEL_COUNTERS = Path("/proc/vmstat")


class Failure(ActorFailed):
    """The bad end of an actor or another program.

    Attributes:
        kind: one word: `died`, `oom`, `simulator`, `stall`, `overrun`, `late`, `protocol`, `timeout`, `stopped`, or
            the program's own.
        reason: one sentence.
        slot: where, if it was an actor.
        broken_off: episodes that were under way in it.
    """

    slot, broken_off = "", 0

    def __init__(self, kind: str, reason: str, log_tail: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__((reason or kind) + (f"\n--- end of its log ---\n{log_tail}" if log_tail else ""))


def oom_kills(counters: Path = _KERNEL_COUNTERS) -> int:
    """How many processes the kernel of this machine has killed because memory ran out; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def how_it_ended(status: int, ooms_before: int, ooms_now: int | None = None) -> tuple[str, str]:
    """(kind, sentence) of a process that ended without a word.

    Args:
        status: its exit status, negative for a signal.
        ooms_before: `oom_kills()` when it was started.
        ooms_now: and now; None = look.
    """
    if status == SimulatorFailed.exit_code:
        return SIMULATOR, f"exited with status {status}: its simulator could not go on"
    if status >= 0:
        return "died", f"exited with status {status}"
    killed = f"was killed by signal {-status}"
    if status == -signal.SIGKILL:
        struck = (oom_kills() if ooms_now is None else ooms_now) - ooms_before
        if struck > 0:
            return "oom", f"{killed}; this machine's kernel has killed {struck} processes for memory since it began"
    return "died", killed


__all__ = ["SIMULATOR", "Failure", "how_it_ended", "oom_kills"]
