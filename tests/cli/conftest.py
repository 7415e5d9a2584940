"""What commands find in their environment."""

import pytest

from clawq.transport.server import EmbeddedRedis


@pytest.fixture
def named_servers(redis_servers: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> EmbeddedRedis:
    """The session's servers, named as a user names them."""
    monkeypatch.setenv("CLAWQ_BROKER_URL", redis_servers.broker_url)
    monkeypatch.setenv("CLAWQ_DATA_URL", redis_servers.data_url)
    return redis_servers
