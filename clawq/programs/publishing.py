"""Publishing: the learner's weights on their way out, each under a version of its own.

The link sends them in a thread (`clawq.programs.link`), so publishing costs the loop one copy of the weights. Versions
only grow. What a new one means for learning (what is too old under it goes) is done here too, and recorded.
"""

import math
import time

from clawq.programs import learning
from clawq.programs.flow import FlowGauge
from clawq.programs.link import Outgoing
from clawq.programs.parts import Parts


class Publishing:
    """Publishes the weights of one learner.

    Args:
        parts: of the learner.
        flow: told when weights are published.

    Attributes:
        version: the newest.
        updates: how many updates the newest has behind it; -1 before the first.
    """

    def __init__(self, parts: Parts, flow: FlowGauge) -> None:
        self.version, self.updates = 0, -1
        self._parts, self._flow = parts, flow
        self._published_s = -math.inf

    def when_due(self, now_s: float) -> None:
        """Publish if it is time for that and there was an update since."""
        settings, updater = self._parts.config.learner, self._parts.updater
        if now_s - self._published_s >= settings.publish_interval_s and updater.updates > self.updates:
            self.publish()
            self._published_s = now_s

    def publish(self, wanted: str | None = None) -> int:
        """Hand the current weights to the link under the next version; returns it.

        Args:
            wanted: the label of an evaluation that needs this version: it is kept until the next one of that label.
        """
        parts, updater = self._parts, self._parts.updater
        self.version += 1
        parts.recorder.published(self.version)
        self._flow.published(time.monotonic())
        learning.advance(parts, self.version)
        self.updates = updater.updates
        arrays = {name: tensor.numpy() for name, tensor in updater.algorithm.weights().items()}
        metadata = {"env_steps": parts.intake.env_steps}
        pin = None if wanted is None else f"wanted-{wanted}"
        parts.link.publish(Outgoing(self.version, arrays, updater.updates, metadata, pin))
        parts.tempo.published(self.version)
        return self.version
