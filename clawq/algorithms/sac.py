"""SAC (Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905): options and plugin.

Twin critics with targets, a squashed Gaussian policy, and a temperature alpha that is tuned so that the policy keeps a
given entropy. The policy samples where TD3's is perturbed: of the run's `exploration` only `random_share` counts.

This module is light, as `td3` is. The update is in `sac_learner`, the actor's side in `sac_policy`.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from clawq.algorithms.options import ActorCriticOptions
from clawq.specs import EnvSpec

if TYPE_CHECKING:
    from clawq.algorithms.sac_learner import Sac
    from clawq.algorithms.sac_policy import SacPolicy


class SacOptions(ActorCriticOptions):
    """Options of SAC, beside those of ActorCriticOptions.

    There is no `target_range`: values hold the entropy that is still to come, so no range of returns bounds them.

    Attributes:
        alpha: temperature at the start: what a unit of entropy is worth, in scaled rewards.
        lr_alpha: Adam's step size for log alpha; 0 = alpha stays as it is.
        target_entropy: entropy per step, in nats, to which alpha is tuned; null = −(number of actions).
    """

    alpha: Annotated[float, Field(gt=0, le=1000)] = 0.1
    lr_alpha: Annotated[float, Field(ge=0, le=1)] = 1e-3
    target_entropy: float | None = None


class SacPlugin:
    """Entry point `sac` of `clawq.algorithms`; implements core.AlgorithmPlugin."""

    Options = SacOptions

    def make_algorithm(self, spec: EnvSpec, options: Any, device: str, seed: int) -> "Sac":
        """The learner's side, on a torch device; the seed fixes initial weights and the actions drawn in updates."""
        from clawq.algorithms.sac_learner import Sac

        return Sac(spec, options, device, seed)

    def make_policy(self, spec: EnvSpec, options: Any) -> "SacPolicy":
        """The actor's side, on the CPU; `load` weights before the first action."""
        from clawq.algorithms.sac_policy import SacPolicy

        return SacPolicy(spec, options)


plugin = SacPlugin()
