"""The rollout loop: the whole of acting on one screen.

It steps the envs as fast as they go, cuts the steps into fragments, and between fragments takes over newer weights. It
waits only where it must: without a control record or weights; while the learner has more unread than its window, since
acting on would only make experience old; in rounds, once its quota is done, for the next version; and (under `on_full:
block`) for room in the outbox. It touches no network. Env state, policy and unfinished business live on from one `run`
to the next; in rounds the open fragment too.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from clawq.acting.actor import Actor
from clawq.acting.adder import Adder, finite_rows
from clawq.acting.outbox import Outbox
from clawq.acting.quota import Endless, Share
from clawq.acting.sender import Sender
from clawq.core import VectorEnv
from clawq.errors import ActorFailed
from clawq.types import BoolArray, Fragment, Obs

Phase = Literal["start", "reset", "step", "send", "wait"]
#: How often an env that shows nonsense right after a restart is restarted again.
RESTARTS = 3
#: Longest wait before the loop looks up again, seconds.
LOOK_UP_S = 0.1
#: Longest wait for room in the outbox when the actor goes away, seconds.
FLUSH_S = 0.5


@dataclass(slots=True)
class Report:
    """What one `run` did; `reason` says why it ended, `waited_s` for how long Redis took nothing, and why."""

    reason: str = ""
    env_steps: int = 0
    fragments: int = 0
    episodes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    waited_s: dict[str, float] = field(default_factory=dict)


class RolloutLoop:
    """Drives one actor.

    Args:
        env: the envs.
        actor: chooses actions.
        adder: builds fragments.
        outbox: where they go.
        sender: what empties the outbox, and knows control record and weights.
        progress: called after every piece of real progress with its phase and the env steps of this run.
        policy_ready: False while trained weights could not be used yet (torch is still being imported).
        share: how much is collected under one weights version.
    """

    def __init__(
        self,
        env: VectorEnv,
        actor: Actor,
        adder: Adder,
        outbox: Outbox,
        sender: Sender,
        progress: Callable[[Phase, int], None] = lambda phase, env_steps: None,
        policy_ready: Callable[[], bool] = lambda: True,
        share: Share | None = None,
    ) -> None:
        self._env, self._actor, self._adder = env, actor, adder
        self._outbox, self._sender, self._share = outbox, sender, share or Endless()
        self._progress, self._policy_ready = progress, policy_ready
        self._attempts = 0

    def reset(self, seeds: list[int]) -> None:
        """Start all episodes."""
        self._obs = self._env.reset(seeds)
        self._adder.begin(self._obs)
        self._progress("reset", 0)

    def run(self, ended: Callable[[], str | None], retiring: Callable[[], bool] = lambda: False) -> Report:
        """Act until `ended` gives a reason (asked after every step), the run stops, or the slot is lost.

        Or until `retiring` (asked between fragments, in rounds between quotas): then the reason is `recycled`.
        """
        report = Report()
        before, waited_s = Counter(self._outbox.dropped), dict(self._sender.waited_s)
        while not (reason := ended() or self._over() or self._retired(retiring)):
            if not self._adder.steps and not self._may_act():
                self._wait("wait", report)
                continue
            if self._collect(ended, report):
                self._hand_over(report)
        report.reason = reason
        report.dropped += Counter(self._outbox.dropped) - before
        report.waited_s = {why: total - waited_s[why] for why, total in self._sender.waited_s.items()}
        return report

    def flush(self, report: Report) -> bool:
        """Send what an open fragment has, since this actor goes away; whether there was one.

        For room in the outbox it waits only a little: whoever ends an actor does not wait for Redis.
        """
        if not self._adder.steps:
            return False
        self._hand_over(report, FLUSH_S)
        return True

    def _collect(self, ended: Callable[[], str | None], report: Report) -> bool:
        """Step the envs until the fragment ends; False if only the lease did, and the fragment stays open."""
        adder, env, to_env = self._adder, self._env, self._env.spec.action.to_env
        before_s, looking = time.monotonic(), False
        if not adder.steps:
            adder.open(self._actor.version, before_s, self._share.room(self._actor.version))
        while True:
            action, extras = self._actor.act(self._obs)
            result = env.step(to_env(action))
            broken = adder.add(action, extras, result)
            self._obs = result.obs if broken is None else self._restart(broken)
            report.env_steps += env.num_envs
            self._progress("step", report.env_steps)
            now_s = time.monotonic()
            if adder.full(now_s):
                return True
            if self._share.outlives_leases:
                # It is ended by steps, which may take long: the stop flag is heeded in its midst.
                if ended() or self._over():
                    return False
            elif ended():
                return True
            if not looking and adder.ends_with_next(now_s, now_s - before_s):
                # Weights can only be taken over between fragments: look for them now, beside the last step.
                self._sender.look()
                looking = True
            before_s = now_s

    def _restart(self, broken: BoolArray) -> Obs:
        """Begin new episodes in the broken envs."""
        for _ in range(RESTARTS):
            obs = self._env.restart(broken)
            broken = ~finite_rows(obs, self._env.num_envs)
            if not broken.any():
                self._adder.restarted(obs)
                return obs
        raise ActorFailed(f"env {int(broken.argmax())} shows non-finite observations right after {RESTARTS} restarts")

    def _retired(self, retiring: Callable[[], bool]) -> str | None:
        if self._adder.steps or self._share.room(self._actor.version) not in (None, 0):
            return None
        return "recycled" if retiring() else None

    def _hand_over(self, report: Report, patience_s: float = math.inf) -> None:
        """Close the open fragment and hand it over."""
        fragment = self._adder.close()
        self._share.collected(fragment.meta.weights_version, fragment.meta.steps)
        report.fragments += 1
        report.episodes += len(fragment.meta.episodes)
        if not self._put(fragment, report, patience_s):
            report.dropped["abandoned"] += fragment.meta.steps * fragment.meta.envs

    def _put(self, fragment: Fragment, report: Report, patience_s: float) -> bool:
        """Hand the fragment over; waits for room for so long, and for as long as the sender lives."""
        until_s = time.monotonic() + patience_s
        while not self._outbox.put(fragment, LOOK_UP_S):
            self._noted("send", report)
            if self._over() or time.monotonic() >= until_s:
                return False
        return True

    def _may_act(self) -> bool:
        """Take over newer weights if there are any; True when there is something to act under."""
        view = self._sender.view
        weights = view.weights
        if view.control is None or weights is None or view.paced:
            return False
        if weights.version > self._actor.version and (not self._actor.needs_policy(weights) or self._policy_ready()):
            self._actor.adopt(weights)
        waiting = self._share.room(self._actor.version) == 0
        # Who waits for the next version looks for it often.
        self._sender.hurry(waiting)
        return self._actor.version > 0 and not waiting

    def _over(self) -> str | None:
        view = self._sender.view
        if view.failure is not None:
            raise view.failure
        if view.ended is not None:
            return view.ended
        return "run_stopped" if view.control is not None and view.control.stop else None

    def _wait(self, phase: Phase, report: Report) -> None:
        self._sender.wait(LOOK_UP_S)
        self._noted(phase, report)

    def _noted(self, phase: Phase, report: Report) -> None:
        """Waiting is progress only while the sender really tries."""
        attempts = self._sender.view.attempts
        if attempts != self._attempts:
            self._attempts = attempts
            self._progress(phase, report.env_steps)


__all__ = ["LOOK_UP_S", "Phase", "Report", "RolloutLoop"]
