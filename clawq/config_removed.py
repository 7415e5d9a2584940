"""Keys that a configuration had once: a user's own file is told what to write instead, a run folder's goes on without.

What a run recorded cannot be mended by whoever resumes, replays or bisects it, and says nothing any more that matters
to a newer clawq. So those keys are left out there, and that is told once.
"""

import copy
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Removed(NamedTuple):
    """A key that is gone: the version of clawq without it, and what to do instead."""

    version: str
    instead: str

    def __str__(self) -> str:
        return f"was removed in clawq {self.version}: {self.instead}"


#: Dotted path of a key that is gone -> what became of it. Keys stay here for as long as there may be such folders.
REMOVED: Mapping[str, Removed] = {
    "actors.max_policy_lag": Removed("0.1.0", "staleness.hard is the lag from which on a fragment is not taken"),
    "replay.demonstrations.format": Removed("0.1.0", "the file itself tells its format"),
    "watchdog.memory_mb": Removed("0.1.0", "actors.recycle.memory_mb is the limit of an actor's memory"),
}


def without_removed(recorded: Any, source: str) -> Any:
    """A recorded configuration without the keys that are gone, of which each is told once; a copy.

    Args:
        recorded: as a run folder holds it; whatever else is wrong in it stays, also that it is no mapping.
        source: where it stands, for people.
    """
    kept = copy.deepcopy(recorded)
    for path, removed in REMOVED.items():
        *sections, key = path.split(".")
        at: Any = kept
        for section in sections:
            at = at.get(section) if isinstance(at, dict) else None
        if isinstance(at, dict) and key in at:
            del at[key]
            _tell(source, f"{path} {removed}")
    return kept


@cache
def _tell(source: str, what: str) -> None:
    log.warning("%s is of an older clawq: it is read without %s", source, what)


__all__ = ["REMOVED", "Removed", "without_removed"]
