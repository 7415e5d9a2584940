"""The audit: finds a run's ledger, wherever it is now, and balances it against Redis' own counts.

    a learner is at work      its published positions, and Redis
    it was killed             its newest checkpoint, and Redis (a resume goes on from there)
    it has ended              `ledger.json`, which it wrote last; or as above, if the streams are still there

No torch is loaded unless a checkpoint has to be read. Nothing is written, but for `keep`, the learner's own last look.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawq.errors import CheckpointInvalid, TransportError, UserError
from clawq.programs.balance import Balance, balance, split
from clawq.programs.damaged import damaged, read_object
from clawq.programs.run import write_json
from clawq.replay.ledger import Ledger
from clawq.transport.books import Books, Position, View, positions_of
from clawq.transport.claims import holder_of
from clawq.transport.client import translated
from clawq.transport.control import Board
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.registry import Readers
from clawq.transport.stream import parse_id
from clawq.transport.trimming import trimmed_upto

if TYPE_CHECKING:
    from clawq.replay.consumer import Consumer

log = logging.getLogger(__name__)

#: The file of a run folder in which the last balance is kept.
LEDGER_FILE = "ledger.json"
#: Why entries are missing that a reader, which is behind, will be told of as trimmed when it reads on.
NOT_TOLD = "trimmed, not told yet"
#: In place of a balance, of a reader that anybody may write.
UNPUBLISHED = "which publishes no ledger"
#: A learner at work may be in the midst of beginning anew with another server: for so long differences are looked at
#: again, every so often, seconds.
SETTLING_S, LOOK_S = 8.0, 0.25


def published(consumer: "Consumer") -> tuple[dict[str, Position], dict[str, Any]]:
    """(positions, sums) of a consumer, as they are published."""
    sums, places = consumer.books
    return positions_of(places), sums


def audit_live(data: Any, keys: RunKeys, reader: str = LEARNER, settling_s: float = SETTLING_S) -> Balance:
    """The balance of a reader at work; of a run without one, what its streams hold.

    Args:
        data: client of the data server.
        keys: of the run.
        reader: whose.
        settling_s: for how long a difference is looked at again.
    """
    books, deadline = Books(data, keys, reader), time.monotonic() + settling_s
    while True:
        positions, sums = books.read() or ({}, {})
        view = books.look(positions)
        if sums and reader == LEARNER:
            sums["lost_unacked"] = _lost_unacked(data, keys)
        elif sums:
            optional = any(one.name == reader and not one.required for one in Readers(data, keys).list())
            positions, sums = with_untold(positions, sums, trimmed_upto(data, keys), view, optional)
        found = balance(reader, "as it is now", positions, view, sums)
        if not found.problems() or time.monotonic() >= deadline:
            return found
        time.sleep(LOOK_S)


def _lost_unacked(data: Any, keys: RunKeys) -> float:
    """The bound of what actors took with them unsent, as of the learner's last look."""
    found = Board(data, keys).pick(["lost_unacked"]).get("lost_unacked")
    return found if isinstance(found, float | int) else 0.0


def with_untold(
    positions: Mapping[str, Position],
    sums: Mapping[str, Any],
    trimmed: Mapping[str, tuple[str, int]],
    view: View,
    optional: bool,
) -> tuple[dict[str, Position], dict[str, Any]]:
    """Positions and sums with what was trimmed before the reader came to it, and what it has not been told of yet.

    Only optional readers are passed by like that, while they are behind.

    Args:
        positions: as the reader published them.
        sums: the same.
        trimmed: slot -> id and ordinal of the last entry trimmed.
        view: what Redis says.
        optional: whatever else is missing of streams that are gone went away unread, too.
    """
    here, (settled, gap) = split(positions, view, sums)
    found, untold = dict(here), 0
    for slot, place in here.items():
        at, ordinal = trimmed.get(slot, ("0-0", 0))
        stream = view.streams[slot].stream
        behind = ordinal - stream.before - place.settled - place.gap
        if behind > 0 and parse_id(at) > parse_id(place.at):
            found[slot] = replace(place, gap=place.gap + behind, born=stream.born)
            untold += behind
    missing = max(0, (view.swept or 0) - settled - gap) if optional else 0
    if not untold and not missing:
        return dict(positions), dict(sums)
    gaps = {**sums.get("gaps", {}), NOT_TOLD: untold + missing}
    return found, {**sums, "gaps": gaps, "gone": [settled, gap + missing]}


def audit_checkpoint(data: Any, keys: RunKeys, folder: Path) -> Balance | None:
    """The balance as of the newest checkpoint, from where a resume goes on; None if there is none.

    Args:
        data: client of the data server; None = the streams are gone, only the checkpoint's own sums are looked at.
        keys: of the run.
        folder: the run folder.
    """
    from clawq.programs.checkpoint import Checkpoints

    checkpoint = Checkpoints(folder / "checkpoints").load_latest()
    if checkpoint is None:
        return None
    try:
        ledger = Ledger(checkpoint.state["consumer"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointInvalid(f"{checkpoint.path} holds no ledger that can be read: {error}") from error
    positions, sums = positions_of(ledger.places), ledger.sums
    seen = None
    if data is not None:
        seen, sums["lost_unacked"] = Books(data, keys).look(positions), _lost_unacked(data, keys)
    where = "" if data is not None else "; its streams are gone"
    return balance(LEARNER, f"as of the checkpoint {checkpoint.path.name}{where}", positions, seen, sums)


def read_ledger(folder: Path) -> Balance | None:
    """What the learner wrote at its end; None if it did not come to that."""
    return _read_file(folder)[0]


def _read_file(folder: Path) -> tuple[Balance | None, list[Balance]]:
    """(the learner's balance, those of other readers), as the learner wrote them at its end."""
    file = folder / LEDGER_FILE
    try:
        with damaged(file, "Move it away: the books are then taken from the newest checkpoint"):
            raw = read_object(file)
            return Balance.from_json(raw), [Balance.from_json(one) for one in raw.get("readers", [])]
    except FileNotFoundError:
        return None, []


def others(data: Any, keys: RunKeys, folder: Path | None, settling_s: float = SETTLING_S) -> list[Balance]:
    """The balances of all readers beside the run's learner: now, or as they were when the learner ended.

    Args:
        data: client of the data server, None if there is none.
        keys: of the run.
        folder: the run folder, None if it is on another machine.
        settling_s: for how long a difference is looked at again, where somebody is at work.
    """
    if data is not None and data.exists(keys.slots, keys.swept):
        names = [one.name for one in Readers(data, keys).list() if one.name != LEARNER]
        return [
            Balance(name, UNPUBLISHED)
            if Books(data, keys, name).read() is None
            else audit_live(data, keys, name, settling_s)
            for name in names
        ]
    return [] if folder is None else _read_file(folder)[1]


def audit(data: Any, keys: RunKeys, folder: Path | None, reader: str = LEARNER) -> Balance | None:
    """The balance of a run, from wherever its ledger is now; None if there is none anywhere.

    Args:
        data: client of the data server, None if there is none.
        keys: of the run.
        folder: the run folder, None if it is on another machine.
        reader: whose ledger.
    """
    if data is not None and holder_of(data, keys.claim("learner")) is not None:
        return audit_live(data, keys, reader)
    streams = data is not None and bool(data.exists(keys.slots, keys.swept))
    if streams and folder is not None and reader == LEARNER:
        found = audit_checkpoint(data, keys, folder)
        if found is not None:
            return found
    if streams and data is not None:
        return audit_live(data, keys, reader, settling_s=0.0)
    if folder is None:
        return None
    if reader != LEARNER:
        return next((one for one in others(data, keys, folder) if one.reader == reader), None)
    return read_ledger(folder) or audit_checkpoint(None, keys, folder)


def keep(
    data: Any,
    keys: RunKeys,
    folder: Path,
    consumer: "Consumer",
    lost_unacked: float,
    reader: str = LEARNER,
    finished: bool = False,
) -> Balance | None:
    """Write the learner's last balance into the run folder; None if that was not possible (which is told).

    `finished`: the run is over, and its streams are going to be deleted.
    """
    positions, sums = published(consumer)
    sums["lost_unacked"] = lost_unacked
    source = f"when the learner ended, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        seen = _sight(data, keys, positions)
    except TransportError as error:
        log.warning("the last balance of the ledger is without Redis: %s", error)
        seen = None
    found = balance(reader, source, positions, seen, sums)
    found = replace(found, finished=finished)
    for problem in found.problems():
        log.warning("ledger: %s", problem)
    try:
        write_json(folder / LEDGER_FILE, found.to_json() | {"readers": _others_at_end(data, keys, reader, source)})
    except OSError as error:
        log.warning("%s was not written: %s", folder / LEDGER_FILE, error)
        return None
    return found


def _sight(data: Any, keys: RunKeys, positions: Mapping[str, Position]) -> View | None:
    """What Redis says; None of a run that was followed and has finished: its counts were deleted with its streams."""
    with translated(data):
        there = data.exists(keys.born, keys.slots, keys.swept)
    return Books(data, keys).look(positions) if there else None


def _others_at_end(data: Any, keys: RunKeys, reader: str, source: str) -> list[dict[str, Any]]:
    """Of the other readers of the run's own streams: these are deleted when it is finished."""
    if reader != LEARNER:
        return []
    try:
        found = others(data, keys, None, settling_s=0.0)
    except TransportError as error:
        log.warning("the balances of other readers were not kept: %s", error)
        return []
    for one in found:
        for problem in one.problems():
            log.warning("ledger of reader %s: %s", one.reader, problem)
    return [replace(one, source=source).to_json() for one in found]


def ledger_at_end(folder: Path, state: Mapping[str, Any]) -> Balance | None:
    """What the learner of this checkpoint wrote at its end; None if nobody knows.

    Args:
        folder: of the run.
        state: of the consumer, in the checkpoint.
    """
    try:
        kept = read_ledger(folder)
    except UserError as error:
        log.warning("%s", error)
        return None
    # Written at another moment than the checkpoint it would be about other fragments.
    return kept if kept is not None and kept.sums.get("entries") == Ledger(state).counts.entries else None
