"""Tuning: a run's settings changed while it goes on, between two updates.

    CLI                                    learner's thread
    order tune_wanted {set: [key=value]} -> take: judged again, applied, kept in the run folder and the registry
    event tuned {id, changes} or tune_refused {id, mistakes} <- answered; tune_withdrawn {id}: the CLI waits no more

What learning depends on is changed by `apply` alone, from JSON-able facts, and is recorded in the learner's schedule:
a replay applies the same facts at the same place. Either all of a change takes effect, or nothing.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from clawq import plugins
from clawq.config import RunConfig
from clawq.config_file import parse_config
from clawq.config_live import Changes, changed, live_values
from clawq.config_yaml import set_key
from clawq.errors import ConfigError
from clawq.programs.parts import Parts, priority_schedules, staleness_rule
from clawq.replay.prioritized import PrioritizedSampler

#: The schedule's word for such a change.
KIND = "tune"


def take(parts: Parts, words: Any) -> Changes:
    """Change what `key=value` words say, in the parts and their configuration; each (old, new) value.

    Raises:
        ConfigError: with all mistakes; nothing was changed.
    """
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError("clawq tune", ["a list of key=value words is needed"])
    config, changes = changed(parts.config, words)
    if not changes:
        return changes
    _apply(parts, config, sorted(changes))
    # All that can be tuned, since an earlier session may have tuned other keys.
    parts.recorder.changed(KIND, {"keys": sorted(changes), "set": live_values(config)})
    if "redis.window_bytes" in changes:
        parts.link.allow(config.redis.window_bytes)
    parts.config = config
    return changes


def apply(parts: Parts, facts: Mapping[str, Any]) -> None:
    """Let learning go on under other settings, as the live learner did.

    Args:
        parts: with the configuration that the session began under.
        facts: `keys` (changed here) and `set` (key -> value of all that can be tuned, these included).
    """
    raw = tuned(parts.config.model_dump(mode="json"), facts)
    _apply(parts, parse_config(raw, "schedule"), facts["keys"])


def tuned(raw: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """A dumped configuration with the facts' values; a copy."""
    changed_raw = deepcopy(dict(raw))
    for key, value in facts["set"].items():
        set_key(changed_raw, key, value)
    return changed_raw


def _apply(parts: Parts, config: RunConfig, keys: list[str]) -> None:
    if any(key.startswith("algorithm.") for key in keys) and not hasattr(parts.updater.algorithm, "retune"):
        raise ConfigError("clawq tune", [f"algorithm.options: {config.algorithm.name} cannot be changed live"])
    # The limiter may refuse, so it comes first: nothing was changed then.
    for prefix, effect in _EFFECTS:
        if any(key.startswith(prefix) for key in keys):
            effect(parts, config)


def _limiter(parts: Parts, config: RunConfig) -> None:
    limit = config.rate_limit
    parts.limiter.retune(limit.samples_per_insert, limit.min_size_to_sample, limit.error_buffer, parts.ring.size)


def _algorithm(parts: Parts, config: RunConfig) -> None:
    algorithm: Any = parts.updater.algorithm
    algorithm.retune(plugins.load("algorithms", config.algorithm.name).Options.model_validate(config.algorithm.options))


def _priorities(parts: Parts, config: RunConfig) -> None:
    if isinstance(parts.sampler, PrioritizedSampler):
        parts.sampler.retune(*priority_schedules(config.replay), config.replay.prioritized.epsilon)


def _staleness(parts: Parts, config: RunConfig) -> None:
    parts.ageing.rule = parts.consumer.staleness = staleness_rule(config)


def _budget(parts: Parts, config: RunConfig) -> None:
    parts.budget.budget = config.budget


#: What follows from a change below each key; `publish_interval_s` and the like are read from the configuration.
_EFFECTS: tuple[tuple[str, Callable[[Parts, RunConfig], None]], ...] = (
    ("rate_limit.", _limiter),
    ("algorithm.options.", _algorithm),
    ("replay.prioritized.", _priorities),
    ("staleness.", _staleness),
    ("budget.", _budget),
)


__all__ = ["KIND", "apply", "take", "tuned"]
