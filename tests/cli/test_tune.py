"""`clawq tune` beside a learner that does not answer."""

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from clawq.cli.tune import ask
from clawq.errors import ClawqError
from clawq.transport.control import Orders, RunRecord
from clawq.transport.keys import RunKeys


def test_a_change_that_nobody_answers_is_withdrawn(data_client: redis.Redis, run_keys: RunKeys) -> None:
    view: Any = SimpleNamespace(data=data_client)
    run = RunRecord("demo", run_keys.tag, learner={"host": "h1", "pid": 7})
    with pytest.raises(ClawqError, match=r"demo \(h1, pid 7\) did not answer within 0.2 s; the change is withdrawn"):
        ask(view, run, ("staleness.hard=9",), 0.2)
    wanted, withdrawn = Orders(data_client, run_keys).read()
    assert (wanted.kind, wanted.facts) == ("tune_wanted", {"set": ["staleness.hard=9"]})
    assert (withdrawn.kind, withdrawn.facts) == ("tune_withdrawn", {"id": wanted.id})
