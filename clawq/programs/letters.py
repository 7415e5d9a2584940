"""Dead letters for whoever looks into a run: found, told, and bundled so that the refusal happens again elsewhere.

A bundle is a folder with `entry.bin` (the entry's bytes) and `letter.json` (where it was, why it was refused, for which
run and environment, by which version). `check` decodes and examines it with this installation, as the learner does: so
a refusal can be looked into on another machine, without the run, and a fix can be seen to work.

Of a run whose Redis is gone the archive is examined instead: what is refused there was refused by the learner too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clawq
from clawq.core import Entry
from clawq.errors import ArchiveError, CodecError, LogGone, UserError
from clawq.programs.damaged import damaged, read_object
from clawq.programs.logbook import Logbook, meta_facts, printable
from clawq.programs.provenance import provenance
from clawq.programs.run import write_json
from clawq.replay.validation import Examiner, Fault, FragmentCheck
from clawq.specs import ArraySpec, EnvSpec
from clawq.transport.codec import WIRE_VERSION, decode, peek_meta
from clawq.transport.dead_letters import HEAD_BYTES, DeadLetters, Letter

_FORMAT = 1
_ENTRY, _LETTER = "entry.bin", "letter.json"


def read_letters(book: Logbook) -> tuple[list[Letter], dict[str, int], str]:
    """(letters, count by reason, where they were found): those in Redis, or else what is refused in the archive."""
    if book.where.data is not None:
        kept = DeadLetters(book.where.data, book.where.keys)
        counts = kept.counts()
        if counts or book.streams:
            return kept.read(), counts, "redis"
    letters, counts, examiner = [], {}, book.examiner
    for entry in book.log.entries():
        found = examiner.examine(entry)
        if isinstance(found, Fault):
            counts[found.reason] = counts.get(found.reason, 0) + 1
            letters.append(_letter_of(entry, found))
    return letters, counts, "archive"


def _letter_of(entry: Entry, fault: Fault) -> Letter:
    head = entry.payload[:HEAD_BYTES]
    return Letter("", entry.slot, entry.epoch, entry.seq, fault.reason, fault.detail, len(entry.payload), head)


def find_letter(letters: list[Letter], slot: str, epoch: int, seq: int) -> Letter:
    """The newest letter of that entry; LogGone if there is none."""
    for letter in reversed(letters):
        if (letter.slot, letter.epoch, letter.seq) == (slot, epoch, seq):
            return letter
    raise LogGone(f"there is no dead letter of {slot} {epoch}-{seq}; `clawq log dlq ls` shows those that are kept")


def whole_entry(book: Logbook, letter: Letter) -> bytes | None:
    """The bytes of a refused entry, from wherever they still are; None if only their head is."""
    if letter.id and book.where.data is not None:
        payload = DeadLetters(book.where.data, book.where.keys).payload(letter)
        if payload is not None:
            return payload
    try:
        return book.log.get(letter.slot, letter.epoch, letter.seq).payload
    except (LogGone, ArchiveError):
        return None


def letter_facts(letter: Letter) -> dict[str, Any]:
    """A letter for people and programs; what its header says, if that can be read."""
    facts: dict[str, Any] = {
        "slot": printable(letter.slot),
        "id": f"{letter.epoch}-{letter.seq}",
        "refused_ms": letter.made_ms,
        "reason": printable(letter.reason),
        "detail": printable(letter.detail),
        "bytes": letter.size_bytes,
    }
    try:
        # A header that can be read may be wrong all the same: nothing has been checked.
        facts["header"] = meta_facts(peek_meta(letter.head))
    except CodecError:
        facts["header"] = None
    return facts


def write_bundle(book: Logbook, letter: Letter, folder: Path) -> dict[str, Any]:
    """Write a bundle; returns what is in letter.json.

    Raises:
        UserError: the folder exists or cannot be written, or of the entry only the head is left.
    """
    payload = whole_entry(book, letter)
    if payload is None:
        raise UserError(
            f"of {letter.slot} {letter.epoch}-{letter.seq} only the first {len(letter.head)} of {letter.size_bytes} "
            "bytes are kept, which does not reproduce its refusal (newer dead letters are kept whole; an archive keeps "
            "everything)"
        )
    facts = {
        **letter_facts(letter),
        "format": _FORMAT,
        "run": book.where.run_id,
        "tag": book.where.keys.tag,
        "spec": book.spec.to_json(),
        "extras": {name: [list(one.shape), one.dtype] for name, one in book.extras.items()},
        "environment": book.where.config.get("environment"),
        "wire_version": WIRE_VERSION,
        "clawq": clawq.__version__,
        "commit": provenance("").commit,
        "cut": len(payload) < letter.size_bytes,
        "command": f"clawq log dlq check {folder.name}",
    }
    try:
        folder.mkdir(parents=True)
        (folder / _ENTRY).write_bytes(payload)
        write_json(folder / _LETTER, facts)
    except FileExistsError:
        raise UserError(f"{folder} exists already; choose another --out, or remove it") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    return facts


@dataclass(frozen=True, slots=True)
class Checked:
    """A bundle examined again.

    Attributes:
        recorded: the reason for which the learner refused the entry.
        fault: what is wrong with it here and now; None if it is fine.
        made_with: version of clawq that wrote the bundle.
    """

    recorded: str
    fault: Fault | None
    made_with: str

    @property
    def reproduced(self) -> bool:
        """Whether it is refused for the same reason."""
        return self.fault is not None and self.fault.reason == self.recorded


def check_bundle(folder: Path) -> Checked:
    """Examine the entry of a bundle as a learner does.

    Raises:
        UserError: it is no bundle, or one of a newer version.
    """
    try:
        payload = (folder / _ENTRY).read_bytes()
        with damaged(folder / _LETTER, "Export it anew: `clawq log dlq export`"):
            facts = read_object(folder / _LETTER)
            if facts["format"] != _FORMAT:
                raise UserError(f"a bundle of format {facts['format']}; this clawq reads format {_FORMAT}")
            epoch, seq = map(int, str(facts["id"]).split("-"))
            entry = Entry(str(facts["slot"]), epoch, seq, payload)
            extras = {name: ArraySpec(tuple(shape), kind) for name, (shape, kind) in facts.get("extras", {}).items()}
            examiner = Examiner(decode, FragmentCheck(EnvSpec.from_json(facts["spec"]), str(facts["tag"]), extras))
            reason, version = str(facts["reason"]), str(facts["clawq"])
    except OSError as error:
        raise UserError(f"{folder} is no bundle of a dead letter: {error.strerror or error}") from None
    found = examiner.examine(entry)
    return Checked(reason, found if isinstance(found, Fault) else None, version)


def write_bundles(
    book: Logbook, letters: list[Letter], folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A bundle for each letter, in folders of `folder`; those of which only the head is left are told and left out."""
    written = []
    for letter in letters:
        name = f"{printable(letter.slot).replace('/', '_')}-{letter.epoch}-{letter.seq}"
        try:
            written.append(write_bundle(book, letter, folder / name))
        except UserError as error:
            say(str(error))
    return written
