"""Keeps a claim alive, in a thread of its own, while its owner cannot do so itself: it loads.

So the claim of one that was killed runs out within its time limit, however long loading takes. Redis being away, or an
import that lets no other thread run, may let it lapse: then it is taken anew, and if somebody else has it, nothing is
done: whoever takes over from here renews it, and is told.
"""

import logging
import threading

from clawq.errors import ClaimLost, TransportError
from clawq.transport.claims import Claim

log = logging.getLogger(__name__)

#: Between two looks, as a share of the claim's time limit.
_LOOK_SHARE = 1 / 10


class Renewal:
    """Renews that claim from now on, until `close`."""

    def __init__(self, claim: Claim) -> None:
        self._claim, self._ending = claim, threading.Event()
        self._thread = threading.Thread(target=self._run, name="clawq-renewal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From now on it is renewed by somebody else, or by nobody. Idempotent."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(self._claim.ttl_s * _LOOK_SHARE):
            try:
                if self._claim.renewal_due and self._claim.renew():
                    log.warning("the claim of %s had lapsed and was taken anew", self._claim.holder)
            except ClaimLost as error:
                log.warning("%s", error)
                return
            except TransportError as error:
                log.info("the claim cannot be renewed just now: %s", error)


__all__ = ["Renewal"]
