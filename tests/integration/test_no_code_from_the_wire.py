"""Commands are JSON that names installed things; a message that would run code is refused, and the worker lives on."""

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawq.control.queues import KEY_PREFIX, lease_queue, make_queue

if TYPE_CHECKING:
    from tests.integration.conftest import Bench


class Bomb:
    """Writes a file as soon as it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_commands_travel_as_json(bench: "Bench") -> None:
    run = bench.run("sent")
    bench.lease(run)
    broker: Any = bench.sender.connection_for_write().default_channel.client
    message = json.loads(broker.lindex(KEY_PREFIX + lease_queue(run.run_id), 0))
    assert message["content-type"] == "application/json"
    assert message["headers"]["task"] == "clawq.rollout"


def test_a_pickled_command_is_refused_unread_and_the_worker_goes_on(bench: "Bench", tmp_path: Path) -> None:
    run = bench.run("bomb")
    worker = bench.worker()
    exploded = tmp_path / "exploded"
    body = pickle.dumps(((Bomb(exploded),), {"run_id": run.run_id, "seconds": 1.0}, {}))
    headers = {"lang": "py", "task": "clawq.rollout", "id": "b0", "root_id": "b0", "parent_id": None, "group": None}
    with bench.sender.connection_for_write() as connection, connection.Producer() as producer:
        queue = make_queue(lease_queue(run.run_id))
        wire = {"content_type": "application/x-python-serialize", "content_encoding": "binary"}
        producer.publish(
            body, headers=headers, routing_key=queue.name, exchange="", declare=[queue], correlation_id="b0", **wire
        )
    bench.wait_for(lambda: "b0" in worker.text() or "Refusing" in worker.text(), "the worker to get the message")
    bench.lease(run, 0.5)
    bench.wait_events(run, "lease")
    assert not exploded.exists()
    assert "Refusing to deserialize" in worker.text(), worker.text()
