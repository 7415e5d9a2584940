"""What the watchdog does in Redis: takes claims away before a kill, tells the run afterwards.

A process whose claim was seized cannot do harm if it survives: a learner's writes are fenced by its claim, and an
actor's stream is taken over by the next epoch, under which ids of the old one are refused. Redis being away is no
reason to fail here: claims run out by themselves.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from clawq.errors import TransportError
from clawq.registry import Record
from clawq.transport.claims import Claim
from clawq.transport.client import connect
from clawq.transport.control import Board, Event, Events, Heartbeats, RunRegistry
from clawq.transport.keys import RunKeys
from clawq.watchdog.access import own_url

log = logging.getLogger(__name__)

#: A seized claim that is not given back (the process lives on) runs out after this, seconds.
SEIZED_S = 60.0
#: Events that are kept in a report.
_EVENTS = 30
_TIMEOUT_S = 2.0


class Fence:
    """The claim and the run of one process that is to be ended.

    Args:
        record: of the process.
        claim: name of the claim that it holds, empty if none.
    """

    def __init__(self, record: Record, claim: str) -> None:
        self._record, self._name = record, claim
        self._claim: Claim | None = None

    @property
    def needed(self) -> bool:
        """Whether there is a claim to be taken."""
        return bool(self._name and self._record.run and self._record.urls[1])

    def seize(self) -> str:
        """Take the claim away; what was done, in words."""
        if not self.needed:
            return "it holds no claim"
        try:
            key = RunKeys(self._record.run).claim(self._name)
            client = connect(own_url(self._record.urls[1]), timeout_s=_TIMEOUT_S)
            self._claim = Claim.seize(client, key, f"watchdog, which ends pid {self._record.pid}", SEIZED_S)
        except (TransportError, ValueError) as error:
            return f"its claim on {self._name} could not be seized ({error}); it runs out by itself"
        return f"its claim on {self._name} was seized" if self._claim else f"its claim on {self._name} had run out"

    def release(self) -> None:
        """The process is dead: its replacement need not wait for the claim."""
        if self._claim is not None:
            with contextlib.suppress(TransportError):
                self._claim.release()

    def last_events(self) -> list[object]:
        """What the run told last."""
        found: list[Event] = []
        with self._data() as data:
            if data is not None and self._record.run:
                found = Events(data, RunKeys(self._record.run)).last(_EVENTS)
        return [{"id": event.id, "kind": event.kind, "facts": event.facts} for event in found]

    def tell(self, actors: Mapping[str, int], facts: dict[str, Any]) -> None:
        """Append `reaped` to the events of the runs for which the process worked, and count it on their boards.

        Args:
            actors: tag of a run -> its actors that were ended with the process, with what they had not sent.
            facts: who, and why.
        """
        with self._data() as data:
            if data is None:
                return
            for tag in self._runs():
                keys = RunKeys(tag)
                Events(data, keys).append("reaped", **facts, actors=actors.get(tag, 0))
                Board(data, keys).count_reaped(str(facts["reason"]))
                if self._record.role == "worker":
                    Heartbeats(data, keys).leave(str(self._record.facts.get("name", "")))

    def _runs(self) -> list[str]:
        """Tags of its run, or (a worker) of those that it served."""
        if self._record.run:
            return [self._record.run]
        if self._record.role != "worker" or not self._record.urls[0]:
            return []
        only = set(self._record.facts.get("runs") or ())
        runs = RunRegistry(connect(own_url(self._record.urls[0]), timeout_s=_TIMEOUT_S)).list()
        return [run.tag for run in runs if not only or run.run_id in only]

    @contextlib.contextmanager
    def _data(self) -> Iterator[Any]:
        if not self._record.urls[1]:
            yield None
            return
        try:
            yield connect(own_url(self._record.urls[1]), timeout_s=_TIMEOUT_S)
        except (TransportError, ValueError) as error:
            log.warning("%s: its run could not be told: %s", self._record.name, error)


__all__ = ["SEIZED_S", "Fence"]
