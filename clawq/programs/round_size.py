"""How large a round may be: its fragments stay in the streams until it is committed.

Not all of the streams' budget can hold one. What the learner has taken over may fill the room that is planned for it;
of what it has not, each slot may hold a window, whichever slot is fast (clawq.transport.trimming). So the seat that
comes last finds what the others have left of the room, and one window. A larger round would wait for ever.
"""

from clawq.amounts import bytes_text
from clawq.config import RunConfig, Sync
from clawq.errors import UserError
from clawq.programs.upkeep import fitting_window
from clawq.specs import EnvSpec
from clawq.transport.trimming import room

#: Reward and flags of one env step in a fragment, bytes; of a header with its columns; of an episode that ended.
ROW_SCALARS_BYTES, HEADER_BYTES, EPISODE_BYTES = 8, 2048, 64


def check_round(config: RunConfig, spec: EnvSpec, stream_bytes: int) -> None:
    """UserError if a round can never be whole: its fragments stay in the streams until it is committed.

    Args:
        config: of the run; it goes by rounds.
        spec: of the environment.
        stream_bytes: what the run's streams may hold.
    """
    assert config.sync is not None
    sync = config.sync
    fits = _largest_quota(config, sync, spec, stream_bytes)
    if sync.quota_steps > fits:
        needed = len(sync.seats) * _seat_bytes(config, sync, spec, sync.quota_steps)[0]
        at_most = f"At most sync.quota_steps={fits}" if fits else "No quota fits"
        holds = _round_room(config, sync, spec, stream_bytes)
        raise UserError(
            f"sync.quota_steps: a round of actors·num_envs·quota_steps env steps takes up to {bytes_text(needed)}; of "
            f"{bytes_text(stream_bytes)} of streams {bytes_text(holds)} can hold one, and its actors would wait for "
            f"ever for room. {at_most}; or raise redis.stream_bytes and redis.data_memory_mb"
        )


def _seat_bytes(config: RunConfig, sync: Sync, spec: EnvSpec, quota_steps: int) -> tuple[int, int]:
    """Bytes of what a seat brings in a round, and of its largest fragment; rather too many than too few."""
    envs, obs_bytes = config.environment.num_envs, sum(one.nbytes for one in spec.obs.values())
    step_bytes = envs * (obs_bytes + 4 * spec.action.size + ROW_SCALARS_BYTES)
    steps = min(quota_steps, sync.fragment_steps or quota_steps, config.actors.fragment_bytes // step_bytes + 1)
    # Beside its steps a fragment has one row of observations more, and the last ones of episodes that end in it.
    more = HEADER_BYTES + envs * (2 * obs_bytes + EPISODE_BYTES)
    return quota_steps * step_bytes + -(-quota_steps // steps) * more, steps * step_bytes + more


def _round_room(config: RunConfig, sync: Sync, spec: EnvSpec, stream_bytes: int) -> int:
    """Bytes of a round that fit into the streams, whichever of its seats are fast."""
    seats, largest = len(sync.seats), _seat_bytes(config, sync, spec, sync.quota_steps)[1]
    window = fitting_window(config.redis.window_bytes, stream_bytes, seats, largest)
    return room(stream_bytes, window, seats, largest) + window


def _largest_quota(config: RunConfig, sync: Sync, spec: EnvSpec, stream_bytes: int) -> int:
    """The largest `quota_steps`, up to the one that is asked for, with which a round fits; 0 = none."""
    low, high = 0, sync.quota_steps
    while low < high:
        quota = (low + high + 1) // 2
        trial = sync.model_copy(update={"quota_steps": quota})
        needed = len(sync.seats) * _seat_bytes(config, trial, spec, quota)[0]
        low, high = (quota, high) if needed <= _round_room(config, trial, spec, stream_bytes) else (low, quota - 1)
    return low


__all__ = ["check_round"]
