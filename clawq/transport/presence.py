"""Presence: a reader in its run's registry (clawq.transport.registry), and the sign that it is there now.

The sign is a claim with a time limit. The learner's claim speaks for all readers in its process, which have none.
"""

import threading
from typing import Any

import redis

from clawq.errors import ClaimLost
from clawq.transport.claims import Claim
from clawq.transport.client import translated
from clawq.transport.keys import ARCHIVE, LEARNER, RunKeys
from clawq.transport.registry import ReaderRecord, Readers, presence
from clawq.transport.restarts import server_of

#: A reader that was silent for so long counts as gone, seconds.
PRESENCE_TTL_S = 10.0


class Presence:
    """Keeps one reader's place.

    Args:
        client: of the data server.
        keys: of the run.
        name: of the reader.
        required: its role.
        what: what it is, for people.

    Attributes:
        claim: the sign, while there is one.
    """

    def __init__(self, client: redis.Redis, keys: RunKeys, name: str, required: bool, what: str) -> None:
        self.claim: Claim | None = None
        self._client: Any = client
        self._keys, self._name, self._required, self._what = keys, name, required, what
        self._registry = Readers(client, keys)
        #: Held while the sign changes: several threads show it, another one gives it back.
        self._being = threading.RLock()
        self._left = False

    def enter(self, anew: bool) -> ReaderRecord:
        """Enter the registry, on this server for the first time or again; see Readers.enter."""
        return self._registry.enter(self._name, self._required, self._what, anew)

    def tell(self) -> None:
        """Write the names of the required readers into the control record again."""
        self._registry.tell()

    def beat(self, server: str) -> None:
        """Show that the reader is there.

        Args:
            server: on which it entered (`server_of`); on another one it is not dropped, but not known yet.

        Raises:
            ClaimHeld: somebody else reads under this name.
            ClaimLost: this reader was dropped.
        """
        if self._name in (LEARNER, ARCHIVE):
            return
        with self._being:
            if self._left:
                return
            if self.claim is None:
                self.claim = Claim.take(self._client, presence(self._keys, self._name), self._what, PRESENCE_TTL_S)
            elif self.claim.renewal_due and self.claim.renew():
                with translated(self._client):
                    # With all others it was not dropped: the run has ended, which its reader finds out by itself.
                    known: Any = self._client.hkeys(self._keys.readers)
                dropped = known and self._name.encode() not in known
                if dropped and server_of(self._client, self._keys, server) == server:
                    self.close()
                    raise ClaimLost(f"reader {self._name} was dropped: its claim on the log is given up")

    def close(self) -> None:
        """Be gone; the place in the registry is kept. Idempotent."""
        with self._being:
            claim, self.claim = self.claim, None
            if claim is not None:
                claim.release()

    def leave(self) -> None:
        """Be gone for good: nobody waits for this reader any more, and `beat` does nothing."""
        with self._being:
            self._left = True
            self.close()
        self._registry.leave(self._name)
