"""The learner's quarantine: rules that are made and lifted while the run goes on, and what they do to ring and intake.

    add     rows of covered fragments are masked in the ring at once and never sampled again, by any sampler;
            covered fragments that come later, or are not committed yet, are refused and counted (`quarantined`)
    lift    later fragments are taken again; what was masked stays masked
    list    the rules

The normaliser has seen the rows that are masked, and updates that were made from them stay made: quarantine stops what
is to come. To undo the past, replay the run without them, or go back to an older checkpoint.

Rules are kept in `quarantine.json` in the run folder (written before a command is answered), so neither a kill nor an
older checkpoint loses one; they are applied again when a run is resumed, and recorded in its schedule, so that learning
can be done again exactly.
"""

import difflib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from clawq.errors import CheckpointInvalid, UserError
from clawq.programs.damaged import damaged, read_object
from clawq.programs.recorder import Recorder
from clawq.replay.consumer import Consumer
from clawq.replay.quarantine import Origin, Rule
from clawq.replay.rate_limiter import Unlimited
from clawq.replay.ring import ReplayRing
from clawq.types import Metrics

#: Name of the file in the run folder.
QUARANTINE_FILE = "quarantine.json"
#: Kind of the record in the schedule.
CHANGE = "quarantine"
#: Rules of a run; of lifted ones those whose fragments have left the ring make room.
MOST_RULES = 100
#: Requests that are remembered: a command that was sent twice is carried out once.
MOST_REQUESTS = 100
#: Workers or slots that an answer names.
MOST_NAMED = 20


class Quarantine:
    """See the module's text. For the learner's main thread.

    Args:
        file: where rules are kept.
        ring: whose rows are masked.
        limiter: told when nothing is left to sample.
        consumer: knows how far experience was taken over.
        recorder: of the schedule.

    Attributes:
        rules: in the order in which they were made.
        masked: env steps that rules have masked in this process.
    """

    def __init__(
        self, file: Path, ring: ReplayRing, limiter: Unlimited, consumer: Consumer, recorder: Recorder
    ) -> None:
        self._file, self._ring, self._limiter = file, ring, limiter
        self._consumer, self._recorder = consumer, recorder
        self.rules: tuple[Rule, ...] = ()
        self.masked = 0
        self._answered: deque[str] = deque(maxlen=MOST_REQUESTS)

    def refuses(self, one: Origin) -> bool:
        """Is that fragment not to become experience?"""
        return any(rule.covers(one) for rule in self.rules)

    def command(self, event_id: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Carry out a command from the run's events; returns the facts of the answer (None: it was answered before).

        Args:
            event_id: of the event; it stands for the request of a command that names none.
            facts: `request` (any text), `op` (`add` with the fields of a Rule, `lift` with `id`, `list`).
        """
        request = str(facts.get("request") or event_id)[:64]
        if request in self._answered:
            return None
        self._answered.append(request)
        rest = {name: value for name, value in facts.items() if name not in ("request", "op")}
        try:
            answer = self._carry_out(facts.get("op"), rest)
        except (UserError, OSError) as error:
            answer = {"error": str(error)}
        return {"request": request, **answer}

    def _carry_out(self, op: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
        if op == "add":
            return self._add(Rule.of_facts({**facts, "id": 0, "lifted": None}))
        if op == "lift":
            return self._lift(facts.get("id"))
        if op == "list":
            return {"rules": [rule.facts() for rule in self.rules]}
        raise UserError(f"quarantine: {op!r} is no command; there are add, lift and list")

    def _add(self, rule: Rule) -> dict[str, Any]:
        kept = [one for one in self.rules if one.lifted is None or any(map(one.covers, self._ring.placed))]
        if len(kept) >= MOST_RULES:
            raise UserError(f"quarantine: there are {len(kept)} rules already, and no room for more; lift some")
        rule = replace(rule, id=1 + max((one.id for one in self.rules), default=0))
        self._keep((*kept, rule))
        unknown = self._unknown(rule)
        fragments, env_steps = self.apply(rule)
        self._recorder.changed(CHANGE, rule.facts())
        return {"id": rule.id, "fragments": fragments, "env_steps": env_steps, "unknown": unknown}

    def _unknown(self, rule: Rule) -> dict[str, list[str]]:
        """Of what the rule names and nobody has heard of (`worker`, `slot`): the known names, the nearest first."""
        known = {
            "worker": {placed.worker for placed in self._ring.placed},
            "slot": {placed.slot for placed in self._ring.placed} | self._consumer.marks.keys(),
        }
        named = {"worker": rule.worker, "slot": rule.slot}
        return {
            what: nearest(name, known[what])[:MOST_NAMED]
            for what, name in named.items()
            if name is not None and name not in known[what]
        }

    def _lift(self, rule_id: Any) -> dict[str, Any]:
        found = next((rule for rule in self.rules if rule.id == rule_id), None)
        if found is None:
            there = ", ".join(str(rule.id) for rule in self.rules) or "none"
            raise UserError(f"quarantine: there is no rule {rule_id}; there are: {there}")
        if found.lifted is not None:
            raise UserError(f"quarantine: rule {rule_id} was lifted before")
        lifted = replace(found, lifted=self._consumer.committed_cursors())
        self._keep(tuple(lifted if rule is found else rule for rule in self.rules))
        return {"id": rule_id}

    def apply(self, rule: Rule) -> tuple[int, int]:
        """Mask what the rule covers in the ring; returns how many fragments it covers, and env steps masked."""
        fragments, env_steps = self._ring.mask_fragments(rule.covers)
        self.masked += env_steps
        if env_steps and self._ring.size == 0:
            # Sampling waits until the ring is filled again, instead of both sides waiting for each other.
            self._limiter.rebase(0)
        return fragments, env_steps

    # --- over restarts ------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the rules of earlier sessions and mask what they cover in the ring, which holds what it held.

        Raises:
            CheckpointInvalid: the file cannot be read.
        """
        advice = "It says what must not be learned from: mend it, or delete it and quarantine anew"
        try:
            with damaged(self._file, advice, CheckpointInvalid):
                self.rules = tuple(Rule.of_facts(facts) for facts in read_object(self._file)["rules"])
        except FileNotFoundError:
            return
        for rule in self.rules:
            self.apply(rule)

    def record(self) -> None:
        """Record the rules in the schedule of a session that has just begun."""
        for rule in self.rules:
            self._recorder.changed(CHANGE, rule.facts())

    def _keep(self, rules: tuple[Rule, ...]) -> None:
        """Write the rules to disk, then hold to them."""
        partial = self._file.with_name(self._file.name + ".tmp")
        with partial.open("w") as out:
            json.dump({"rules": [rule.facts() for rule in rules]}, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(self._file)
        self.rules = rules

    def metrics(self) -> Metrics:
        """Rules in force, and env steps that were masked; nothing as long as there is no rule."""
        if not self.rules:
            return {}
        in_force = sum(rule.lifted is None for rule in self.rules)
        return {"quarantine/rules": float(in_force), "quarantine/masked": float(self.masked)}


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names, those most like `name` first."""
    return sorted(known, key=lambda one: (-difflib.SequenceMatcher(None, name, one).ratio(), one))


class Quarantined(Protocol):
    """What has a quarantine."""

    @property
    def quarantine(self) -> Quarantine: ...


def again(parts: Quarantined, facts: Mapping[str, Any]) -> None:
    """Do what the schedule recorded to the ring of other parts."""
    parts.quarantine.apply(Rule.of_facts(facts))


__all__ = ["CHANGE", "MOST_RULES", "QUARANTINE_FILE", "Quarantine", "again"]
