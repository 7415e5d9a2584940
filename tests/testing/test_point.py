"""The point environment keeps the VectorEnv contract, and can be solved."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clawq.core import RenderedEnv, StepResult, VectorEnv
from clawq.plugins import load
from clawq.testing.faults import FaultPlan
from clawq.testing.point import PointEnv, PointOptions
from clawq.types import FloatArray, Obs


def towards_goal(env: PointEnv, obs: Obs) -> FloatArray:
    move = np.clip((obs["desired_goal"] - obs["achieved_goal"]) / 0.2, -1.0, 1.0).astype(np.float32)
    return env.spec.action.to_env(move)


def roll(env: PointEnv, seeds: list[int], steps: int) -> tuple[Obs, list[StepResult]]:
    first = obs = env.reset(seeds)
    results = []
    for _ in range(steps):
        results.append(env.step(towards_goal(env, obs)))
        obs = results[-1].obs
    return first, results


def test_it_is_an_environment_and_comes_in_by_its_entry_point() -> None:
    plugin = load("environments", "point")
    env: VectorEnv = plugin.make(plugin.Options(), 3)
    drawn: RenderedEnv = plugin.make_rendered(plugin.Options())
    env.spec.check_obs(env.reset([1, 2, 3]), (3,))
    drawn.reset([1])
    assert drawn.frame().shape == (96, 96, 3)
    assert drawn.frame().max() == 240


def test_walking_straight_to_the_goal_succeeds_and_the_time_limit_truncates() -> None:
    env = PointEnv(PointOptions(), 8)
    _, results = roll(env, list(range(8)), 20)
    assert results[-1].success.tolist() == [1.0] * 8
    assert results[-1].truncated.all()
    assert not results[-1].terminated.any()
    assert not any(result.truncated.any() for result in results[:-1])


def test_final_obs_is_the_true_last_observation_and_obs_the_next_episodes_first() -> None:
    env = PointEnv(PointOptions(max_episode_steps=2), 2)
    _, results = roll(env, [5, 6], 2)
    last = results[-1]
    np.testing.assert_allclose(
        np.linalg.norm(last.final_obs["achieved_goal"] - last.final_obs["desired_goal"], axis=1),
        -last.reward,
        atol=1e-6,
    )
    assert not np.array_equal(last.obs["desired_goal"], last.final_obs["desired_goal"])
    assert results[0].final_obs["observation"].shape == (0, 2)


def test_success_may_terminate() -> None:
    env = PointEnv(PointOptions(terminate_on_success=True), 4)
    _, results = roll(env, [1, 2, 3, 4], 20)
    ended = np.stack([result.terminated for result in results])
    assert ended.any(axis=0).all()
    assert all((result.success[result.terminated] == 1.0).all() for result in results)


def test_the_same_seeds_give_the_same_rows_and_other_seeds_others() -> None:
    runs = [
        roll(PointEnv(PointOptions(max_episode_steps=5), 2), seeds, 12)[1][-1] for seeds in ([7, 8], [7, 8], [9, 8])
    ]
    np.testing.assert_array_equal(runs[0].obs["observation"], runs[1].obs["observation"])
    assert not np.array_equal(runs[0].obs["observation"][0], runs[2].obs["observation"][0])
    np.testing.assert_array_equal(runs[0].obs["observation"][1], runs[2].obs["observation"][1])


def test_restart_begins_new_episodes_for_the_chosen_rows_only() -> None:
    env = PointEnv(PointOptions(), 3)
    before = env.reset([1, 2, 3])
    after = env.restart(np.array([False, True, False]))
    changed = (before["desired_goal"] != after["desired_goal"]).any(axis=1)
    assert changed.tolist() == [False, True, False]


def test_faults_strike_where_they_should_and_once_if_asked(tmp_path: Path) -> None:
    once = str(tmp_path / "struck")
    options = PointOptions(fault=FaultPlan(kind="raise", at=3, once_file=once))
    with pytest.raises(RuntimeError, match="on purpose at step 3"):
        roll(PointEnv(options, 1), [1], 5)
    roll(PointEnv(options, 1), [1], 5)

    _, results = roll(PointEnv(PointOptions(fault=FaultPlan(kind="nan", at=2)), 2), [1, 2], 2)
    assert np.isnan(results[1].obs["observation"]).any(axis=1).tolist() == [True, False]
    with pytest.raises(RuntimeError, match="reset 1"):
        PointEnv(PointOptions(fault=FaultPlan(kind="raise", phase="reset")), 1).reset([1])


def test_child_processes_end_with_the_environment() -> None:
    env = PointEnv(PointOptions(fault=FaultPlan(child_processes=2)), 1)
    children = env._children
    assert all(child.poll() is None for child in children)
    env.close()
    assert all(child.returncode is not None for child in children)


def test_it_needs_no_torch() -> None:
    code = "import sys, clawq.testing.point; assert not {'torch', 'celery', 'redis'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
