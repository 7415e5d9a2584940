"""The options that TD3 and SAC share. Light: importing this loads no torch."""

from typing import Annotated

from pydantic import Field

from clawq.config import Fraction, Positive, Section

LearningRate = Annotated[float, Field(gt=0, le=1)]


class ActorCriticOptions(Section):
    """Options of an actor with twin critics. Discount, n-step and reward scale belong to the `replay` section.

    Attributes:
        hidden: widths of the hidden layers, of actor and critics.
        lr_actor: Adam's step size for the actor.
        lr_critic: for the critics.
        lr_final_fraction: share of the step sizes that is left at the end of the budget (linear decay); 1 = constant.
        tau: share of the online networks taken into the targets at each policy update.
        grad_clip: largest gradient norm (of each thing that is learned); null = no limit.
        normalize_obs: normalise observations by running statistics.
        obs_clip: bound of normalised observations, in standard deviations.
        average_decay: decay of the average of the actor that is published, per policy update; 0 = publish the actor.
        fast_matmul: let matrix products round their inputs (bfloat16 on CPUs with AMX or AVX512-BF16, TF32 on CUDA)
            and accumulate in float32; without such hardware it changes nothing.
    """

    hidden: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=8)] = (256, 256)
    lr_actor: LearningRate = 1e-3
    lr_critic: LearningRate = 1e-3
    lr_final_fraction: Fraction = 1.0
    tau: Annotated[float, Field(gt=0, le=1)] = 0.01
    grad_clip: Annotated[float, Field(gt=0)] | None = 10.0
    normalize_obs: bool = True
    obs_clip: Annotated[float, Field(gt=0)] = 5.0
    average_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    fast_matmul: bool = False
