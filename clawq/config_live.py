"""What of a configuration may be changed while its run goes on, and what to do about the rest.

`changed` reads `key=value` words as the command line does and judges the whole configuration anew, so a live change is
refused by the same rules, with the same words and all mistakes at once, as a file would be. It is pure: the command
asks it first, the learner asks it again, and only the learner changes anything (clawq.programs.tuning).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clawq.config import RunConfig
from clawq.config_file import nearest_key, parse_config
from clawq.config_yaml import Mistake, apply_overrides
from clawq.errors import ConfigError

#: Keys that may be changed live; one that ends in a dot stands for all keys below it.
LIVE = (
    "rate_limit.samples_per_insert",
    "rate_limit.min_size_to_sample",
    "rate_limit.error_buffer",
    "rate_limit.timeout_s",
    "staleness.",
    "redis.window_bytes",
    "actors.max_actors",
    "learner.publish_interval_s",
    "learner.checkpoint_interval_s",
    "evaluation.interval_s",
    "evaluation.episodes",
    "budget.",
    "replay.prioritized.",
    "algorithm.options.lr_actor",
    "algorithm.options.lr_critic",
    "algorithm.options.lr_alpha",
)
#: What the life of a run depends on: nobody can change it later.
_FIXED = ("environment", "name", "seed", "folder", "algorithm.name")

Changes = dict[str, tuple[Any, Any]]


def changed(config: RunConfig, words: Sequence[str]) -> tuple[RunConfig, Changes]:
    """The configuration with these `key=value` words, and of each key that differs its (old, new) value.

    Raises:
        ConfigError: with every mistake: unknown keys, keys that cannot be changed live, values that cannot work.
    """
    raw = config.model_dump(mode="json")
    mistakes = list(apply_overrides(raw, words))
    keys = [word.partition("=")[0] for word in words if "=" in word]
    mistakes += [mistake for key in keys for mistake in _not_live(config, key)]
    if mistakes:
        raise ConfigError("clawq tune", [str(mistake) for mistake in mistakes])
    wanted = parse_config(raw, "clawq tune")
    before, after = _leaves(config.model_dump(mode="json")), _leaves(wanted.model_dump(mode="json"))
    changes: Changes = {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}
    mistakes = list(_impossible_live(config, changes))
    if mistakes:
        raise ConfigError("clawq tune", [str(mistake) for mistake in mistakes])
    return wanted, changes


def is_live(key: str) -> bool:
    """May that key be changed while a run goes on?"""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in LIVE)


def live_values(config: RunConfig) -> dict[str, Any]:
    """Key -> value of everything that may be changed live."""
    return {key: value for key, value in _leaves(config.model_dump(mode="json")).items() if is_live(key)}


def _not_live(config: RunConfig, key: str) -> Iterator[Mistake]:
    if is_live(key):
        return
    unknown = nearest_key(key)
    if unknown is not None:
        yield Mistake(key, unknown)
    elif any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED):
        yield Mistake(key, "is fixed for the life of a run; start a new run for that")
    else:
        yield Mistake(
            key,
            "cannot be changed while the run goes on; stop it and go on with the change: "
            f"`clawq learner stop RUN`, then `clawq up --resume FOLDER {key}=VALUE` (live are: {', '.join(LIVE)})",
        )


def _impossible_live(config: RunConfig, changes: Changes) -> Iterator[Mistake]:
    """What a file may say, but a learner that runs cannot take over."""
    ratio = changes.get("rate_limit.samples_per_insert")
    if ratio is not None and None in ratio:
        yield Mistake(
            "rate_limit.samples_per_insert",
            "a limit cannot come or go while the run goes on; stop it and go on with --resume",
        )
    if config.sync is not None:
        for key in changes:
            if key.startswith(("rate_limit.", "staleness.")) and key != "rate_limit.timeout_s":
                yield Mistake(key, "the rounds of `sync` count on it; stop the run and go on with --resume")
    if config.replay.sampler == "fifo" and "rate_limit.error_buffer" in changes:
        yield Mistake("rate_limit.error_buffer", "with sampler: fifo it is judged only when the learner starts")
    if config.replay.sampler != "prioritized":
        for key in changes:
            if key.startswith("replay.prioritized."):
                yield Mistake(key, f"means nothing while replay.sampler is {config.replay.sampler}")


def _leaves(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Dotted key -> value, of all values that are no mappings."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{at}.{name}" if at else name
        found |= _leaves(value, key) if isinstance(value, Mapping) else {key: value}
    return found


__all__ = ["LIVE", "Changes", "changed", "is_live", "live_values"]
