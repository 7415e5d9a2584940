"""Commands are JSON that names installed things; a message that would run code is refused, and the worker lives on."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawq.control.celery_settings import send_command
from clawq.control.queues import lease_queue, make_queue, task_queue
from clawq.transport.keys import CELERY_PREFIX

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
    message = json.loads(broker.lindex(CELERY_PREFIX + lease_queue(run.run_id), 0))
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
    bench.wait_for(lambda: "is set aside" in worker.text(), "the worker to get the message")
    bench.lease(run, 0.5)
    bench.wait_events(run, "lease")
    assert not exploded.exists()
    assert "Refusing to deserialize untrusted content of type pickle" in worker.text(), worker.text()


def test_a_run_that_names_code_or_paths_gets_an_error_and_runs_nothing(bench: "Bench", tmp_path: Path) -> None:
    """Whoever can write to the broker may register a run: what it names must be installed, under that kind."""
    touched = tmp_path / "touched"
    names = ("os:system", "os.system", "clawq.cli.main:main", f"{tmp_path}/evil.py", "../../evil")
    # A slot for each: one whose actor failed to start waits before it tries again.
    bench.worker(slots=len(names))
    for name in names:
        run = bench.run("hostile")
        environment = {"name": name, "num_envs": 1, "options": {"cmd": f"touch {touched}"}}
        hostile = replace(run, config={**run.config, "environment": environment})
        bench.registry.add(hostile)
        bench.lease(run, 0.5)
        [event] = bench.wait_events(run, "actor_failed")
        assert event.facts["reason"] == "PluginNotFound", event.facts
        assert "no installed plugin" in event.facts["error"]
        bench.registry.remove(run.run_id)
    assert not touched.exists()


def test_a_recording_writes_and_reads_no_file_that_the_wire_names(bench: "Bench", tmp_path: Path) -> None:
    run = bench.run("recorded")
    worker = bench.worker()
    victim = tmp_path / "victim.gif"
    victim.write_text("mine")
    requests: list[dict[str, Any]] = [
        {"trained": 1, "out": str(victim)},
        {"trained": 1, "out": "../victim.gif"},
        {"trained": str(victim), "out": "x.gif"},
        {"trained": 1, "out": "x.gif", "data_url": "redis://elsewhere/0"},
        {"trained": 1, "out": "x.gif", "run": {"tag": "0" * 32}},
        {"trained": 1, "out": "worker.log"},
        {"trained": True, "out": "x.gif"},
    ]
    for request in requests:
        send_command(bench.sender, "clawq.record", task_queue(run.run_id), run_id=run.run_id, request=request)
    bench.wait_for(lambda: worker.text().count("clawq.record was refused") == len(requests), "all to be refused")
    assert victim.read_text() == "mine"
    assert worker.process.poll() is None


def test_commands_with_wrong_arguments_or_of_no_task_leave_the_worker_alive(bench: "Bench") -> None:
    run = bench.run("odd")
    worker = bench.worker()
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for name, arguments in (
        ("os.system", {"command": "true"}),
        ("clawq.rollout", {"run_id": ["x"], "seconds": 1}),
        ("clawq.rollout", {"run_id": "x" * 100_000, "seconds": 1}),
        ("clawq.rollout", {"nonsense": 1}),
        ("clawq.evaluate", {"run_id": run.run_id, "version": deep, "episodes": "many", "seed": None}),
        ("celery.backend_cleanup", {}),
    ):
        send_command(bench.sender, name, task_queue(run.run_id), **arguments)
    bench.lease(run, 0.5)
    bench.wait_events(run, "lease")
    assert worker.process.poll() is None
