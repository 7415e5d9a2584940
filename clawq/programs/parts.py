"""The parts of a learner, as one value, and how they are put together; used by trainer, gauges and finish.

They know the outside (streams, weights, events) only by the four things in `Outside`, so that a learner over Redis and
one over the in-process twin of the transport (ops/bench/twin.py) are the same but for these.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clawq import plugins
from clawq.config import Replay, RunConfig
from clawq.core import AlgorithmPlugin, Entry, FragmentSource, GoalReward
from clawq.errors import UserError
from clawq.programs.budget import BudgetMeter
from clawq.programs.checkpoint import Checkpoints
from clawq.programs.demonstrations import Demonstrations, load_demonstrations
from clawq.programs.extras import extras_of
from clawq.programs.intake import Intake
from clawq.programs.link import Link
from clawq.programs.quarantine import QUARANTINE_FILE, Quarantine
from clawq.programs.recorder import Recorder
from clawq.programs.ring_snapshots import open_snapshots
from clawq.programs.round_size import check_round
from clawq.programs.run import Run
from clawq.programs.schedule import SCHEDULE_FILE
from clawq.programs.suitability import check_goals, check_sampler, largest_fragment_steps
from clawq.programs.tempo import Tempo, make_tempo, terms_of
from clawq.programs.updater import Updater
from clawq.replay.batches import Batches, Gathers
from clawq.replay.consumer import Consumer
from clawq.replay.fifo import FifoSampler
from clawq.replay.hindsight import Hindsight
from clawq.replay.mixed import Draws, Mixed
from clawq.replay.nstep import Gatherer
from clawq.replay.prioritized import PrioritizedSampler, Schedule
from clawq.replay.rate_limiter import Unlimited, make_limiter
from clawq.replay.returns import Returns
from clawq.replay.ring import ReplayRing
from clawq.replay.round_limiter import RoundLimiter
from clawq.replay.rounds import Rounds, RoundSupply
from clawq.replay.samplers import Sampler, UniformSampler
from clawq.replay.sequences import SequenceGatherer, Sequences
from clawq.replay.snapshot_writer import SnapshotWriter
from clawq.replay.staleness import Ageing, StalenessRule
from clawq.replay.validation import Examiner, FragmentCheck
from clawq.transport.codec import decode


@dataclass(frozen=True, slots=True)
class Outside:
    """What a learner's parts are joined to.

    Attributes:
        source: of fragments.
        link: where weights and notices go.
        dead_letter: keeps (entry, reason, detail) of a faulty entry.
        version: gives the learner's weights version now.
    """

    source: FragmentSource
    link: Link
    dead_letter: Callable[[Entry, str, str], None]
    version: Callable[[], int]


@dataclass(slots=True)
class Parts:
    """What a trainer works with; `config` is what it is now, a live change replaces it (clawq.programs.tuning)."""

    config: RunConfig
    consumer: Consumer
    ring: ReplayRing
    sampler: Sampler
    batches: Draws
    demonstrations: Demonstrations | None
    limiter: Unlimited
    ageing: Ageing
    intake: Intake
    updater: Updater
    link: Link
    checkpoints: Checkpoints
    snapshots: SnapshotWriter | None
    recorder: Recorder
    budget: BudgetMeter
    tempo: Tempo
    quarantine: Quarantine


def make_parts(
    run: Run,
    device: str,
    outside: Outside,
    consumed: Mapping[str, Any] | None = None,
    admit: Callable[[int], None] = lambda weights_bytes: None,
) -> Parts:
    """Put a learner together.

    Args:
        run: whose learner.
        device: torch device of networks and ring.
        outside: see Outside.
        consumed: state of the consumer in a checkpoint; None = begin with the streams.
        admit: told how large the algorithm's state is, before the ring is made; raises if the ring would not fit.
    """
    config = run.config
    plugin: AlgorithmPlugin = plugins.load("algorithms", config.algorithm.name)
    options = plugin.Options.model_validate(config.algorithm.options)
    algorithm = plugin.make_algorithm(run.spec, options, device, config.seed)
    replay = config.replay
    admit(state_bytes(algorithm.state_dict()))
    ring = ReplayRing(run.spec, replay.capacity, device, extras_of(config, run.spec))
    generator = torch.Generator().manual_seed(config.seed)
    check_sampler(config, plugin, largest_fragment_steps(run.config, run.spec))
    limiter = limiter_of(run)
    sampler = make_sampler(replay, ring, generator, limiter)
    if sampler.wants_td_error and getattr(algorithm, "td_error", None) is None:
        raise UserError(
            f"replay.sampler: {replay.sampler} needs TD errors, which the algorithm {config.algorithm.name} does not "
            "have; choose sampler: uniform"
        )
    # Of sequences even one batch is large.
    most = 1 if replay.sampler == "sequence" else None
    own = Batches(ring, sampler, replay.drawn, make_gatherer(config, ring, generator), most)
    demonstrations = make_demonstrations(run, device)
    rule = staleness_rule(config)
    consumer = Consumer(
        outside.source,
        make_examiner(run),
        rule,
        outside.version,
        outside.dead_letter,
        state=consumed,
        staged_bytes=config.redis.window_bytes,
    )
    recorder = Recorder(run.folder / SCHEDULE_FILE)
    supply = None
    if config.sync is not None:
        check_round(config, run.spec, outside.link.stream_budget_bytes)
        supply = RoundSupply(consumer, Rounds(terms_of(config.sync, config.environment.num_envs)))
    quarantine = Quarantine(run.folder / QUARANTINE_FILE, ring, limiter, consumer, recorder)
    intake = Intake(consumer, ring, limiter, algorithm, recorder, supply, quarantine.refuses)
    budget = BudgetMeter(config.budget)
    return Parts(
        config=config,
        consumer=consumer,
        ring=ring,
        sampler=sampler,
        batches=own if demonstrations is None else Mixed(own, demonstrations.batches),
        demonstrations=demonstrations,
        limiter=limiter,
        ageing=Ageing(ring, limiter, rule),
        intake=intake,
        updater=Updater(algorithm, run.folder / "nonfinite", config.learner.max_non_finite),
        link=outside.link,
        checkpoints=Checkpoints(run.checkpoints, config.learner.keep_checkpoints),
        snapshots=open_snapshots(run, ring, outside.link.stream_budget_bytes),
        recorder=recorder,
        budget=budget,
        tempo=make_tempo(config, supply, intake, budget, outside.link),
        quarantine=quarantine,
    )


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(map(state_bytes, state.values()))
    return sum(map(state_bytes, state)) if isinstance(state, list | tuple) else 0


def limiter_of(run: Run) -> Unlimited:
    """The rate limiter that the configuration asks for."""
    limit, batch_size = run.config.rate_limit, run.config.replay.transitions
    if run.config.sync is not None and limit.samples_per_insert is not None:
        on_policy = run.config.replay.sampler == "fifo"
        return RoundLimiter(limit.samples_per_insert, limit.min_size_to_sample, batch_size, on_policy)
    return make_limiter(
        limit.samples_per_insert,
        limit.min_size_to_sample,
        limit.error_buffer,
        batch_size,
        largest_fragment_steps(run.config, run.spec),
    )


def staleness_rule(config: RunConfig) -> StalenessRule:
    """The staleness contract of a configuration."""
    wanted = config.staleness
    return StalenessRule(wanted.target, wanted.hard, wanted.on_stale, wanted.decay)


def make_sampler(replay: Replay, ring: ReplayRing, generator: torch.Generator, limiter: Unlimited) -> Sampler:
    """The sampler that the configuration names, for a ring that is still empty."""
    if replay.sampler in ("uniform", "sequence"):
        return UniformSampler(ring, generator)
    if replay.sampler == "fifo":
        return FifoSampler(ring, generator, replay.fifo.shuffle, limiter.excuse)
    return PrioritizedSampler(ring, generator, *priority_schedules(replay), replay.prioritized.epsilon)


def priority_schedules(replay: Replay) -> tuple[Schedule, Schedule]:
    """How alpha and beta of prioritised replay move along the budget."""
    wanted = replay.prioritized
    alpha = Schedule(wanted.alpha, wanted.alpha if wanted.alpha_final is None else wanted.alpha_final)
    return alpha, Schedule(wanted.beta, wanted.beta_final)


def make_gatherer(config: RunConfig, ring: ReplayRing, generator: torch.Generator) -> Callable[[], Gathers]:
    """What makes batches of rows of that ring."""
    replay = config.replay
    if replay.sampler == "sequence":
        wanted = replay.sequence
        sequences = Sequences(wanted.length, wanted.burn_in, replay.gamma, replay.reward_scale)
        return lambda: SequenceGatherer(ring, sequences)
    hindsight = make_hindsight(config, ring, generator)
    return lambda: Gatherer(ring, replay.drawn, returns_of(replay), hindsight)


def make_demonstrations(run: Run, device: str) -> Demonstrations | None:
    """The demonstrations that the configuration names, read and checked."""
    replay = run.config.replay
    if replay.demonstrations is None:
        return None
    return load_demonstrations(replay, run.spec, returns_of(replay), device, run.config.seed + 1)


def make_hindsight(config: RunConfig, ring: ReplayRing, generator: torch.Generator) -> Hindsight | None:
    """Hindsight, if the configuration asks for it; UserError if the environment has no goals."""
    environment, replay, wanted = config.environment, config.replay, config.replay.hindsight
    if wanted is None:
        return None
    check_goals(config, ring.spec)
    plugin = plugins.load("environments", environment.name)
    goals: GoalReward = plugin.make_goals(plugin.Options.model_validate(environment.options))
    return Hindsight(ring, goals, wanted.strategy, wanted.k, returns_of(replay), generator)


def returns_of(replay: Replay) -> Returns:
    """What the configuration says of returns."""
    return Returns(replay.n_step, replay.gamma, replay.reward_scale)


def make_examiner(run: Run) -> Examiner:
    """Decodes and checks the fragments of a run."""
    return Examiner(decode, FragmentCheck(run.spec, run.follows or run.tag, extras_of(run.config, run.spec)))
