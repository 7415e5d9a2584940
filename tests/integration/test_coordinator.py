"""A real coordinator beside real workers: leases keep coming, evaluations find their way, and nothing stays behind."""

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from clawq.control.coordinator import Coordinator
from clawq.control.queues import run_queues
from clawq.control.reconcile import ABSENT_S, ReportGone, SendEvaluation, SendLeases
from clawq.plugins import load
from clawq.specs import EnvSpec
from clawq.transport.claims import Claim
from clawq.transport.control import ControlRecord, Events, RunRecord
from clawq.transport.pins import Pins
from clawq.transport.weights import WeightsPublisher

if TYPE_CHECKING:
    from tests.integration.conftest import Bench


@pytest.fixture
def coordinators(bench: "Bench") -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def coordinate(bench: "Bench", run: RunRecord, started: list["subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "clawq.control.coordinator", run.run_id]
    with (bench.folder / "coordinator.log").open("ab") as log:
        process = subprocess.Popen(command, env=bench.env(), stdin=subprocess.PIPE, stderr=log, bufsize=0)
    started.append(process)
    assert process.stdin is not None
    process.stdin.write(b"begin\n")
    return process


def publish_td3(bench: "Bench", run: RunRecord, version: int) -> None:
    plugin = load("algorithms", "td3")
    algorithm = plugin.make_algorithm(EnvSpec.from_json(run.spec), plugin.Options(), "cpu", 0)
    arrays = {name: tensor.numpy() for name, tensor in algorithm.weights().items()}
    # Only the run's learner may publish; the bench took the claim when it made the run.
    bench.data.delete(run.keys.claim("learner"))
    claim = Claim.take(bench.data, run.keys.claim("learner"), "test", 600.0)
    WeightsPublisher(bench.data, run.keys, claim).publish(arrays, version, 0)


def waiting(bench: "Bench", run: RunRecord) -> int:
    with bench.sender.connection_for_write() as connection:
        channel: Any = connection.default_channel
        return sum(channel.queue_declare(queue=name).message_count for name in run_queues(run.run_id))


@pytest.mark.timeout(120)
def test_leases_keep_coming_and_an_evaluation_is_not_held_up_by_them(
    bench: "Bench", coordinators: list["subprocess.Popen[bytes]"]
) -> None:
    lease_s = 2.0
    run = bench.run("led", actors={"lease_s": lease_s})
    publish_td3(bench, run, 2)
    coordinator = coordinate(bench, run, coordinators)
    bench.wait_for(lambda: bench.queued(run) == 2, "two leases to wait for the first worker")
    worker = bench.worker()
    bench.wait_events(run, "lease", 1)
    assert bench.queued(run) <= 3
    wanted_at = time.monotonic()
    Events(bench.data, run.keys).append("evaluation_wanted", version=2, label="training", episodes=3)
    [begun] = bench.wait_events(run, "evaluation_started")
    # A thread is free at the latest when the lease at hand gets its slot.
    assert time.monotonic() - wanted_at < lease_s + 4.0
    [result] = bench.wait_events(run, "evaluation")
    assert (result.facts["version"], result.facts["label"], result.facts["episodes"]) == (2, "training", 3)
    assert result.facts["id"] == begun.facts["id"]
    assert np.isfinite(result.facts["mean_return"])
    # Between two leases of the same slot there is next to no pause: the fragments go on.
    bench.wait_events(run, "lease", 3)
    times_ms = [int(event.id.split("-")[0]) for event in bench.events(run, "lease") if event.facts["env_steps"]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times_ms)]
    assert min(gaps) < (lease_s + 1.0) * 1000
    # The run is over: actors end, no lease is left, and the coordinator ends with its parent.
    ControlRecord(bench.data, run.keys).request_stop()
    bench.wait_for(lambda: waiting(bench, run) == 0, "the queue to be emptied")
    bench.wait_for(lambda: not worker.actors(), "the actor to end")
    assert coordinator.stdin is not None
    coordinator.stdin.close()
    assert coordinator.wait(10.0) == 0
    assert worker.stop()[0] == 0
    assert bench.leftovers() == set()


def test_a_new_coordinator_knows_what_is_outstanding(
    bench: "Bench", coordinators: list["subprocess.Popen[bytes]"]
) -> None:
    run = bench.run("again")
    for version in (8, 9):
        Events(bench.data, run.keys).append("evaluation_wanted", version=version, label="training", episodes=1)
    first = coordinate(bench, run, coordinators)
    [superseded] = bench.wait_events(run, "evaluation_failed")
    assert (superseded.facts["version"], superseded.facts["reason"]) == (8, "superseded")
    first.kill()
    first.wait()
    # Version 9 is published only now: until then there was nothing to evaluate.
    publish_td3(bench, run, 9)
    coordinate(bench, run, coordinators)
    bench.wait_for(lambda: waiting(bench, run) - bench.queued(run) == 1, "the evaluation to be sent")
    assert Pins(bench.data, run.keys).all() == {"evaluation-training": 9}


def test_an_evaluation_whose_worker_is_gone_is_sent_again(bench: "Bench") -> None:
    run = bench.run("gone")
    publish_td3(bench, run, 2)
    coordinator, events = Coordinator(run, bench.broker_url, bench.data_url), Events(bench.data, run.keys)
    # What cannot be understood does not end the coordinator.
    events.append("evaluation_wanted", label="training")
    wanted = events.append("evaluation_wanted", version=2, label="final", episodes=1)
    coordinator.turn(0.0)
    # Given a worker that began, and has no heartbeat
    events.append("evaluation_started", id=wanted, label="final", version=2, worker="host-w1")
    assert coordinator.turn(1.0) == []
    [gone] = coordinator.turn(1.0 + ABSENT_S + 0.25)
    assert isinstance(gone, ReportGone)
    [again] = coordinator.turn(1.0 + ABSENT_S + 0.5)
    assert isinstance(again, SendEvaluation)
    assert waiting(bench, run) - bench.queued(run) == 2
    [failed] = bench.events(run, "evaluation_failed")
    assert failed.facts["id"] == wanted
    assert (failed.facts["reason"], failed.facts["error"]) == ("gone", "worker host-w1 is gone")


def test_a_run_that_is_not_registered_has_no_leases_until_it_is_again(
    bench: "Bench", coordinators: list["subprocess.Popen[bytes]"]
) -> None:
    run = bench.run("unknown")
    coordinator = coordinate(bench, run, coordinators)
    bench.wait_for(lambda: bench.queued(run) == 2, "leases")
    bench.registry.remove(run.run_id)
    bench.wait_for(lambda: bench.queued(run) == 0, "no leases")
    other = coordinate(bench, run, coordinators)
    assert other.wait(10.0) == 2
    assert "there is no run" in (bench.folder / "coordinator.log").read_text()
    bench.registry.add(run)
    bench.wait_for(lambda: bench.queued(run) == 2, "leases again")
    assert coordinator.stdin is not None
    coordinator.stdin.close()
    assert coordinator.wait(10.0) == 0
    assert waiting(bench, run) == 0


def test_the_queues_of_a_run_that_another_learner_took_over_are_left_alone(
    bench: "Bench", coordinators: list["subprocess.Popen[bytes]"]
) -> None:
    run = bench.run("taken")
    coordinator, beside = coordinate(bench, run, coordinators), Coordinator(run, bench.broker_url, bench.data_url)
    bench.wait_for(lambda: bench.queued(run) == 2, "leases")
    # Given that another learner has the run now, whose coordinator sent these leases
    bench.registry.add(replace(run, created_ms=run.created_ms + 1))
    # When the old one's coordinator ends
    assert coordinator.stdin is not None
    coordinator.stdin.close()
    assert coordinator.wait(10.0) == 0
    # Then the leases are still there
    assert waiting(bench, run) == 2
    # And one that goes on does nothing until the run is its own again.
    bench.drop_queued(run)
    assert [beside.turn(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)] == [[]] * 4
    bench.registry.add(run)
    assert beside.turn(4.0) == [SendLeases(2)]
    beside.empty_queues()
    assert waiting(bench, run) == 0


def test_a_coordinator_that_is_never_told_to_begin_sends_nothing_and_ends_with_its_stdin(bench: "Bench") -> None:
    run = bench.run("unborn")
    command = [sys.executable, "-m", "clawq.control.coordinator", run.run_id]
    process = subprocess.Popen(command, env=bench.env(), stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20.0) == 0
    assert waiting(bench, run) == 0
