import pytest

from clawq.errors import ConfigError
from clawq.replay.staleness import StalenessRule


@pytest.mark.parametrize(
    ("max_lag", "fragment", "learner", "admitted"),
    [
        pytest.param(0, 0, 10**6, True, id="any_lag"),
        pytest.param(3, 7, 10, True, id="at_the_limit"),
        pytest.param(3, 6, 10, False, id="one_over"),
        pytest.param(3, 12, 10, True, id="newer_than_a_resumed_learner"),
        pytest.param(3, 0, 3, True, id="untrained_but_near"),
        pytest.param(3, 0, 4, False, id="untrained_and_far"),
    ],
)
def test_fragments_are_admitted_up_to_the_lag(max_lag: int, fragment: int, learner: int, admitted: bool) -> None:
    assert StalenessRule(max_lag).admit(fragment, learner) is admitted


def test_a_negative_lag_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_policy_lag: -1"):
        StalenessRule(-1)
