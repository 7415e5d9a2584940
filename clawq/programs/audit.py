"""The audit: finds a run's ledger, wherever it is now, and balances it against Redis' own counts.

    a learner is at work      its published positions, and Redis
    it was killed             its newest checkpoint, and Redis (a resume goes on from there)
    it has ended              `ledger.json`, which it wrote last; or as above, if the streams are still there

No torch is loaded unless a checkpoint has to be read. Nothing is written, but for `keep`, the learner's own last look.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from clawq.errors import CheckpointInvalid, TransportError, UserError
from clawq.json_text import parse_json
from clawq.programs.balance import Balance, balance
from clawq.programs.run import write_json
from clawq.replay.consumer import Consumer
from clawq.replay.ledger import Counts, Ledger, Place
from clawq.transport.books import Books, Position
from clawq.transport.claims import holder_of
from clawq.transport.control import Board
from clawq.transport.keys import LEARNER, RunKeys
from clawq.transport.stream import parse_id
from clawq.transport.trimming import trimmed_upto

log = logging.getLogger(__name__)

#: The file of a run folder in which the last balance is kept.
LEDGER_FILE = "ledger.json"
#: Why entries are missing that a reader, which is behind, will be told of as trimmed when it reads on.
NOT_TOLD = "trimmed, not told yet"
#: A learner at work may be in the midst of beginning anew with another server: for so long differences are looked at
#: again, every so often, seconds.
SETTLING_S, LOOK_S = 8.0, 0.25


def published(consumer: Consumer) -> tuple[dict[str, Position], dict[str, Any]]:
    """(positions, sums) of a consumer, as they are published."""
    return _sides(*consumer.books)


def _sides(counts: Counts, places: Mapping[str, Place]) -> tuple[dict[str, Position], dict[str, Any]]:
    positions = {slot: Position(*place.settled, place.gap) for slot, place in places.items()}
    before = sum(place.entries - place.settled[0] for place in places.values())
    return positions, {**asdict(counts), "before": before}


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
        if sums:
            sums["lost_unacked"] = Board(data, keys).read().get("lost_unacked", 0.0)
            if reader != LEARNER:
                positions, sums = with_untold(positions, sums, trimmed_upto(data, keys))
        found = balance(reader, "as it is now", positions, books.look(positions), sums)
        if not found.problems() or time.monotonic() >= deadline:
            return found
        time.sleep(LOOK_S)


def with_untold(
    positions: Mapping[str, Position], sums: Mapping[str, Any], trimmed: Mapping[str, tuple[str, int]]
) -> tuple[dict[str, Position], dict[str, Any]]:
    """Positions and sums with what was trimmed before the reader came to it, and what it has not been told of yet.

    Only optional readers are passed by like that, while they are behind.

    Args:
        positions: as the reader published them.
        sums: the same.
        trimmed: slot -> id and ordinal of the last entry trimmed.
    """
    found, untold = dict(positions), 0
    for slot, (at, ordinal) in trimmed.items():
        place = found.get(slot, Position())
        behind = ordinal - place.settled - place.gap
        if behind > 0 and parse_id(at) > parse_id(place.at):
            found[slot] = replace(place, gap=place.gap + behind)
            untold += behind
    if not untold:
        return found, dict(sums)
    gaps = dict(sums.get("gaps", {}))
    return found, {**sums, "gaps": {**gaps, NOT_TOLD: untold}}


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
    positions, sums = _sides(ledger.counts, ledger.places)
    seen = Books(data, keys).look(positions) if data is not None else {}
    where = "" if data is not None else "; its streams are gone"
    return balance(LEARNER, f"as of the checkpoint {checkpoint.path.name}{where}", positions, seen, sums)


def read_ledger(folder: Path) -> Balance | None:
    """What the learner wrote at its end; None if it did not come to that."""
    file = folder / LEDGER_FILE
    try:
        return Balance.from_json(parse_json(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


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
    return read_ledger(folder) or audit_checkpoint(None, keys, folder)


def keep(
    data: Any, keys: RunKeys, folder: Path, consumer: Consumer, lost_unacked: float, reader: str = LEARNER
) -> Balance | None:
    """Write the learner's last balance into the run folder; None if that was not possible (which is told)."""
    positions, sums = published(consumer)
    sums["lost_unacked"] = lost_unacked
    ended = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        seen = Books(data, keys).look(positions)
    except TransportError as error:
        log.warning("the last balance of the ledger is without Redis: %s", error)
        seen = {}
    found = balance(reader, f"when the learner ended, {ended}", positions, seen, sums)
    for problem in found.problems():
        log.warning("ledger: %s", problem)
    try:
        write_json(folder / LEDGER_FILE, found.to_json())
    except OSError as error:
        log.warning("%s was not written: %s", folder / LEDGER_FILE, error)
        return None
    return found


def unread_at_end(folder: Path, state: Mapping[str, Any]) -> dict[str, int]:
    """Slot -> fragments that were in the streams when the learner of this checkpoint ended; empty if nobody knows."""
    try:
        kept = read_ledger(folder)
    except UserError as error:
        log.warning("%s", error)
        return {}
    # Written at another moment than the checkpoint it would be about other fragments.
    if kept is None or kept.sums.get("entries") != Ledger(state).counts.entries:
        return {}
    return {row.slot: row.in_stream for row in kept.rows}
