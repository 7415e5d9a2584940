"""A follower beside the run that it follows, over real streams."""

from collections.abc import Callable
from typing import Any

from room import Room
from waiting import Until

from clawq.programs.audit import keep
from clawq.programs.following import Following, Source
from clawq.transport.control import ControlRecord, RunRecord, RunRegistry, delete_run
from clawq.transport.keys import RunKeys
from clawq.transport.readers import StreamReader
from clawq.transport.stream import StreamWriter


def test_while_its_source_waits_for_it_a_follower_is_asked_for_a_checkpoint(
    data_client: Any, broker_client: Any, run_keys: RunKeys
) -> None:
    registry, record = RunRegistry(broker_client), RunRecord(f"r-{run_keys.tag[:8]}", run_keys.tag, state="running")
    registry.add(record)
    control = ControlRecord(data_client, run_keys)
    control.write(stop=False, window_bytes=10**6, config_epoch=1)
    writer = StreamWriter.open(data_client, run_keys, "a", "w")
    for seq in (1, 2):
        writer.send(seq, b"x")
    writer.close()
    reader = StreamReader(data_client, run_keys, "b", required=True)
    while not reader.cursors().get("a", "").endswith("-2"):
        reader.read(0.1)
    following = Following(reader, Source(record.run_id, record.tag, "b", True), data_client, broker_client)
    try:
        following.tend({}, 0, {})
        assert following.look(0) == {"unread_fragments": 0.0}
        assert not following.pressed
        # When the actors of its source were told to stop, what it has not checkpointed is all that holds that up
        control.write(stop=True, window_bytes=10**6, config_epoch=1)
        following.look(0)
        assert following.pressed
        following.tend(reader.cursors(), 0, {})
        following.look(0)
        assert not following.pressed
        assert data_client.hget(run_keys.kept("b"), "a") == reader.cursors()["a"].encode()
        assert following.source_ended is None
    finally:
        reader.close()
        registry.remove(record.run_id)


def test_the_ledger_of_who_followed_a_run_balances_after_that_was_deleted(make_room: Callable[..., Room]) -> None:
    room = make_room()
    room.actor("a")
    trainer = room.trainer()
    trainer.train(Until(lambda: trainer.parts.updater.updates >= 3))
    trainer.parts.consumer.close()
    delete_run(room.data, room.keys)
    found = keep(room.data, room.keys, room.run.folder, trainer.parts.consumer, 0.0, "b")
    assert found is not None
    assert found.problems() == []
    assert found.sums["committed"] > 0
