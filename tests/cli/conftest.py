"""What commands find in their environment."""

import time
from collections.abc import Iterator

import pytest
import redis

from clawq.transport.control import RunRecord, RunRegistry
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis


@pytest.fixture
def named_servers(redis_servers: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> EmbeddedRedis:
    """The session's servers, named as a user names them."""
    monkeypatch.setenv("CLAWQ_BROKER_URL", redis_servers.broker_url)
    monkeypatch.setenv("CLAWQ_DATA_URL", redis_servers.data_url)
    return redis_servers


@pytest.fixture
def registered(named_servers: EmbeddedRedis, broker_client: redis.Redis, run_keys: RunKeys) -> Iterator[str]:
    """The id of a registered run, which begins now."""
    run_id, registry, now_ms = f"demo-{run_keys.tag[:8]}", RunRegistry(broker_client), int(time.time() * 1000)
    registry.add(RunRecord(run_id, run_keys.tag, state="running", created_ms=now_ms, learner={"host": "h1"}))
    yield run_id
    registry.remove(run_id)
