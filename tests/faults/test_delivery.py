"""F8: calls to Redis that fail before, in the midst of and after what they do leave no trace in what is learned."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from chaos.interceptor import WAYS, Batch, Interceptor, at_random, class_of, parse
from lineage import PRIORITISED, Lineage, differences
from redis_process import RedisProcess

from clawq.programs.schedule import SCHEDULE_FILE, FragmentCommitted, read_schedule
from clawq.transport.client import connect

FRAGMENTS, SHARE = 60, 0.25


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path / "redis", aof=False)
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_F8_a_quarter_of_all_calls_fails_and_what_is_learned_is_the_same(tmp_path: Path, server: RedisProcess) -> None:
    wire = Interceptor(("127.0.0.1", server.port))
    fails, sends = at_random(Random(8), SHARE), at_random(Random(7), SHARE, "XADD")
    reading: list[bool] = []

    def judge(batch: Batch) -> str:
        # Who cannot even begin says so and ends; from the first reading on everything must be borne.
        reading.extend([True] if class_of(batch) == "XREAD" else [])
        return fails(batch) if reading else sends(batch)

    wire.judge = judge
    lineage = Lineage(tmp_path / "run", (server.url, f"redis://127.0.0.1:{wire.port}/0"), PRIORITISED, FRAGMENTS)
    try:
        sent = dict(wire.failed)
        assert {way for _, way in sent} == set(WAYS), sent
        status, words = lineage.call("learn", entries=FRAGMENTS)
        assert status == 0, words
        failed = {kind for kind, _ in wire.failed}
        assert {"XADD", "XREAD", "HSET"} <= failed, failed
        # The twin never touches Redis: it does what the schedule says, with the fragments as they were made.
        status, words = lineage.call("apply")
        assert status == 0, words
        learned, applied = (torch.load(lineage.run.folder / name) for name in ("learned.pt", "applied.pt"))
        assert list(differences(learned, applied)) == []
        assert learned["env_steps"] == lineage.steps
        records = read_schedule(lineage.run.folder / SCHEDULE_FILE)
        committed = [(r.slot, r.epoch, r.seq) for r in records if isinstance(r, FragmentCommitted)]
        assert len(committed) == len(set(committed)) == FRAGMENTS
    finally:
        lineage.close()
        wire.close()


def test_the_wire_fails_calls_in_the_way_that_it_says(server: RedisProcess) -> None:
    wire = Interceptor(("127.0.0.1", server.port))
    client = connect(f"redis://127.0.0.1:{wire.port}/0")
    for way, arrives in (("request", False), ("response", True), ("flight", False)):
        client.ping()
        wire.judge = lambda batch, way=way: way if class_of(batch) == "SET" else ""  # type: ignore[misc]
        with pytest.raises(Exception, match="onnection"):
            client.set(way, "x" * 200_000)
        wire.judge = lambda batch: ""
        assert bool(server.ask("EXISTS", way)) == arrives, way
    client.close()
    wire.close()


def test_batches_are_read_as_they_come() -> None:
    sent = b"*1\r\n$5\r\nMULTI\r\n*3\r\n$4\r\nHSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n*1\r\n$4\r\nEX"
    batch, size = parse(sent)
    assert batch == [[b"MULTI"], [b"HSET", b"k", b"\r\n"]]
    assert sent[size:] == b"*1\r\n$4\r\nEX"
    assert class_of(batch) == "HSET"
    assert parse(sent[size:]) == ([], 0)
