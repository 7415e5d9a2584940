"""One actor, whole: envs, policy, outbox, claim and rollout loop of one slot in one run.

It is built for the first lease and lives on between leases; `close` gives the slot back. Building goes from what fails
fastest to what takes longest: configuration, the slot's claim, the envs. The policy comes last, in the background.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from clawq import progress as shown
from clawq.acting.actor import Actor
from clawq.acting.adder import Adder, Limits, Origin
from clawq.acting.exploration import NoiseLadder
from clawq.acting.loop import Phase, Report, RolloutLoop
from clawq.acting.outbox import Outbox
from clawq.acting.quota import Endless, Quota, Share
from clawq.acting.seeds import actor_seed, env_seeds, noise_generator
from clawq.acting.sender import Pauses, Sender
from clawq.config import RunConfig
from clawq.core import VectorEnv
from clawq.errors import ClaimHeld, NoSeat, SpecMismatch, StoreFull, StoreUnavailable
from clawq.plugins import load
from clawq.programs.extras import extras_of
from clawq.programs.parent import LeaseOrder
from clawq.programs.policy_loader import PolicyLoader
from clawq.programs.provenance import provenance
from clawq.specs import EnvSpec
from clawq.transport.client import connect
from clawq.transport.codec import encode
from clawq.transport.control import ControlRecord
from clawq.transport.keys import RunKeys
from clawq.transport.seats import open_seat
from clawq.transport.stream import StreamWriter
from clawq.transport.weights import WeightsReader

log = logging.getLogger(__name__)

#: A slot is free again when its actor was silent for so long.
CLAIM_TTL_S = 8.0
#: How long a new actor waits for the claim of the one before it (which may have been killed) to run out.
CLAIM_PATIENCE_S = CLAIM_TTL_S + 4.0
#: Pause between two tries for a claim.
CLAIM_RETRY_S = 0.25
#: In rounds every actor waits for the next version at once: it looks this often, seconds.
ROUND_LOOK_S = 0.02
#: How long an actor that goes away may need to send what it has, seconds.
FLUSH_S = 5.0

Progress = Callable[[Phase, int], None]


class ActingSession:
    """An actor that is ready to act.

    Args:
        order: the lease for which it is built.
        progress: called after every piece of real progress.
        ended: whether the lease shall end early (asked while it waits for a seat).

    Raises:
        ClaimHeld: another actor has the slot and keeps it.
        NoSeat: the run goes by rounds, and all its seats were taken for as long as the lease lasts.
        SpecMismatch: this machine's environment is not the one that the learner knows.
        UserError: the environment or the algorithm cannot be made here.
    """

    def __init__(self, order: LeaseOrder, progress: Progress, ended: Callable[[], bool] = lambda: False) -> None:
        self.place = order.place
        config = RunConfig.model_validate(order.run["config"])
        spec = EnvSpec.from_json(order.run["spec"])
        client, keys = connect(order.data_url), RunKeys(str(order.run["tag"]))
        epochs, slot = [0], order.slot

        def open_slot() -> StreamWriter:
            writer = StreamWriter.open(client, keys, slot, order.worker, CLAIM_TTL_S, after_epoch=epochs[-1])
            epochs[0] = writer.epoch
            return writer

        sync = config.sync
        if sync is None:
            sink = _patiently(open_slot, progress)
        else:
            over = _lease_over(order, ControlRecord(client, keys), ended)
            sink = _seated(
                lambda: open_seat(client, keys, sync.seats, order.worker, CLAIM_TTL_S), over, progress, sync.actors
            )
            slot, epochs[0] = sink.slot, sink.epoch
        # Whom the watchdog must take it from, should this process hang.
        shown.mine().holds(f"slot:{slot}")
        outbox = Outbox(config.actors.outbox_fragments, config.actors.on_full)
        pauses = Pauses() if sync is None else Pauses(eager_s=ROUND_LOOK_S)
        self._sender = Sender(outbox, sink, open_slot, encode, WeightsReader(client, keys), pauses)
        self._sender.start()
        try:
            self._env = make_env(config, spec, config.environment.num_envs)
        except BaseException:
            self._sender.close()
            raise
        progress("start", 0)
        seed = actor_seed(config.seed, slot, sink.incarnation and sink.epoch)
        self._loader = PolicyLoader(config, spec)
        actor = Actor(_noise(config, self._env, seed), self._loader.get, explores=not extras_of(config, spec))
        origin = Origin(str(order.run["tag"]), order.worker, slot, seed, provenance(spec.name))
        seconds = config.actors.fragment_s if sync is None else math.inf
        # A ring takes no fragment that is larger than half of it.
        limits = Limits(seconds, config.actors.fragment_bytes, config.replay.capacity // 2)
        adder = self._adder = Adder(spec, self._env.num_envs, origin, limits)
        self._progress = progress
        self._loop = RolloutLoop(
            self._env, actor, adder, outbox, self._sender, self._on_progress, self._loader.ready, _share(config)
        )
        try:
            self._loop.reset(env_seeds(seed, self._env.num_envs))
        except BaseException:
            # Given back now, or this slot's next actor would wait for the claim to run out.
            self.close()
            raise

    def run(self, seconds: float, ended: Callable[[], bool], retiring: Callable[[], bool] = lambda: False) -> Report:
        """Act for so long, or until `ended`, or (between fragments) until `retiring`."""
        deadline_s = time.monotonic() + seconds

        def reason() -> str | None:
            if ended():
                return "ended"
            return "lease_over" if time.monotonic() >= deadline_s else None

        report = self._loop.run(reason, retiring)
        if report.reason == "ended":
            # The worker ends, and this actor with it.
            self._loop.flush(report)
        return report

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything was sent."""
        return self._sender.drain(timeout_s)

    @property
    def episodes(self) -> int:
        """Episodes that are under way in the envs."""
        return self._adder.unfinished

    def let_go(self) -> None:
        """Give the slot back; what was made and not sent yet is sent first, while the run goes on. Idempotent."""
        control = self._sender.view.control
        if control is not None and not control.stop:
            self._loop.flush(Report())
            self._sender.drain(FLUSH_S)
        self._sender.close()

    def close(self) -> None:
        """Let the slot go and close the envs."""
        self.let_go()
        self._env.close()

    def _on_progress(self, phase: Phase, env_steps: int) -> None:
        if phase == "step":
            # The envs are running: now is the time to import torch.
            self._loader.start()
        self._progress(phase, env_steps)


def make_env(config: RunConfig, spec: EnvSpec, num_envs: int) -> VectorEnv:
    """The run's environment, which must be what the learner knows.

    Raises:
        SpecMismatch: it is not.
    """
    plugin = load("environments", config.environment.name)
    env: VectorEnv = plugin.make(plugin.Options.model_validate(config.environment.options), num_envs)
    check_spec(env, spec)
    return env


def check_spec(env: VectorEnv, spec: EnvSpec) -> None:
    """SpecMismatch unless `env` is what `spec` says; closes it then."""
    if env.spec.fingerprint != spec.fingerprint:
        env.close()
        ours, theirs = env.spec.to_json(), spec.to_json()
        leaf = next((name for name in theirs if ours[name] != theirs[name]), "spec")
        raise SpecMismatch(f"environment {spec.name} on this machine: {leaf}", str(theirs[leaf]), str(ours[leaf]))


def _share(config: RunConfig) -> Share:
    """How much an actor collects under one weights version."""
    sync = config.sync
    return Endless() if sync is None else Quota(sync.quota_steps, sync.fragment_steps or sync.quota_steps)


def _noise(config: RunConfig, env: VectorEnv, seed: int) -> NoiseLadder:
    wanted = config.exploration
    shape, generator = (env.num_envs, env.spec.action.size), noise_generator(seed)
    return NoiseLadder(wanted.noise_min, wanted.noise_max, shape, generator, wanted.random_share, wanted.random_steps)


def _patiently(open_slot: Callable[[], Any], progress: Progress) -> Any:
    """Open the slot; waits while Redis is away, and for the claim of an actor that was killed to run out."""
    deadline_s = time.monotonic() + CLAIM_PATIENCE_S
    while True:
        try:
            return open_slot()
        except ClaimHeld as error:
            if time.monotonic() > deadline_s:
                raise
            log.info("%s; waiting for it", error)
        except (StoreUnavailable, StoreFull) as error:
            deadline_s = time.monotonic() + CLAIM_PATIENCE_S
            log.warning("%s; waiting for it", error)
        progress("wait", 0)
        time.sleep(CLAIM_RETRY_S)


def _lease_over(order: LeaseOrder, control: ControlRecord, ended: Callable[[], bool]) -> Callable[[], bool]:
    """A function that says whether the lease is over, or its run."""
    deadline_s = time.monotonic() + order.seconds

    def over() -> bool:
        if ended() or time.monotonic() >= deadline_s:
            return True
        try:
            known = control.read()
        except (StoreUnavailable, StoreFull):
            return False  # nobody knows
        return known is not None and known.stop

    return over


def _seated(
    open_first: Callable[[], StreamWriter], over: Callable[[], bool], progress: Progress, seats: int
) -> StreamWriter:
    """Take a free seat, or stand by until one is free; NoSeat when the lease is over."""
    while True:
        try:
            return open_first()
        except ClaimHeld:
            log.debug("no seat is free")
        except (StoreUnavailable, StoreFull) as error:
            log.warning("%s; waiting for it", error)
        progress("wait", 0)
        time.sleep(CLAIM_RETRY_S)
        if over():
            raise NoSeat(f"the {seats} seats of the run are taken (sync.actors)")
