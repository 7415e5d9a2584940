"""TD3 (Fujimoto, van Hoof, Meger 2018, arXiv:1802.09477): options and plugin.

Twin critics, target networks, delayed policy updates and target smoothing; observation normalisation, gradient
clipping, a linear learning-rate decay and an average of the actor for publishing beside them. The recipe of parallel
off-policy actors with a ladder of noise is PQL's (Li et al. 2023, arXiv:2307.12983).

This module is light: torch is imported when an algorithm or a policy is made, so that a configuration can be checked
without it. The update is in `td3_learner`, the actor's side in `td3_policy`.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from clawq.algorithms.options import ActorCriticOptions
from clawq.config import Positive
from clawq.specs import EnvSpec

if TYPE_CHECKING:
    from clawq.algorithms.td3_learner import Td3
    from clawq.algorithms.td3_policy import Td3Policy


class Td3Options(ActorCriticOptions):
    """Options of TD3, beside those of ActorCriticOptions.

    Attributes:
        policy_delay: critic updates for each update of the policy and the targets.
        target_noise: standard deviation of the smoothing noise on target actions, in policy space.
        target_noise_clip: bound of that noise.
        target_range: (least, largest) target value, in scaled rewards; null = any. Where returns are known to lie
            within, as in [-1/(1-gamma), 0] for a reward of -1 until success, targets cannot run away (Andrychowicz et
            al. 2017).
        action_penalty: factor on the mean square of the policy's actions in its loss (same source; 0 = none).
    """

    policy_delay: Positive = 2
    target_noise: Annotated[float, Field(ge=0, le=2)] = 0.2
    target_noise_clip: Annotated[float, Field(ge=0, le=2)] = 0.5
    target_range: tuple[float, float] | None = None
    action_penalty: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("target_range")
    @classmethod
    def _ordered(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] >= bounds[1]:
            raise ValueError(f"the first number, {bounds[0]:g}, must be below the second, {bounds[1]:g}")
        return bounds


class Td3Plugin:
    """Entry point `td3` of `clawq.algorithms`; implements core.AlgorithmPlugin."""

    Options = Td3Options

    def make_algorithm(self, spec: EnvSpec, options: Any, device: str, seed: int) -> "Td3":
        """The learner's side, on a torch device; the seed fixes initial weights and smoothing noise."""
        from clawq.algorithms.td3_learner import Td3

        return Td3(spec, options, device, seed)

    def make_policy(self, spec: EnvSpec, options: Any) -> "Td3Policy":
        """The actor's side, on the CPU; `load` weights before the first `act`."""
        from clawq.algorithms.td3_policy import Td3Policy

        return Td3Policy(spec, options)


plugin = Td3Plugin()
