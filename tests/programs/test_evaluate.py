import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from clawq.algorithms.td3 import plugin as td3
from clawq.core import Explorer
from clawq.errors import ActorFailed, WeightsCorrupt, WeightsGone
from clawq.programs.evaluate import evaluate, run_evaluation, summarise, weights_from_file
from clawq.testing.point import SPEED, PointOptions, point_spec
from clawq.testing.point import plugin as point
from clawq.testing.scripted import CountingEnv
from clawq.transport.claims import Claim
from clawq.transport.keys import RunKeys
from clawq.transport.server import EmbeddedRedis
from clawq.transport.weights import WeightsPublisher
from clawq.types import FloatArray, Obs

SPEC = point_spec(PointOptions())
CONFIG = {
    "name": "test",
    "environment": {"name": "point", "num_envs": 4},
    "algorithm": {"name": "td3", "options": {"hidden": [8, 8]}},
}


class Homing:
    """Goes straight to the goal, and does not explore."""

    def load(self, weights: object) -> None:
        pass

    def act(self, obs: Obs) -> FloatArray:
        return np.clip((obs["desired_goal"] - obs["observation"]) / np.float32(SPEED), -1, 1)

    def explore(self, obs: Obs, explorer: Explorer) -> tuple[FloatArray, Obs]:
        raise AssertionError("an evaluation does not explore")


def weights(seed: int = 0) -> dict[str, Any]:
    algorithm = td3.make_algorithm(SPEC, td3.Options(hidden=(8, 8)), "cpu", seed)
    return {name: value.numpy() for name, value in algorithm.weights().items()}


def request(redis_servers: EmbeddedRedis, keys: RunKeys, version: int, **more: Any) -> dict[str, Any]:
    run = {"id": "test", "tag": keys.tag, "config": CONFIG, "spec": SPEC.to_json()}
    return {"run": run, "data_url": redis_servers.data_url, "version": version, "episodes": 7, "seed": 100, **more}


def publisher(client: redis.Redis, keys: RunKeys) -> WeightsPublisher:
    return WeightsPublisher(client, keys, Claim.take(client, keys.claim("learner"), "test", 60.0))


def test_episode_i_starts_from_seed_plus_i_however_many_run_together() -> None:
    policy = Homing()
    alone = run_evaluation(point.make(PointOptions(), 1), policy, list(range(100, 107)))
    together = run_evaluation(point.make(PointOptions(), 3), policy, list(range(100, 107)))
    assert len(alone) == 7
    assert [r.episode_return for r in alone] == pytest.approx([r.episode_return for r in together], abs=1e-5)
    assert {r.length for r in alone} == {20}
    assert summarise(alone)["success"] == 1.0


def test_episodes_of_different_lengths_each_count_once() -> None:
    class Still(Homing):
        def act(self, obs: Obs) -> FloatArray:
            return np.zeros((3, 2), np.float32)

    results = run_evaluation(CountingEnv(3, lengths=(2, 7, 4)), Still(), [1, 2, 3, 4])
    assert [r.length for r in results] == [2, 7, 4, 2]
    assert [r.episode_return for r in results] == [3, 28, 10, 3]


def test_a_reward_that_is_not_finite_ends_the_evaluation() -> None:
    env = CountingEnv(1)
    env.break_at[0, 0, 2] = "reward"

    class Still(Homing):
        def act(self, obs: Obs) -> FloatArray:
            return np.zeros((1, 2), np.float32)

    with pytest.raises(ActorFailed, match="not finite"):
        run_evaluation(env, Still(), [1])


def test_success_is_null_where_nobody_reports_it() -> None:
    from clawq.programs.evaluate import EpisodeResult

    summary = summarise([EpisodeResult(1.0, 3, math.nan), EpisodeResult(3.0, 5, math.nan)])
    assert summary == {"mean_return": 2.0, "std_return": 1.0, "success": None, "mean_length": 4.0}


def test_the_program_answers_with_the_version_it_evaluated(
    redis_servers: EmbeddedRedis, data_client: redis.Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    publisher(data_client, run_keys).publish(weights(), 3, 40)
    asked = request(redis_servers, run_keys, 3, out=str(tmp_path / "answer.json"))
    done = subprocess.run(
        [sys.executable, "-m", "clawq.programs.evaluate"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=50,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert (answer["version"], answer["updates"], answer["episodes"], answer["mean_length"]) == (3, 40, 7, 20.0)
    assert answer["mean_return"] < 0
    assert answer["std_return"] > 0
    assert 0.0 <= answer["success"] <= 1.0
    assert json.loads((tmp_path / "answer.json").read_text()) == answer
    assert answer == {**evaluate(asked), "seconds": answer["seconds"]}


def test_C26_the_normaliser_is_that_of_the_version_that_was_asked_for(
    redis_servers: EmbeddedRedis, data_client: redis.Redis, run_keys: RunKeys
) -> None:
    # Given two versions that differ in nothing but their normaliser
    learner = publisher(data_client, run_keys)
    first = weights()
    shifted = {**first, "normaliser.mean": first["normaliser.mean"] + 3.0}
    learner.publish(first, 1, 10)
    learner.publish(shifted, 2, 10)
    answers = [evaluate(request(redis_servers, run_keys, version)) for version in (1, 2, 1)]
    # Then each is evaluated with its own, and again the same (a new evaluator starts from nothing every time)
    assert answers[0]["mean_return"] != answers[1]["mean_return"]
    assert answers[0]["mean_return"] == answers[2]["mean_return"]
    policy = td3.make_policy(SPEC, td3.Options(hidden=(8, 8)))
    policy.load(shifted)
    results = run_evaluation(point.make(PointOptions(), 7), policy, list(range(100, 107)))
    assert answers[1]["mean_return"] == pytest.approx(summarise(results)["mean_return"], abs=1e-5)


def test_a_version_that_is_gone_is_said_to_be_gone(redis_servers: EmbeddedRedis, run_keys: RunKeys) -> None:
    with pytest.raises(WeightsGone, match="77"):
        evaluate(request(redis_servers, run_keys, 77))


def test_weights_can_come_from_a_file(redis_servers: EmbeddedRedis, run_keys: RunKeys, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(weights(), tmp_path / "final.safetensors")
    answer = evaluate(request(redis_servers, run_keys, 0, weights=str(tmp_path / "final.safetensors")))
    assert answer["episodes"] == 7
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(WeightsCorrupt, match=r"bad\.safetensors"):
        weights_from_file(tmp_path / "bad.safetensors")
