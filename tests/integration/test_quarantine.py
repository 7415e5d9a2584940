"""A worker is quarantined while its run goes on: real processes, and an algorithm that notes what it was shown."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from books import assert_books_balance
from cluster import POINT, Cluster

Eventually = Callable[..., None]
#: An environment whose worker shows in its observations, and TD3 that notes which of them every batch showed.
MODULE = """
import json, os
import numpy as np
from clawq.algorithms.td3 import Td3Plugin
from clawq.testing.point import PointEnv, PointPlugin

class Marked(PointEnv):
    def _obs(self):
        obs = super()._obs()
        obs["achieved_goal"][:, 0] = float(os.environ.get("MARK", "0"))
        return obs

class MarkedPlugin(PointPlugin):
    def make(self, options, num_envs):
        return Marked(options, num_envs)

class NotingPlugin(Td3Plugin):
    def make_algorithm(self, spec, options, device, seed):
        from clawq.algorithms.td3_learner import Td3
        out = open(os.environ["NOTES"], "a", buffering=1)

        class Noting(Td3):
            def step(self, batch, progress):
                marks = np.unique(batch.obs["achieved_goal"][:, 0].numpy()).tolist()
                out.write(json.dumps(marks) + "\\n")
                return super().step(batch, progress)

        return Noting(spec, options, device, seed)

marked, noting = MarkedPlugin(), NotingPlugin()
"""
ENTRY_POINTS = "[clawq.environments]\nmarked = marking:marked\n\n[clawq.algorithms]\nnoting = marking:noting\n"
GOOD, BAD = 1.0, 2.0


class Lab(Cluster):
    """A cluster with a learner and workers that have the plugins."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        site = folder / "site"
        metadata = site / "marking-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / "marking.py").write_text(MODULE)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: marking\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
        self.notes = folder / "notes.jsonl"
        self.home.env["PYTHONPATH"] = f"{site}:{self.home.env.get('PYTHONPATH', '')}"
        self.home.env["NOTES"] = str(self.notes)

    def batches(self) -> list[list[float]]:
        """Which marks each batch has shown so far."""
        lines = self.notes.read_text().splitlines(keepends=True) if self.notes.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def worker(self, mark: float) -> None:
        self.home.start("worker", "start", "--slots", "1", "--name", f"w{mark:g}", MARK=str(mark))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_the_experience_of_a_quarantined_worker_is_never_sampled_again_and_the_other_goes_on(
    lab: Lab, eventually: Eventually, sampler: str
) -> None:
    names = ("environment.name=marked", "algorithm.name=noting", f"replay.sampler={sampler}", "budget={}")
    quick = ("evaluation.interval_s=null", "evaluation.final_episodes=2", "record.animation=false")
    lab.home.start("learner", "start", POINT, f"folder={lab.home.runs}", *names, *quick, "--run", "r1")
    lab.worker(GOOD)
    lab.worker(BAD)
    eventually(lambda: [GOOD, BAD] in lab.batches()[-20:], "batches with rows of both workers", 120)
    record = lab.registry.get("r1")
    assert record is not None
    slots = {name.decode(): json.loads(text) for name, text in lab.data.hgetall(record.keys.slots).items()}
    [bad] = [slot for slot in slots if "w2" in slot]

    # A worker is called as the fragments call it
    asked = lab.home.call("log", "quarantine", "r1", "--worker", "nobody")
    assert asked.status == 0, asked.output
    workers = asked.output.partition("nearest: ")[2].partition(". The rule stands")[0].split(", ")
    [worker] = [name for name in workers if "w2" in name]
    told = lab.home.call("log", "quarantine", "r1", "--worker", worker, "--reason", "upside down")
    answered = len(lab.batches())
    assert told.status == 0, told.output
    assert "quarantine 2: " in told.output
    assert " 0 env steps" not in told.output

    # From the answer on no batch shows one of its rows, though it goes on sending
    refused = lab.number("r1", "rejected/quarantined")
    eventually(lambda: lab.number("r1", "rejected/quarantined") > refused + 5, "later fragments are refused", 120)
    eventually(lambda: len(lab.batches()) > answered + 200, "updates from the other worker", 120)
    assert {mark for marks in lab.batches()[answered:] for mark in marks} == {GOOD}
    listed = lab.home.call("log", "quarantine", "r1", "--list").output
    assert f"worker {worker}" in listed
    assert "in force  upside down" in listed
    assert lab.home.call("log", "quarantine", "r1", "--lift", "9").status == 2

    # Lifted, it is learned from again
    lifted = lab.home.call("log", "quarantine", "r1", "--lift", "2")
    assert "what was masked stays masked" in lifted.output
    eventually(lambda: any(BAD in marks for marks in lab.batches()[-50:]), "its new rows in batches", 120)
    assert lab.home.call("learner", "stop", "r1").status == 0
    counts = assert_books_balance(lab.data, record.keys, lab.home.runs / "r1")
    assert counts["rejected"]["quarantined"] > 0
    assert bad
