"""A run's configuration: frozen, typed, strict.

A YAML file plus `key.path=value` overrides become one `RunConfig`. Defaults live here once; unknown keys are refused
with their path and the nearest valid name; all mistakes are reported at once. Nothing edits a config after it was
loaded. The options of an environment or an algorithm belong to its plugin, which validates them with its own model.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no nan or inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Environment(Section):
    """Which simulator, and how many copies in one actor.

    Attributes:
        name: environment plugin (`clawq plugins list`).
        num_envs: envs of one actor, N.
        options: the plugin's own options.
    """

    name: str
    num_envs: Positive = 16
    options: dict[str, Any] = Field(default_factory=dict)


class AlgorithmChoice(Section):
    """Which algorithm; `options` are the plugin's own."""

    name: str = "td3"
    options: dict[str, Any] = Field(default_factory=dict)


class Exploration(Section):
    """How actors explore. The noise is for policies that do not explore themselves (td3): sac samples its actions.

    Attributes:
        noise_min: standard deviation of the Gaussian noise in policy space of the least noisy env (the ladder runs
            evenly from env to env).
        noise_max: of the noisiest env.
        random_share: share of the actions that are uniform instead, in each env, whatever the policy.
        random_steps: for how many steps such an action is held, in the mean.
    """

    noise_min: Annotated[float, Field(ge=0, le=2)] = 0.05
    noise_max: Annotated[float, Field(ge=0, le=2)] = 0.4
    random_share: Fraction = 0.0
    random_steps: Annotated[float, Field(ge=1, le=1000)] = 1.0


class Recycle(Section):
    """When an actor gives way to a new one. It first sends all that it has; the episodes under way in it break off.

    Attributes:
        memory_mb: private memory of an actor, with all that it started; null = any. A host may set its own limit,
            CLAWQ_ACTOR_MEMORY_MB: the lower one holds.
        fragments: fragments that an actor makes at most (it is looked at when a lease ends); null = any number.
        cooldown_s: because of memory, an actor of the same slot goes at most once in so many seconds.
    """

    memory_mb: Annotated[int, Field(ge=64)] | None = None
    fragments: Positive | None = None
    cooldown_s: Annotated[float, Field(ge=1, le=86_400)] = 300.0


class Actors(Section):
    """How experience is collected.

    Attributes:
        max_actors: most actors that the coordinator keeps busy for this run, over all workers.
        lease_s: length of one rollout lease.
        fragment_s: an actor sends at least this often.
        fragment_bytes: and at the latest at this size (before the end of the step that passes it).
        outbox_fragments: fragments an actor holds when Redis is slow or away.
        on_full: what happens when the outbox is full; every drop is counted.
        recycle: when an actor gives way to a new one, for simulators that leak.
    """

    max_actors: Positive = 1000
    lease_s: Annotated[float, Field(ge=0.1, le=60)] = 5.0
    fragment_s: Annotated[float, Field(ge=0.01, le=10)] = 0.3
    fragment_bytes: Annotated[int, Field(ge=1024, le=4_000_000)] = 512_000
    outbox_fragments: Positive = 64
    on_full: Literal["block", "drop_oldest", "drop_newest"] = "block"
    recycle: Recycle = Recycle()


class Staleness(Section):
    """How old experience may be, in weights versions (policy lag = learner's version − fragment's).

    Attributes:
        target: lag at insertion that actors are paced to, so that nothing is wasted, 1..1000; null = none.
        hard: largest lag that the learner uses as it is, 0..1e6; null = any.
        on_stale: beyond `hard`: `drop` (refused, masked in the ring; counted) or `reweight` (importance weight
            times decay^(lag − hard)).
        decay: for `reweight`, between 0 and 1.
    """

    target: Positive | None = None
    hard: Annotated[int, Field(ge=0)] | None = None
    on_stale: Literal["drop", "reweight"] = "drop"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9


class Prioritized(Section):
    """Prioritised replay (Schaul et al. 2016); α and β move along a line from start to end of the budget.

    Attributes:
        alpha: how much priorities count at the start, in (0, 1].
        alpha_final: at the end; null = as at the start.
        beta: how much of the sampling bias is corrected at the start.
        beta_final: at the end.
        epsilon: priority of a row without TD error, 1e-12 to 1e6 (priorities are float32).
    """

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    alpha_final: Annotated[float, Field(gt=0, le=1)] | None = None
    beta: Fraction = 0.4
    beta_final: Fraction = 1.0
    epsilon: Annotated[float, Field(ge=1e-12, le=1e6)] = 1e-6


class Fifo(Section):
    """Consume-once sampling for on-policy algorithms: oldest first, each env step once (see clawq.replay.fifo).

    Attributes:
        shuffle: draw a batch at random from all env steps that wait.
    """

    shuffle: bool = False


class Sequence(Section):
    """Sequences for recurrent policies (see clawq.replay.sequences); a batch has `batch_size` of them.

    Attributes:
        length: steps of a sequence, L.
        burn_in: of these, steps at the beginning that only warm up the recurrent state.
    """

    length: Annotated[int, Field(ge=1, le=1000)] = 32
    burn_in: Annotated[int, Field(ge=0, lt=1000)] = 0


class Hindsight(Section):
    """Hindsight experience replay (Andrychowicz et al. 2017), for goal environments.

    Attributes:
        strategy: goals achieved later in the episode (`future`), at its end (`final`) or anywhere in it (`episode`).
        k: relabelled rows for each row that keeps its goal.
    """

    strategy: Literal["future", "final", "episode"] = "future"
    k: Positive = 4


class Demonstrations(Section):
    """Episodes from a file, of which every batch has a share beside the run's own experience (RLPD, Ball et al. 2023).

    Attributes:
        path: HDF5 file or Minari dataset, read where the learner starts.
        share: of each batch; rounded to whole rows, at least one of either kind.
    """

    path: Annotated[str, Field(min_length=1)]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5


class Replay(Section):
    """The replay ring and what is sampled from it.

    Attributes:
        capacity: env steps kept in the ring.
        sampler: `uniform`, `prioritized`, `fifo` (on-policy) or `sequence` (recurrent); the algorithm must fit.
        prioritized: numbers of that sampler.
        fifo: options of that sampler.
        sequence: options of that sampler.
        hindsight: goals that were reached are learned from too; null = off.
        demonstrations: episodes that batches are mixed with; null = none.
        batch_size: transitions (or sequences) of one update, B.
        n_step: n of n-step returns.
        gamma: discount of one env step.
        reward_scale: factor on rewards when sampled (raw rewards travel and are reported).
    """

    capacity: Positive = 500_000
    sampler: Literal["uniform", "prioritized", "fifo", "sequence"] = "uniform"
    prioritized: Prioritized = Prioritized()
    fifo: Fifo = Fifo()
    sequence: Sequence = Sequence()
    hindsight: Hindsight | None = None
    demonstrations: Demonstrations | None = None
    batch_size: Positive = 256
    n_step: Annotated[int, Field(ge=1, le=100)] = 1
    gamma: Fraction = 0.99
    reward_scale: Annotated[float, Field(gt=0)] = 1.0

    @property
    def demonstrated(self) -> int:
        """Rows of each batch that are demonstrations."""
        if self.demonstrations is None:
            return 0
        # Half up, unlike `round`: of 5 rows a share of one half is 3.
        return min(max(int(self.batch_size * self.demonstrations.share + 0.5), 1), self.batch_size - 1)

    @property
    def drawn(self) -> int:
        """Rows (or sequences) of each batch that are the run's own experience."""
        return self.batch_size - self.demonstrated

    @property
    def transitions(self) -> int:
        """Transitions of the run's own that one update learns from; a sequence counts as whole, however short it is."""
        if self.sampler == "sequence":
            return self.drawn * (self.sequence.length - self.sequence.burn_in)
        return self.drawn


class RateLimit(Section):
    """How many times each env step is sampled (Reverb's SampleToInsertRatio).

    Attributes:
        samples_per_insert: transitions sampled for each env step inserted (updates·batch_size / env steps);
            null = fully asynchronous, neither side waits.
        min_size_to_sample: env steps in the ring before the first update.
        error_buffer: how far inserts·samples_per_insert may run from samples; null = chosen from the sizes.
        timeout_s: a side that is blocked for so long is reported.
    """

    samples_per_insert: Annotated[float, Field(gt=0)] | None = None
    min_size_to_sample: Positive = 2_000
    error_buffer: Annotated[float, Field(gt=0)] | None = None
    timeout_s: Seconds = 300.0


class Sync(Section):
    """Rounds: all actors collect the same quota under one weights version, then wait for the next one.

    The data used is then exactly `deterministic_lag` versions old, each round is followed by exactly the updates that
    `rate_limit.samples_per_insert` calls for, and with the same seed and configuration (and a budget in env steps, on
    the same kind of CPU) two runs give the same weights bit for bit, as long as no actor fails.
    `learner.publish_interval_s` and `actors.fragment_s` mean nothing then.

    Attributes:
        actors: how many take part. They hold numbered seats; actors beyond these stand by, and take over a free seat.
        quota_steps: steps of each env in one round, for each actor (a round has actors·num_envs·quota_steps env steps).
        fragment_steps: steps of each env in one fragment (fewer at the quota's end, or where `fragment_bytes` is
            reached); null = the whole quota.
        deterministic_lag: 0 = the learner trains on a round before the next one begins: they take turns. 1 = actors
            collect the next round while the learner trains on this one, and neither waits for the other.
        deadline_s: so long after a round began it may go on with a `quorum`; null = all are waited for.
        quorum: share of the round's env steps that is enough then.
    """

    actors: Annotated[int, Field(ge=1, le=1000)]
    quota_steps: Positive
    fragment_steps: Positive | None = None
    deterministic_lag: Literal[0, 1] = 1
    deadline_s: Seconds | None = None
    quorum: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def seats(self) -> tuple[str, ...]:
        """Names of the seats, which are those of their streams, in the order in which a round is committed."""
        return tuple(f"seat-{index:03d}" for index in range(self.actors))


class Learner(Section):
    """The learner daemon.

    Attributes:
        device: `auto` (first CUDA device, else CPU), `cpu` or `cuda:i`.
        publish_interval_s: new weights are published at most this often.
        keep_weights: versions kept in Redis beside pinned ones.
        checkpoint_interval_s: time between checkpoints.
        keep_checkpoints: newest checkpoints kept; the best one is kept beside them.
        snapshot: whether checkpoints hold the replay ring too; `auto` = if the streams cannot hold all of it, or end
            with the run because Redis is clawq's own.
        max_non_finite: non-finite updates in a row after which the learner gives up.
        wait_for_readers_s: a finished run keeps its streams until its required readers have checkpointed them; it gives
            up when none of them got on for so long; null = never, 0 = it does not wait.
    """

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\d+)$")] = "auto"
    publish_interval_s: Seconds = 1.0
    keep_weights: Annotated[int, Field(ge=3)] = 3
    checkpoint_interval_s: Seconds = 60.0
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    snapshot: Literal["auto", "always", "never"] = "auto"
    max_non_finite: Positive = 3
    wait_for_readers_s: Annotated[float, Field(ge=0)] | None = 600.0


class Budget(Section):
    """When a run ends: whichever comes first. Null = no such limit.

    Attributes:
        env_steps: env steps inserted.
        seconds: wall time from the first env step.
        target_return: mean evaluation return that is good enough.
        target_success: evaluation success rate that is good enough.
    """

    env_steps: Positive | None = None
    seconds: Seconds | None = None
    target_return: float | None = None
    target_success: Fraction | None = None


class Evaluation(Section):
    """Evaluation with the deterministic policy on fixed seeds.

    Attributes:
        interval_s: time between evaluations while training; null = only at the end.
        episodes: episodes of each.
        final_episodes: episodes of the last one, of the final weights.
        seed: seed of the first evaluation episode (never the training seeds).
        timeout_s: an evaluation that takes longer is given up.
    """

    interval_s: Seconds | None = 60.0
    episodes: Positive = 20
    final_episodes: Positive = 50
    seed: Annotated[int, Field(ge=0)] = 1_000_000
    timeout_s: Seconds = 300.0


class Redis(Section):
    """Where Redis is. With no URL clawq starts its own two servers and stops them with the run.

    Attributes:
        broker_url: Celery and run specs; `redis://`, `rediss://` or `unix://`.
        data_url: streams, weights, control record, metrics.
        data_memory_mb: maxmemory of the embedded data server.
        window_bytes: unread bytes in one slot's stream at which its actor waits.
        stream_bytes: most bytes that the streams of a run keep; null = 55 % of the data server's memory.
    """

    broker_url: str | None = None
    data_url: str | None = None
    data_memory_mb: Annotated[int, Field(ge=64)] = 1024
    window_bytes: Annotated[int, Field(ge=65_536)] = 1_000_000
    stream_bytes: Annotated[int, Field(ge=1_000_000)] | None = None


class Source(Section):
    """Another run, from whose experience this one learns: it has no actors of its own.

    Attributes:
        run: id of that run, on the same Redis.
        reader: the name under which it is followed; null = this run's id.
        required: that run's streams and actors wait for this learner; else it is told what it came too late for.
    """

    run: Annotated[str, Field(min_length=1)]
    reader: str | None = None
    required: bool = False


class Archive(Section):
    """The streams on disk too, so that the log can be larger than memory and outlive Redis.

    Attributes:
        enabled: off by default; a run writes as much as its actors send.
        folder: where archives are kept, each in a folder named after its run; null = in the run folder.
        segment_bytes: size at which a segment file is full.
        bytes: most bytes of a run's archive, the oldest segments go; null = no bound.
        compression: `zstd` (what does not get smaller is stored as it is) or `none`.
        on_full: when the disk refuses and the streams have reached their budget: `gap` lets them be trimmed, and what
            went is missing from the archive and counted; `block` keeps it, and actors are held back.
    """

    enabled: bool = False
    folder: str | None = None
    segment_bytes: Annotated[int, Field(ge=1_000_000, le=4_000_000_000)] = 64_000_000
    bytes: Positive | None = None
    compression: Literal["zstd", "none"] = "zstd"
    on_full: Literal["gap", "block"] = "gap"


class Cores(Section):
    """Who gets how many cores on this machine; null = chosen from what the process may use (see clawq.cores).

    Attributes:
        learner_threads: torch threads of the learner.
        slots: actors on this machine's worker.
        actor_threads: torch and BLAS threads of one actor.
    """

    learner_threads: Positive | None = None
    slots: Positive | None = None
    actor_threads: Positive | None = None


class Watchdog(Section):
    """When a process of this run counts as hung or leaking; the watchdog of its machine then ends it (clawq.watchdog).

    Times are seconds without *progress*. An actor's own worker acts first, the watchdog 10 s later.

    Attributes:
        start_s: an actor: imports, and making the environment and the policy.
        reset_s: a reset, and the first step after it (which may compile).
        step_s: between two env steps.
        send_s: sending, or waiting for the learner.
        learner_s: the learner, between two rounds of its loop.
        leak_mb_per_h: growth of an actor's own memory over ten minutes (for a limit see actors.recycle.memory_mb).
    """

    start_s: Seconds = 180.0
    reset_s: Seconds = 120.0
    step_s: Seconds = 30.0
    send_s: Seconds = 60.0
    learner_s: Seconds = 600.0
    leak_mb_per_h: Annotated[float, Field(gt=0)] = 500.0

    @property
    def actor_limits(self) -> dict[str, float]:
        """What an actor is registered with (see `clawq.registry.Record.limits`)."""
        times = {"exec": self.start_s, "start": self.start_s, "reset": self.reset_s, "step": self.step_s}
        return {**times, "send": self.send_s, "wait": self.send_s, "leak_mb_per_h": self.leak_mb_per_h}

    @property
    def learner_limits(self) -> dict[str, float]:
        """What a learner is registered with; its start and its finish may take any time."""
        return {"step": self.learner_s, "leak_mb_per_h": self.leak_mb_per_h}


class Record(Section):
    """The picture at the end.

    Attributes:
        animation: make the animation of the trained beside the untrained policy.
        episodes: episodes shown.
        format: gif, or mp4 (needs the `video` extra).
    """

    animation: bool = True
    episodes: Positive = 3
    format: Literal["gif", "mp4"] = "gif"


class RunConfig(Section):
    """One run, whole.

    Attributes:
        name: of the run, for people; the run id is made from it and the start time.
        seed: of everything; every env of every actor derives its own from it.
        folder: where run folders go.
        metrics: metric writer plugins.
        sync: actors and learner go by rounds; null = fully asynchronous.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$")]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    folder: str = "runs"
    metrics: tuple[str, ...] = ("jsonl", "tensorboard")
    environment: Environment
    algorithm: AlgorithmChoice = AlgorithmChoice()
    exploration: Exploration = Exploration()
    actors: Actors = Actors()
    replay: Replay = Replay()
    rate_limit: RateLimit = RateLimit()
    staleness: Staleness = Staleness()
    sync: Sync | None = None
    learner: Learner = Learner()
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    source: Source | None = None
    redis: Redis = Redis()
    archive: Archive = Archive()
    cores: Cores = Cores()
    watchdog: Watchdog = Watchdog()
    record: Record = Record()
