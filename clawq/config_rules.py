"""Rules between the fields of a configuration: settings that are each allowed, but cannot work together.

Each rule names the sections that it reads, so that it is checked even while other sections have mistakes, and answers
with what is wrong and what would happen. Rules are physics, not taste: nothing is refused here that could run.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from clawq.config import (
    Actors,
    Archive,
    Budget,
    Environment,
    Evaluation,
    Exploration,
    RateLimit,
    Redis,
    Replay,
    Source,
    Staleness,
    Sync,
)

#: Largest share of the data server's memory for streams: weights, control record and Redis itself need the rest.
STREAM_SHARE = 0.55

#: Largest policy lag that actors can be paced to, and that can be a limit, in weights versions.
MOST_TARGET, MOST_LAG = 1000, 1_000_000

_SCHEMES = ("redis://", "rediss://", "unix://")


class Rule(NamedTuple):
    """One rule: the sections it reads, and a function of them that yields mistakes."""

    reads: tuple[str, ...]
    check: Callable[..., Iterator[str]]


def broken_rules(sections: Mapping[str, Any]) -> list[str]:
    """The mistakes between the given sections (field of RunConfig -> its value); absent sections are not judged."""
    return [
        mistake
        for rule in RULES
        if all(name in sections for name in rule.reads)
        for mistake in rule.check(*(sections[name] for name in rule.reads))
    ]


def _noise(exploration: Exploration) -> Iterator[str]:
    if exploration.noise_min > exploration.noise_max:
        yield (
            f"exploration.noise_min: {exploration.noise_min:g} is above noise_max {exploration.noise_max:g}; "
            "the noise of the envs runs from min up to max"
        )


def _ring(environment: Environment, replay: Replay) -> Iterator[str]:
    if replay.batch_size > replay.capacity:
        yield (
            f"replay.batch_size: {replay.batch_size} is above replay.capacity {replay.capacity}; "
            "a batch is drawn from the rows of the ring"
        )
    if replay.capacity < 6 * environment.num_envs:
        # Of each env the step, the last observation of an episode that it ended, and the one after it.
        yield (
            f"replay.capacity: {replay.capacity} is below 6·environment.num_envs = {6 * environment.num_envs}; "
            "even a fragment of one step, with its last observations, must fit into half of the ring"
        )


def _first_update(replay: Replay, rate_limit: RateLimit) -> Iterator[str]:
    if rate_limit.min_size_to_sample > replay.capacity:
        yield (
            f"rate_limit.min_size_to_sample: {rate_limit.min_size_to_sample} is above replay.capacity "
            f"{replay.capacity}; the ring never holds that many env steps, so no update would ever be made"
        )


def _limiter(environment: Environment, replay: Replay, rate_limit: RateLimit) -> Iterator[str]:
    ratio, buffer = rate_limit.samples_per_insert, rate_limit.error_buffer
    if buffer is None:
        return
    if ratio is None:
        yield (
            "rate_limit.error_buffer: means nothing while samples_per_insert is null (fully asynchronous); "
            "set samples_per_insert, or remove error_buffer"
        )
        return
    # The limiter's own rule (clawq.replay.rate_limiter), for the smallest fragment that there can be: how long
    # fragments become is known only with the environment.
    least = max(replay.transitions, ratio * environment.num_envs)
    if buffer < least:
        yield (
            f"rate_limit.error_buffer: {buffer:g} is below max(batch_size, samples_per_insert·num_envs) = {least:g}; "
            "actors and learner would come to block each other (deadlock); null chooses a fitting value"
        )


def _staleness(staleness: Staleness) -> Iterator[str]:
    target, hard = staleness.target, staleness.hard
    if target is not None and target > MOST_TARGET:
        yield (
            f"staleness.target: {target} is above {MOST_TARGET} weights versions; experience waits for about a second "
            "at most anyway, so that actors would never be paced by it; null leaves it out"
        )
    if hard is not None and hard > MOST_LAG:
        yield (
            f"staleness.hard: {hard} is above {MOST_LAG} weights versions, which is more than a run publishes while "
            "its ring lives; null allows any lag"
        )
    if target is not None and hard is not None and target > hard and staleness.on_stale == "drop":
        yield (
            f"staleness.target: {target} is above staleness.hard {hard}; actors would be paced to a lag at which the "
            "learner drops what they make"
        )
    if staleness.on_stale == "reweight" and hard is None:
        yield "staleness.on_stale: reweight means nothing while staleness.hard is null; set staleness.hard"


def _rounds(sync: Sync) -> Iterator[str]:
    if sync.fragment_steps is not None and sync.fragment_steps > sync.quota_steps:
        yield (
            f"sync.fragment_steps: {sync.fragment_steps} is above quota_steps {sync.quota_steps}; "
            "an actor's quota of a round is cut into fragments, and null makes one of it"
        )
    if sync.deadline_s is None and sync.quorum < 1:
        yield (
            f"sync.quorum: {sync.quorum:g} means nothing while deadline_s is null (all actors are waited for); "
            "set deadline_s, or remove quorum"
        )
    if sync.deadline_s is not None and sync.quorum == 1:
        yield (
            "sync.deadline_s: means nothing while quorum is 1 (all actors are waited for); "
            "set a quorum below 1, or remove deadline_s"
        )


def _rounds_updates(rate_limit: RateLimit, sync: Sync) -> Iterator[str]:
    if rate_limit.samples_per_insert is None:
        yield (
            "rate_limit.samples_per_insert: null cannot work with sync; it decides how many updates follow each round "
            "(env steps of the round · samples_per_insert / batch_size)"
        )
    if rate_limit.error_buffer is not None:
        yield (
            "rate_limit.error_buffer: means nothing with sync, where the ratio is exact after every round; remove it"
        )


def _rounds_staleness(staleness: Staleness, sync: Sync) -> Iterator[str]:
    hard = staleness.hard
    if hard is not None and hard < sync.deterministic_lag and staleness.on_stale == "drop":
        yield (
            f"staleness.hard: {hard} is below sync.deterministic_lag {sync.deterministic_lag}; "
            "the learner would drop all that the actors make"
        )
    if staleness.target is not None:
        yield "staleness.target: means nothing with sync, where the lag is sync.deterministic_lag; remove it"


def _rounds_room(environment: Environment, replay: Replay, sync: Sync) -> Iterator[str]:
    round_steps = sync.actors * environment.num_envs * sync.quota_steps
    if 2 * round_steps > replay.capacity:
        yield (
            f"sync.quota_steps: a round has actors·num_envs·quota_steps = {round_steps} env steps, which is more than "
            f"half of replay.capacity {replay.capacity}; with the last observations a round could overwrite itself"
        )


def _rounds_actors(actors: Actors, sync: Sync) -> Iterator[str]:
    if sync.actors > actors.max_actors:
        yield (
            f"sync.actors: {sync.actors} is above actors.max_actors {actors.max_actors}; "
            "every round would wait for actors that never get a lease"
        )
    if actors.on_full != "block":
        yield (
            f"actors.on_full: {actors.on_full} cannot work with sync; a round would wait for ever for a fragment that "
            "was dropped; use block"
        )


def _fifo(replay: Replay, rate_limit: RateLimit) -> Iterator[str]:
    if replay.sampler != "fifo" or rate_limit.samples_per_insert is None:
        return
    if rate_limit.samples_per_insert != 1:
        yield (
            f"rate_limit.samples_per_insert: {rate_limit.samples_per_insert:g} cannot be kept with sampler: fifo, "
            "which draws each env step once; set 1 (actors wait for the learner), or null (they do not; what a slow "
            "learner does not get to is lost)"
        )
    if rate_limit.min_size_to_sample > replay.batch_size:
        yield (
            f"rate_limit.min_size_to_sample: {rate_limit.min_size_to_sample} is above replay.batch_size "
            f"{replay.batch_size}; with sampler: fifo those env steps would always be left waiting, and grow old"
        )


def _fifo_room(replay: Replay) -> Iterator[str]:
    if replay.sampler == "fifo" and 2 * replay.batch_size > replay.capacity:
        yield (
            f"replay.batch_size: {replay.batch_size} is more than half of replay.capacity {replay.capacity}; with "
            "sampler: fifo a whole batch must wait in the ring, and beside last observations and the next fragment so "
            "many may never do: no update would be made"
        )


def _sequence(replay: Replay) -> Iterator[str]:
    if replay.sampler != "sequence":
        return
    if replay.sequence.burn_in >= replay.sequence.length:
        yield (
            f"replay.sequence.burn_in: {replay.sequence.burn_in} is not below length {replay.sequence.length}; no step "
            "would be learned from"
        )
    if replay.n_step != 1:
        yield (
            f"replay.n_step: {replay.n_step} means nothing with sampler: sequence, which gives the reward and discount "
            "of each step; the algorithm adds them up. Set 1"
        )


def _sequence_staleness(replay: Replay, staleness: Staleness) -> Iterator[str]:
    if replay.sampler == "sequence" and staleness.on_stale == "reweight":
        yield (
            "staleness.on_stale: reweight cannot be used with sampler: sequence, whose steps have one importance "
            "weight in common; use drop"
        )


def _demonstrations(replay: Replay) -> Iterator[str]:
    if replay.demonstrations is None:
        return
    if replay.sampler in ("fifo", "sequence"):
        yield (
            f"replay.demonstrations: cannot be used with sampler: {replay.sampler}; demonstrations are off-policy "
            "transitions. Choose uniform or prioritized, or leave demonstrations out"
        )
    if replay.batch_size < 2:
        yield "replay.batch_size: 1 leaves no room for demonstrations beside the run's own experience"


def _hindsight(replay: Replay) -> Iterator[str]:
    if replay.hindsight is not None and replay.sampler in ("fifo", "sequence"):
        yield (
            f"replay.hindsight: cannot be used with sampler: {replay.sampler}; goals that were not pursued make "
            "off-policy transitions. Choose uniform or prioritized, or leave hindsight out"
        )


def _targets(budget: Budget, evaluation: Evaluation) -> Iterator[str]:
    if evaluation.interval_s is not None:
        return
    for name in ("target_return", "target_success"):
        if getattr(budget, name) is not None:
            yield f"budget.{name}: needs evaluations while training; set evaluation.interval_s"


def _urls(redis: Redis) -> Iterator[str]:
    for name in ("broker_url", "data_url"):
        url = getattr(redis, name)
        # The URL may hold a password: it is not repeated.
        if url is not None and not url.startswith(_SCHEMES):
            yield f"redis.{name}: must begin with one of {', '.join(_SCHEMES)}"


def _memory(redis: Redis) -> Iterator[str]:
    embedded = redis.broker_url is None and redis.data_url is None
    if redis.stream_bytes is None and not embedded:
        return  # somebody else's server: its memory is known only when it is asked
    most = int(redis.data_memory_mb * 1_000_000 * STREAM_SHARE)
    stream_bytes = most if redis.stream_bytes is None else redis.stream_bytes
    if embedded and stream_bytes > most:
        yield (
            f"redis.stream_bytes: {stream_bytes} is above {STREAM_SHARE:.0%} of redis.data_memory_mb "
            f"({most}); publishing weights must always find room"
        )
    if redis.window_bytes > stream_bytes:
        yield (
            f"redis.window_bytes: {redis.window_bytes} is above the stream budget {stream_bytes}; "
            "one slow learner would let a single actor fill the server"
        )


def _archive(archive: Archive) -> Iterator[str]:
    if archive.bytes is not None and archive.bytes < 2 * archive.segment_bytes:
        yield (
            f"archive.bytes: {archive.bytes} is below 2·archive.segment_bytes = {2 * archive.segment_bytes}; "
            "the oldest segments go whole, and one is always being written"
        )


def _source(source: Source | None, archive: Archive, sync: Sync | None, staleness: Staleness) -> Iterator[str]:
    if source is None:
        return
    if archive.enabled:
        yield "archive.enabled: a run with a source has no streams of its own to archive; the source may archive them"
    if sync is not None:
        yield "sync: rounds need actors of one's own; a run with a source has none"
    if staleness.target is not None or staleness.hard is not None:
        yield "staleness: a run with a source cannot count policy lag, since the weights versions are the source's"


RULES = (
    Rule(("source", "archive", "sync", "staleness"), _source),
    Rule(("exploration",), _noise),
    Rule(("environment", "replay"), _ring),
    Rule(("replay", "rate_limit"), _first_update),
    Rule(("environment", "replay", "rate_limit"), _limiter),
    Rule(("staleness",), _staleness),
    Rule(("sync",), _rounds),
    Rule(("rate_limit", "sync"), _rounds_updates),
    Rule(("environment", "replay", "sync"), _rounds_room),
    Rule(("staleness", "sync"), _rounds_staleness),
    Rule(("actors", "sync"), _rounds_actors),
    Rule(("replay", "rate_limit"), _fifo),
    Rule(("replay",), _fifo_room),
    Rule(("replay",), _sequence),
    Rule(("replay", "staleness"), _sequence_staleness),
    Rule(("replay",), _hindsight),
    Rule(("replay",), _demonstrations),
    Rule(("budget", "evaluation"), _targets),
    Rule(("redis",), _urls),
    Rule(("redis",), _memory),
    Rule(("archive",), _archive),
)


__all__ = ["RULES", "STREAM_SHARE", "Rule", "broken_rules"]
