"""Does a configuration suit its algorithm and its environment? Asked before a run is registered; without torch.

What a configuration says by itself is judged when it is read (`clawq.config_rules`). This is what shows only once the
plugins are there and the environment has said what it is.
"""

from typing import Any

from clawq import plugins
from clawq.config import RunConfig
from clawq.core import OFF_POLICY, AlgorithmPlugin
from clawq.errors import UserError
from clawq.programs.demonstration_file import check_fitting
from clawq.programs.extras import extras_of
from clawq.replay.rowsize import forecast_bytes
from clawq.specs import EnvSpec

#: Steps of each env in a fragment that is ended by time (0.3 s of a hand simulator), with room to spare.
TYPICAL_STEPS = 32


def check_suitable(config: RunConfig, spec: EnvSpec) -> None:
    """UserError, with key, reason and what to do, if the run could not learn."""
    plugin: AlgorithmPlugin = plugins.load("algorithms", config.algorithm.name)
    check_sampler(config, plugin, largest_fragment_steps(config, spec))
    check_goals(config, spec)
    extras = extras_of(config, spec)
    if extras and config.replay.demonstrations is not None:
        raise UserError(
            f"replay.demonstrations: the algorithm {config.algorithm.name} needs {', '.join(extras)} of its own policy "
            "beside each action, which demonstrations do not have; leave them out"
        )
    check_fitting(config.replay, spec)


def check_sampler(config: RunConfig, plugin: AlgorithmPlugin, largest_insert: int) -> None:
    """UserError unless the algorithm learns from what the sampler gives, and the limiter lets it have that."""
    replay, buffer = config.replay, config.rate_limit.error_buffer
    fitting = tuple(getattr(plugin, "samplers", OFF_POLICY))
    if replay.sampler not in fitting:
        raise UserError(
            f"replay.sampler: {replay.sampler} does not fit the algorithm {config.algorithm.name}, which learns from "
            f"{' or '.join(fitting)}"
        )
    least = replay.batch_size + largest_insert
    if replay.sampler == "fifo" and buffer is not None and buffer < least:
        # With less, a rest that is smaller than a batch could keep the next fragment out.
        raise UserError(
            f"rate_limit.error_buffer: {buffer:g} is below batch_size {replay.batch_size} + {largest_insert} env steps "
            f"of a fragment; with sampler: fifo both sides could come to wait for each other. Set at least {least}, or "
            "null"
        )


def check_goals(config: RunConfig, spec: EnvSpec) -> None:
    """UserError if the configuration asks for hindsight and the environment has no goals."""
    plugin: Any = plugins.load("environments", config.environment.name)
    if config.replay.hindsight is not None and (not hasattr(plugin, "make_goals") or len(spec.goal_keys) != 2):
        raise UserError(
            f"replay.hindsight: {spec.name} has no goals (a goal environment shows `achieved_goal` and "
            "`desired_goal`, and its plugin has make_goals); leave replay.hindsight out"
        )


def largest_fragment_steps(config: RunConfig, spec: EnvSpec) -> int:
    """Env steps of a large fragment: what fills `actors.fragment_bytes`, but not more than TYPICAL_STEPS a side.

    A fragment is usually ended by time, long before its bytes; a limiter made for the largest possible one would be so
    loose that a short run never feels it. (Larger ones are let in as if they had this size.)
    """
    envs = config.environment.num_envs
    by_bytes = config.actors.fragment_bytes // (forecast_bytes(spec, 1) * envs) + 1
    return envs * min(by_bytes, TYPICAL_STEPS)


__all__ = ["check_goals", "check_sampler", "check_suitable", "largest_fragment_steps"]
