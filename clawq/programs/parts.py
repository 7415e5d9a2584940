"""The parts of a learner, as one value: put together by `programs.learner`, used by trainer, gauges and finish."""

from dataclasses import dataclass

from clawq.config import RunConfig
from clawq.programs.budget import BudgetMeter
from clawq.programs.checkpoint import Checkpoints
from clawq.programs.intake import Intake
from clawq.programs.link import Link
from clawq.programs.updater import Updater
from clawq.replay.consumer import Consumer
from clawq.replay.rate_limiter import Unlimited
from clawq.replay.ring import ReplayRing
from clawq.replay.samplers import UniformSampler


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trainer works with."""

    config: RunConfig
    consumer: Consumer
    ring: ReplayRing
    sampler: UniformSampler
    limiter: Unlimited
    intake: Intake
    updater: Updater
    link: Link
    checkpoints: Checkpoints
    budget: BudgetMeter
