"""Rules between the fields of a configuration: settings that are each allowed, but cannot work together.

Each rule names the sections that it reads, so that it is checked even while other sections have mistakes, and answers
with what is wrong and what would happen. Rules are physics, not taste: nothing is refused here that could run.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from clawq.config import Budget, Environment, Evaluation, Exploration, RateLimit, Redis, Replay, Staleness

#: Largest share of the data server's memory for streams: weights, control record and Redis itself need the rest.
STREAM_SHARE = 0.55

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
    if replay.capacity < 4 * environment.num_envs:
        yield (
            f"replay.capacity: {replay.capacity} is below 4·environment.num_envs = {4 * environment.num_envs}; "
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
    # One insert moves the error up by n·ratio, one batch moves it down by B; with less room than both there is an
    # error at which neither side may move, and the run would stand still for ever.
    least = (replay.batch_size + ratio * environment.num_envs) / 2
    if buffer < least:
        yield (
            f"rate_limit.error_buffer: {buffer:g} is below (batch_size + samples_per_insert·num_envs)/2 = {least:g}; "
            "actors and learner would come to block each other (deadlock); null chooses a fitting value"
        )


def _staleness(staleness: Staleness) -> Iterator[str]:
    target, hard = staleness.target, staleness.hard
    if target is not None and hard is not None and target > hard and staleness.on_stale == "drop":
        yield (
            f"staleness.target: {target} is above staleness.hard {hard}; actors would be paced to a lag at which the "
            "learner drops what they make"
        )
    if staleness.on_stale == "reweight" and hard is None:
        yield "staleness.on_stale: reweight means nothing while staleness.hard is null; set staleness.hard"


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


RULES = (
    Rule(("exploration",), _noise),
    Rule(("environment", "replay"), _ring),
    Rule(("replay", "rate_limit"), _first_update),
    Rule(("environment", "replay", "rate_limit"), _limiter),
    Rule(("staleness",), _staleness),
    Rule(("budget", "evaluation"), _targets),
    Rule(("redis",), _urls),
    Rule(("redis",), _memory),
)


__all__ = ["RULES", "STREAM_SHARE", "Rule", "broken_rules"]
