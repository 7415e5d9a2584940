"""How old experience may be when the learner takes it.

Policy lag = the learner's weights version − the version under which a fragment was made. An off-policy learner can do
with any lag; the rule is for those that cannot. Nothing here is about time: a learner that stands still makes nothing
stale.
"""

from dataclasses import dataclass

from clawq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """Admit fragments up to a policy lag.

    Args:
        max_lag: largest lag admitted, in weights versions; 0 = any.
    """

    max_lag: int = 0

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ConfigError("actors", [f"max_policy_lag: {self.max_lag}; must be 0 (any lag) or more"])

    def admit(self, fragment_version: int, learner_version: int) -> bool:
        """May a fragment made under `fragment_version` still be used?

        Experience of untrained actors (version 0) is judged like any other. A version newer than the learner's own
        (a learner resumed from an older checkpoint) has no lag.
        """
        return self.max_lag == 0 or learner_version - fragment_version <= self.max_lag
