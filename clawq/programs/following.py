"""A learner that follows another run: it learns from that run's streams, and does everything else on its own.

It is a run like any other (id, tag, folder, weights, evaluations, checkpoints, budget) whose experience is made by the
actors of the *source*. In the source's keys it writes nothing but its place among the readers: registration, cursors,
ledger. It begins with what the streams hold, it never trims, and it sends no leases; its evaluations are tasks for any
worker that serves it. Environments must be the same, to the last bound.

It ends when its own budget is spent, or with its source: when that has finished and nothing is left to read, the
follower finishes too (final weights, evaluation, pictures); when the source was only stopped, the follower stops as
well, and both can be resumed. A source whose learner died is waited for.

As an optional reader it is never waited for, and counts what it came too late for; as a required one it holds trimming
and actors back.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clawq.config import RunConfig
from clawq.errors import ClaimHeld, UserError
from clawq.programs.source_end import How, SourceEnd
from clawq.programs.upkeep import Kept
from clawq.specs import EnvSpec
from clawq.transport.client import connect
from clawq.transport.control import RunRegistry
from clawq.transport.keys import LEARNER, NAME_PATTERN, RunKeys
from clawq.transport.presence import PRESENCE_TTL_S
from clawq.transport.readers import StreamReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """The run that is followed.

    Attributes:
        run_id: its name.
        tag: its tag.
        reader: under which name it is followed.
        required: in which role.
    """

    run_id: str
    tag: str
    reader: str
    required: bool

    @property
    def keys(self) -> RunKeys:
        """Its keys."""
        return RunKeys(self.tag)


def find_source(config: RunConfig, run_id: str, spec: EnvSpec, broker_url: str, tag: str = "") -> Source | None:
    """The run that a configuration follows, None if it follows none.

    Args:
        config: of the follower.
        run_id: its name.
        spec: of its environment.
        broker_url: where runs are registered.
        tag: of the source that it followed before it was resumed, empty for a new one.

    Raises:
        UserError: there is no such run, or it is another one, or its environment differs.
    """
    wanted = config.source
    if wanted is None:
        return None
    registry = RunRegistry(connect(broker_url))
    record = registry.get(wanted.run)
    if record is None or record.run_id == run_id:
        others = ", ".join(run.run_id for run in registry.list() if run.run_id != run_id) or "none"
        raise UserError(f"source.run: there is no run {wanted.run!r} on this Redis to follow; there are {others}")
    if tag and record.tag != tag:
        raise UserError(f"source.run: the run {wanted.run} that is here is another one than {run_id} followed before")
    theirs = EnvSpec.from_json(record.spec)
    if theirs.fingerprint != spec.fingerprint:
        raise UserError(
            f"source.run: {wanted.run} cannot be followed, its environment differs: {differences(theirs, spec)}"
        )
    reader = wanted.reader or run_id
    if reader == LEARNER or not NAME_PATTERN.fullmatch(reader):
        raise UserError(f"source.reader: {reader!r} cannot be the name of a reader; choose another")
    return Source(record.run_id, record.tag, reader, wanted.required)


def differences(theirs: EnvSpec, ours: EnvSpec) -> str:
    """What is not the same in two specs, as `action: [...] there, [...] here`."""
    there, here = theirs.to_json(), ours.to_json()
    return "; ".join(f"{name}: {there[name]} there, {here[name]} here" for name in there if there[name] != here[name])


def take_place(reader: StreamReader) -> None:
    """Show that a reader is there, waiting until a killed predecessor counts as gone; UserError if somebody is."""
    deadline = time.monotonic() + 1.5 * PRESENCE_TTL_S
    while True:
        try:
            reader.beat()
            return
        except ClaimHeld as error:
            if time.monotonic() > deadline:
                raise UserError(f"source.reader: {error}; choose another name") from None
            time.sleep(0.2)


class Following:
    """The upkeep of a follower (see clawq.programs.upkeep): nothing is trimmed, and the source's end is looked for.

    Args:
        reader: of the source's streams.
        source: which run.
        data: client of the data server.
        broker: client of the broker.
    """

    held: str | None = None

    def __init__(self, reader: StreamReader, source: Source, data: Any, broker: Any) -> None:
        self._reader, self._source = reader, source
        self._end = SourceEnd(data, broker, source.run_id, source.tag)
        self._kept = Kept(reader)
        #: A checkpoint would let the source go on.
        self.pressed = False

    @property
    def source_ended(self) -> How | None:
        """How the source ended, once nothing is left to read."""
        return self._end.how

    def window(self, wanted_bytes: int) -> int:
        """What is wanted: it paces nobody."""
        return wanted_bytes

    def tend(self, checkpointed: Mapping[str, str], window_bytes: int, beside: Mapping[str, Mapping[str, str]]) -> None:
        """Be there, and tell how far this reader will never read again."""
        self._reader.beat()
        self._kept.tell(checkpointed)

    def squeeze(
        self, checkpointed: Mapping[str, str], window_bytes: int, beside: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Nothing of this run's is in the streams."""

    def look(self, window_bytes: int) -> dict[str, float]:
        """Figures by metric name; afterwards `source_ended` is up to date."""
        unread = sum(self._reader.unread_entries().values())
        self._end.look(unread)
        # A source that is being finished waits for what its required readers have not checkpointed.
        self.pressed = self._end.finishing and self._reader.cursors() != self._kept.told
        return {"unread_fragments": float(unread)}
