"""A stretch of a recorded log: from and to, by fragment number, env steps or time. Pure.

    fragment:120           the 120th fragment that the learner committed, counted from 1
    40000                  env steps of the fragments before it
    22:15   22:15:30   2026-11-29T22:15:30       when it was made, local time (without a date: of the log's first day)

`from` is the first that counts, `to` is the first that does not. Updates go with the fragments that they followed.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from clawq.errors import UserError
from clawq.programs.schedule import FragmentCommitted, Record, SessionBegun, WeightsPublished

_TIMES = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_TIMES_OF_DAY = ("%H:%M:%S", "%H:%M")
#: Of all that Python would take for a number: plain digits, and not thousands of them.
_NUMBER = re.compile(r"[0-9](?:_?[0-9]){0,17}")
_ALLOWED = "allowed are fragment:N, a number of env steps, HH:MM[:SS] or YYYY-MM-DDTHH:MM[:SS]"


@dataclass(frozen=True, slots=True)
class Made:
    """What is known of a fragment without its payload.

    Attributes:
        made_ms: when, by its actor's clock.
        steps: env steps T·N.
    """

    made_ms: int
    steps: int


#: Gives what is known of (slot, epoch, seq), None if the log does not hold it.
Locate = Callable[[str, int, int], Made | None]


@dataclass(frozen=True, slots=True)
class Mark:
    """One end of a span.

    Attributes:
        kind: what is counted.
        value: fragments from 1, env steps, or milliseconds.
    """

    kind: Literal["fragment", "steps", "time"]
    value: int


@dataclass(frozen=True, slots=True)
class Span:
    """Everything from `begin` on and before `end`; None = open."""

    begin: Mark | None = None
    end: Mark | None = None

    @property
    def whole(self) -> bool:
        """No limit at all."""
        return self.begin is None and self.end is None


@dataclass(frozen=True, slots=True)
class Numbered:
    """A record, and the number of the fragment that it is or follows."""

    number: int
    record: Record


def parse_mark(text: str, first_ms: int) -> Mark:
    """A mark from a word of the command line.

    Args:
        text: see the module.
        first_ms: when the log begins: a time without a date is of that day.

    Raises:
        UserError: it is none.
    """
    kind, _, number = text.rpartition(":")
    if kind == "fragment" and _NUMBER.fullmatch(number) and int(number) >= 1:
        return Mark("fragment", int(number))
    if _NUMBER.fullmatch(text):
        return Mark("steps", int(text))
    day = time.strftime("%Y-%m-%dT", time.localtime(first_ms / 1000))
    for template in _TIMES_OF_DAY:
        at = _time(f"{day}{text}", f"%Y-%m-%dT{template}")
        if at is not None:
            return Mark("time", at)
    for template in _TIMES:
        at = _time(text, template)
        if at is not None:
            return Mark("time", at)
    raise UserError(f"{text!r} is no place in a log; {_ALLOWED}")


def within(records: Iterable[Record], span: Span, locate: Locate) -> Iterator[Numbered]:
    """The records of a span, numbered.

    What is in force when it begins (session, weights version) is kept. Fragments that the log does not hold and that
    would have to be asked for their time count as outside; for their env steps, nobody knows.

    Raises UserError if env steps cannot be counted, because the log has lost fragments before that.
    """
    inside, number, steps = span.begin is None, 0, 0
    asked = any(mark is not None and mark.kind != "fragment" for mark in (span.begin, span.end))
    counted = any(mark is not None and mark.kind == "steps" for mark in (span.begin, span.end))
    for record in records:
        if isinstance(record, FragmentCommitted):
            number += 1
            made = locate(record.slot, record.epoch, record.seq) if asked else None
            if counted and made is None:
                raise UserError(
                    f"env steps cannot be counted: the log has lost fragment {number}; give fragment:N or a time"
                )
            inside = _reached(span.begin, number, steps, made) and not _passed(span.end, number, steps, made)
            steps += made.steps if made is not None else 0
        if inside or isinstance(record, SessionBegun | WeightsPublished):
            yield Numbered(number, record)


def _reached(mark: Mark | None, number: int, steps: int, made: Made | None) -> bool:
    if mark is None:
        return True
    if mark.kind == "fragment":
        return number >= mark.value
    if mark.kind == "steps":
        return steps >= mark.value
    return made is not None and made.made_ms >= mark.value


def _passed(mark: Mark | None, number: int, steps: int, made: Made | None) -> bool:
    if mark is None:
        return False
    return _reached(mark, number, steps, made) or (mark.kind == "time" and made is None)


def _time(text: str, template: str) -> int | None:
    try:
        return int(1000 * time.mktime(time.strptime(text, template)))
    except ValueError:
        return None
