"""Quarantine: which experience is not to be learned from, though it was sent in good order.

A rule names a worker, a slot (or one epoch of it, or some fragments of that), an interval of time, or several of these
at once: it covers what all of them name. Times are those of the fragments: when an actor's host, by its own clock, had
finished them. A rule that was lifted covers what had been taken over by then, and nothing later: what was masked stays
masked, also when a ring is filled again from the streams.

Pure: what becomes of covered rows and fragments is for clawq.programs.quarantine.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from clawq.errors import UserError

#: Outcome of a fragment that is refused for a rule.
QUARANTINED = "quarantined"
#: Longest worker, slot and reason.
_LONGEST = {"worker": 300, "slot": 128, "reason": 200}
#: Numbers stay below this (milliseconds since 1970, sequence numbers).
_LARGEST = 2**62
#: Not \d, which is many more digits than int() knows.
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class Origin(Protocol):
    """Where a fragment comes from: a FragmentMeta, or one placed in the ring."""

    @property
    def worker(self) -> str: ...
    @property
    def slot(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def created_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One quarantine; None = any.

    Attributes:
        id: 1, 2, 3 ... within a run.
        worker: name of the actors' worker, as `clawq log ls` shows it.
        slot: name of the slot.
        epoch: incarnation of the slot's actor; with `slot` only.
        first_seq: first fragment of that epoch; with `epoch` only.
        last_seq: last one.
        since_ms: fragments finished at or after this time, milliseconds since 1970.
        until_ms: and before this one.
        reason: for people.
        lifted: slot -> id of the last entry that had been settled when the rule was lifted; None = in force.
    """

    id: int
    worker: str | None = None
    slot: str | None = None
    epoch: int | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    reason: str = ""
    lifted: Mapping[str, str] | None = None

    def covers(self, one: Origin) -> bool:
        """Is that fragment's experience not to be learned from?"""
        return (
            self.worker in (None, one.worker)
            and self.slot in (None, one.slot)
            and self.epoch in (None, one.epoch)
            and (self.first_seq is None or one.seq >= self.first_seq)
            and (self.last_seq is None or one.seq <= self.last_seq)
            and (self.since_ms is None or one.created_ms >= self.since_ms)
            and (self.until_ms is None or one.created_ms < self.until_ms)
            and (self.lifted is None or _settled(self.lifted.get(one.slot, "0-0"), one))
        )

    def facts(self) -> dict[str, Any]:
        """All fields, JSON-able; `of_facts` is the inverse."""
        return asdict(self)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> "Rule":
        """A rule from the outside.

        Raises:
            UserError: it names nothing, or what it names makes no sense; the text says what is allowed.
        """
        unknown = set(facts) - set(cls.__dataclass_fields__)
        if unknown:
            raise UserError(f"quarantine: {', '.join(sorted(unknown))} unknown; a rule has {_NAMES}")
        for name, longest in _LONGEST.items():
            text = facts.get(name)
            if text is not None and not (isinstance(text, str) and len(text) <= longest):
                raise UserError(f"quarantine: {name} must be a text of at most {longest} letters")
        for name in ("id", "epoch", "first_seq", "last_seq", "since_ms", "until_ms"):
            number = facts.get(name)
            if number is not None and not (type(number) is int and 0 <= number < _LARGEST):
                raise UserError(f"quarantine: {name} must be a whole number from 0 on, not {number!r}")
        rule = cls(**{**facts, "id": facts.get("id", 0), "reason": facts.get("reason") or ""})
        for mistake in rule._mistakes():
            raise UserError(f"quarantine: {mistake}")
        return rule

    def _mistakes(self) -> list[str]:
        lifted = self.lifted is None or (
            isinstance(self.lifted, Mapping) and all(map(_is_id, self.lifted.values())) and len(self.lifted) < 100_000
        )
        wrong = {
            "name a worker, a slot, or a time (since, until); a rule for everything would leave nothing": (
                {self.worker, self.slot, self.since_ms, self.until_ms} == {None}
            ),
            "worker and slot must not be empty": "" in (self.worker, self.slot),
            "an epoch needs its slot": self.epoch is not None and self.slot is None,
            "from and to are numbers of fragments within an epoch: name slot and epoch": (
                (self.first_seq is not None or self.last_seq is not None) and self.epoch is None
            ),
            f"from {self.first_seq} is after to {self.last_seq}": (
                self.first_seq is not None and self.last_seq is not None and self.first_seq > self.last_seq
            ),
            "since is not before until: that interval is empty": (
                self.since_ms is not None and self.until_ms is not None and self.since_ms >= self.until_ms
            ),
            "lifted must be ids by slot": not lifted,
        }
        return [mistake for mistake, found in wrong.items() if found]


_NAMES = ", ".join(Rule.__dataclass_fields__)


def _is_id(text: Any) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def _settled(entry_id: str, one: Origin) -> bool:
    epoch, _, seq = entry_id.partition("-")
    return (one.epoch, one.seq) <= (int(epoch), int(seq))


__all__ = ["QUARANTINED", "Origin", "Rule"]
