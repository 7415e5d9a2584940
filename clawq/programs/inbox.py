"""The inbox: what others tell a learner by the run's events and orders, and what it does about it.

    evaluation                        the appraisal takes it
    stop_wanted                       the run ends
    tune_wanted, tune_withdrawn       settings change live, between two updates; answered (clawq.programs.tuning)
    quarantine_wanted                 experience is not learned from; answered (clawq.programs.quarantine)
    actor_failed, evaluation_failed   told; if no actor has ever worked, the run ends with the actor's words
    reaped                            told: a watchdog ended a process
    actor_recycled                    counted
    lease                             told if its actor could not send

Orders have a stream of their own: workers, which append to the events, may give none. Other events are not for the
learner.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from clawq.config import RunConfig
from clawq.errors import ActorFailed, ConfigError
from clawq.programs import tuning
from clawq.programs.appraisal import Appraisal
from clawq.programs.complaints import Complaints
from clawq.programs.learner_state import LearnerState
from clawq.programs.notices import Notices
from clawq.programs.parts import Parts
from clawq.programs.stopping import wish
from clawq.transport.control import Event

#: Actor failures after which a run that never got a fragment gives up.
FAILURES_AT_START = 5


class Inbox:
    """Takes the events of one run.

    Args:
        parts: of the learner; a live change reaches their configuration.
        notices: for people.
        appraisal: takes evaluations.
        complaints: begin anew with a live change.
        state: names the configuration.

    Attributes:
        keep_config: keeps a configuration that was changed live (in the run folder, and where workers see it).
    """

    def __init__(
        self, parts: Parts, notices: Notices, appraisal: Appraisal, complaints: Complaints, state: LearnerState
    ) -> None:
        self.keep_config: Callable[[RunConfig], None] = lambda config: None
        self._parts, self._notices = parts, notices
        self._appraisal, self._complaints, self._state = appraisal, complaints, state

    def read(self, stop: threading.Event) -> None:
        """Take what has arrived; `stop` is set if somebody wants that."""
        events = self._parts.link.take_events()
        withdrawn = {event.facts.get("id") for event in events if event.kind == "tune_withdrawn"}
        for event in events:
            if event.id in withdrawn:
                continue
            if event.kind == "evaluation":
                self._appraisal.take(event.facts)
            else:
                self.take(event, stop)

    def take(self, event: Event, stop: threading.Event) -> None:
        """What an event other than an evaluation means at any time; `stop` is set if somebody wants that."""
        if event.kind == "stop_wanted":
            wish(stop)
        elif event.kind == "tune_wanted":
            self._tune(event)
        elif event.kind == "quarantine_wanted":
            answer = self._parts.quarantine.command(event.id, event.facts)
            if answer is not None:
                self._parts.link.notify("quarantine", **answer)
        elif event.kind == "reaped":
            self._notices.reaped(event.facts)
        elif event.kind == "lease":
            self._notices.waited(event.facts)
        elif event.kind == "actor_recycled":
            self._notices.recycled_one(event.facts)
        elif event.kind == "actor_failed":
            self._note_failure("actor", event.facts)
        elif event.kind == "evaluation_failed":
            self._appraisal.ended(event.facts)
            if event.facts.get("reason") != "superseded":
                self._note_failure("evaluation", event.facts)

    def _tune(self, event: Event) -> None:
        """Change settings live, between two updates, and answer."""
        link = self._parts.link
        try:
            if self._parts.budget.reached is not None:
                raise ConfigError("clawq tune", ["the run is over: it is being finished"])
            changes = tuning.take(self._parts, event.facts.get("set"))
        except ConfigError as error:
            link.notify("tune_refused", id=event.id, mistakes=list(error.mistakes))
            return
        self._state.configured()
        self._complaints.begin_anew()
        unkept = ""
        try:
            self.keep_config(self._parts.config)
        except OSError as error:
            unkept = f"in effect, but not written to the run folder: {error.strerror or error}"
        told = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
        self._notices.tell(f"changed live: {told or 'nothing'}")
        link.notify("tuned", id=event.id, changes=changes, unkept=unkept)

    def _note_failure(self, what: str, facts: Mapping[str, Any]) -> None:
        """Tell why something failed; if no actor has ever worked, end with its words instead of waiting for ever."""
        error, count = self._notices.failed(what, facts), self._notices.failures[what]
        if what == "actor" and self._parts.intake.fragments == 0 and count >= FAILURES_AT_START:
            raise ActorFailed(f"no actor could start; {count} tries failed. The last one: {error}")
