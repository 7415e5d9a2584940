"""What a pool process does with a place that the watchdog has given up."""

from pathlib import Path

import pytest

from clawq.control.actor_process import Lease
from clawq.control.pool_process import Identity, PoolProcess
from clawq.control.settings import HostSettings
from clawq.control.shutdown import Shutdown
from clawq.registry import Registry
from clawq.spawning.failure import Failure


def test_R15_a_place_that_is_given_up_gets_no_actor_and_says_the_original_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWQ_STATE_DIR", str(tmp_path))
    settings = HostSettings.from_host({"CLAWQ_BROKER_URL": "unix:///b", "CLAWQ_STATE_DIR": str(tmp_path)})
    place = PoolProcess(Identity("w", 1, "threads", 2, settings, Shutdown()))
    Registry().prepare("ab" * 16)
    Registry().condemn("host-w-0", "it died 6 times; the last time: RuntimeError: no licence")
    lease = Lease({"tag": "ab" * 16, "config": {}}, "host-w-0", "host-w", "unix:///d", 1.0)
    with pytest.raises(Failure, match="RuntimeError: no licence") as caught:
        place._start_actor(lease)
    assert caught.value.kind == "given_up"
