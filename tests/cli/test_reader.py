"""`clawq reader` over real servers."""

import json

import pytest
import redis

from clawq.cli.main import run
from clawq.transport.control import Board, Events
from clawq.transport.keys import MOST_READERS, RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.registry import Readers


@pytest.fixture
def demo(registered: str, data_client: redis.Redis, run_keys: RunKeys) -> str:
    """A registered run with a required reader that is gone."""
    Readers(data_client, run_keys).enter("learner", True)
    reader = StreamReader(data_client, run_keys, "keeper", required=True)
    reader.read(0.0)
    reader.close()
    figures = {"reader/keeper/unread_bytes": 10.0, "reader/keeper/uncheckpointed_bytes": 2_000_000.0}
    Board(data_client, run_keys).write({**figures})
    return registered


def test_readers_are_listed_with_role_presence_and_what_they_have_to_do(
    demo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reader", "ls", demo]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("learner  required, since ")
    assert "keeper  required, since " in second
    assert "not there; 10 B unread, 2 MB not checkpointed" in second
    assert run(["reader", "ls", demo, "--json"]) == 0
    assert [record["name"] for record in json.loads(capsys.readouterr().out)] == ["learner", "keeper"]


def test_dropping_gives_up_the_claim_and_is_told_and_counted(
    demo: str, data_client: redis.Redis, run_keys: RunKeys, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_client.hget(run_keys.control, "required") == b"keeper,learner"
    assert run(["reader", "drop", demo, "keeper"]) == 0
    assert "dropped keeper; 2 MB that it had not checkpointed may be trimmed" in capsys.readouterr().out
    assert data_client.hget(run_keys.control, "required") == b"learner"
    [event] = Events(data_client, run_keys).read()
    assert (event.kind, event.facts["reader"], event.facts["required"]) == ("reader_dropped", "keeper", True)
    for name, words in (("keeper", "has no reader 'keeper'; there are learner"), ("learner", "cannot be dropped")):
        assert run(["reader", "drop", demo, name]) == 2
        assert words in capsys.readouterr().err


def test_a_dropped_reader_that_is_alive_learns_of_it(demo: str, data_client: redis.Redis, run_keys: RunKeys) -> None:
    from clawq.errors import ClaimLost

    reader = StreamReader(data_client, run_keys, "other")
    reader.read(0.0)
    assert run(["reader", "drop", demo, "other"]) == 0
    assert reader._presence.claim is not None
    reader._presence.claim.ttl_s = 0.0
    with pytest.raises(ClaimLost, match="reader other was dropped"):
        reader.beat()


def test_a_reader_whose_run_is_deleted_was_not_dropped(demo: str, data_client: redis.Redis, run_keys: RunKeys) -> None:
    reader = StreamReader(data_client, run_keys, "other")
    reader.read(0.0)
    assert reader._presence.claim is not None
    data_client.delete(run_keys.readers, reader._presence.claim.key)
    reader._presence.claim.ttl_s = 0.0
    reader.beat()


def test_readers_are_bounded(data_client: redis.Redis, run_keys: RunKeys) -> None:
    from clawq.errors import TransportError

    readers = Readers(data_client, run_keys)
    for number in range(MOST_READERS):
        readers.enter(f"r{number}", required=False)
    with pytest.raises(TransportError, match="which is the most; drop one"):
        readers.enter("one-more", required=False)
    readers.enter("r0", required=True)
