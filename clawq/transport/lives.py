"""Actors that ended without a word: each took with it what it had not sent, and nobody can tell what that was.

A slot's registration says that its actor is at work (`open`) until that gives the slot back with everything sent. One
that was killed, alone, with its worker or with its machine, leaves it so. Whoever finds that counts one life more: the
slot's next actor and the sweep that takes the registration away for good, a look as soon as the claim is free.
"""

from dataclasses import dataclass
from typing import Any, Self

import redis

from clawq.json_text import is_whole, parse_object
from clawq.transport.claims import is_free
from clawq.transport.client import translated
from clawq.transport.keys import NAME_PATTERN, RunKeys
from clawq.transport.texts import parse_count

#: Of one slot no more are believed: registrations are written by workers.
_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Lives:
    """What a slot's registration says of its actors.

    Attributes:
        epoch: of the last one.
        lost: how many before it ended without a word; -1 if it was itself taken for one of those.
        open: whether it has not said yet that it gave the slot back.
    """

    epoch: int = 0
    lost: int = 0
    open: bool = False

    @classmethod
    def of(cls, registration: bytes | str | None) -> Self:
        """From its text; nothing, if there is none or if somebody else wrote there."""
        try:
            facts: Any = parse_object(registration or b"{}")
        except ValueError:
            return cls()
        epoch, lost = facts.get("epoch"), facts.get("lost")
        if not (is_whole(epoch) and (is_whole(lost) or lost == -1)):
            return cls()
        return cls(epoch, min(lost, _MOST), facts.get("open") is True)

    def lost_if(self, *, living: bool) -> int:
        """How many are lost, if the last one lives, or if it does not."""
        return self.lost + (self.open and not living)


class LostLives:
    """Counts them over all slots of a run, those that were swept away too, on this data server and on those before it.

    Args:
        client: of the data server.
        keys: of the run.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client: Any = client
        self._keys = keys
        #: Which server was looked at last, and whose life of the run's keys; and how many were counted.
        self._looked_at: tuple[str, bytes | None] | None = None
        self._counted = 0
        #: Of these, how many it knows nothing of.
        self._forgotten = 0

    def count(self) -> int:
        """How many actors ended without a word."""
        with translated(self._client):
            names = [name.decode(errors="replace") for name in self._client.hkeys(self._keys.slots)]
            slots = [name for name in names if NAME_PATTERN.fullmatch(name)]
            # Of one moment: an actor that gives its slot back says so first.
            pipe = self._client.pipeline(transaction=True)
            pipe.info("server")
            pipe.get(self._keys.born)
            pipe.hget(self._keys.swept, "lost")
            pipe.hgetall(self._keys.slots)
            for slot in slots:
                pipe.get(self._keys.claim(f"slot:{slot}"))
            about, born, swept, raw, *holders = pipe.execute()
        # One that came since the names were asked for lives.
        free = {slot for slot, holder in zip(slots, holders, strict=True) if is_free(holder)} | set(names) - set(slots)
        found = {slot.decode(errors="replace"): Lives.of(text) for slot, text in raw.items()}
        lost = sum(one.lost_if(living=slot not in free) for slot, one in found.items())
        known = max(0, parse_count(swept) + lost)
        server = str(about["run_id"]), born
        if self._looked_at not in (None, server):
            # One that came back with what it had is not to count it again.
            self._forgotten = max(0, self._counted - known)
        self._looked_at, self._counted = server, self._forgotten + known
        return self._counted


__all__ = ["Lives", "LostLives"]
