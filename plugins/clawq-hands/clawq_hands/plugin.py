"""The environment plugin `gymnasium`: any registered Gymnasium environment, the robot hands among them.

    environment:
      name: gymnasium
      num_envs: 16
      options: {id: HandReachDense-v3}

Gymnasium-Robotics is imported only when its id is asked for; its announcements are kept out of the logs. An id names
an installed environment, never code: Gymnasium's `module:id` form is refused.
"""

import contextlib
import difflib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from clawq.core import GoalReward, RenderedEnv, VectorEnv
from clawq.errors import UserError
from clawq_hands.rendering import draw_headless, draw_nothing

log = logging.getLogger(__name__)


class GymnasiumOptions(BaseModel):
    """Which environment.

    Attributes:
        id: a registered id, as `HandReachDense-v3`, `AdroitHandDoor-v1`, `FetchReachDense-v4`, `Reacher-v5`.
        kwargs: passed to the environment's constructor.
        max_episode_steps: another time limit than the registered one.
        policy_keys: observations that the policy sees; empty = chosen from the space.
        critic_keys: observations that the critic sees; empty = as the policy.
        width: of drawn pictures, pixels.
        height: of drawn pictures, pixels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[\w./-]+$")]
    kwargs: dict[str, Any] = Field(default_factory=dict)
    max_episode_steps: Annotated[int, Field(gt=0)] | None = None
    policy_keys: tuple[str, ...] = ()
    critic_keys: tuple[str, ...] = ()
    width: Annotated[int, Field(ge=64, le=1920)] = 320
    height: Annotated[int, Field(ge=64, le=1920)] = 320


class GymnasiumPlugin:
    """See `clawq.core.EnvironmentPlugin`."""

    Options = GymnasiumOptions

    def make(self, options: GymnasiumOptions, num_envs: int) -> VectorEnv:
        """N envs, with no rendering.

        Raises:
            UserError: an unknown id (the nearest ones are named), or an env that cannot be built.
            UnsupportedSpace: spaces that clawq cannot carry.
        """
        draw_nothing()
        from clawq_hands.vector import GymnasiumVector

        envs = [_make(options) for _ in range(num_envs)]
        return GymnasiumVector(envs, _spec(options, envs[0]))

    def make_rendered(self, options: GymnasiumOptions) -> RenderedEnv:
        """One env that can be drawn, headless; in a process of its own.

        Raises:
            UserError: as `make`, or nothing can be drawn on this machine.
        """
        draw_headless()
        from clawq_hands.vector import RenderedGymnasium

        env = _make(options, render_mode="rgb_array", size=(options.width, options.height))
        return RenderedGymnasium([env], _spec(options, env))

    def make_goals(self, options: GymnasiumOptions) -> GoalReward:
        """The rewards of a goal environment.

        Raises:
            UserError: as `make`, or it is no goal environment.
        """
        draw_nothing()
        from clawq_hands.goals import GymnasiumGoals

        return GymnasiumGoals(_make(options))


def _make(options: GymnasiumOptions, render_mode: str | None = None, size: tuple[int, int] | None = None) -> Any:
    import gymnasium

    _require_registered(options.id)
    kwargs = dict(options.kwargs)
    if options.max_episode_steps is not None:
        kwargs["max_episode_steps"] = options.max_episode_steps
    if size is not None and _is_mujoco(options.id):
        kwargs.setdefault("width", size[0])
        kwargs.setdefault("height", size[1])
    try:
        with _quiet():
            env = gymnasium.make(options.id, render_mode=render_mode, disable_env_checker=True, **kwargs)
    except Exception as error:  # a constructor may raise anything; whatever it is, this environment cannot be used
        raise UserError(f"gymnasium cannot make {options.id}: {type(error).__name__}: {error}") from error
    _log_mujoco_warnings()
    return env


def _spec(options: GymnasiumOptions, env: Any) -> Any:
    from clawq_hands.spaces import describe, spec_name

    limit = env.spec.max_episode_steps if env.spec is not None else None
    name = spec_name(options.id, options.kwargs)
    spaces = (env.observation_space, env.action_space)
    return describe(name, *spaces, limit or 0, options.policy_keys, options.critic_keys)


def _require_registered(env_id: str) -> None:
    import gymnasium

    if env_id not in gymnasium.registry:
        _import_robotics()
    if env_id not in gymnasium.registry:
        near = difflib.get_close_matches(env_id, list(gymnasium.registry), n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UserError(f"no Gymnasium environment is registered as {env_id!r}{hint}")


def _import_robotics() -> None:
    """Register the robot environments, without the announcements that the package prints when imported."""
    from farama_notifications import notifications  # type: ignore[import-untyped]

    notifications.pop("gymnasium_robotics", None)
    with _quiet():
        import gymnasium_robotics  # noqa: F401


def _is_mujoco(env_id: str) -> bool:
    """Only MuJoCo environments take a picture size."""
    import gymnasium

    entry_point = str(gymnasium.registry[env_id].entry_point)
    return "mujoco" in entry_point or "gymnasium_robotics" in entry_point


def _log_mujoco_warnings() -> None:
    """MuJoCo would write its warnings to MUJOCO_LOG.TXT in whatever folder we are; a log line is enough."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None:
        mujoco.set_mju_user_warning(lambda text: log.warning("MuJoCo: %s", text))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Gymnasium's advice (old versions, precision of Boxes) says nothing that a run could act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"gymnasium")
        yield


plugin = GymnasiumPlugin()

__all__ = ["GymnasiumOptions", "GymnasiumPlugin", "plugin"]
