import json
import subprocess
import sys

import numpy as np
import pytest
from clawq_hands.plugin import GymnasiumOptions, plugin
from pydantic import ValidationError

from clawq.errors import UserError
from clawq.plugins import load


def test_it_comes_in_through_the_plugin_door() -> None:
    assert load("environments", "gymnasium") is plugin


@pytest.mark.parametrize(
    ("env_id", "obs", "action", "limit"),
    [
        ("HandReachDense-v3", {"achieved_goal": 15, "desired_goal": 15, "observation": 63}, 20, 50),
        ("HandManipulateBlockRotateZDense-v1", {"achieved_goal": 7, "desired_goal": 7, "observation": 61}, 20, 100),
        ("AdroitHandDoor-v1", {"policy": 39}, 28, 200),
        ("FetchReachDense-v4", {"achieved_goal": 3, "desired_goal": 3, "observation": 10}, 4, 50),
        ("Reacher-v5", {"policy": 10}, 2, 50),
    ],
)
def test_hands_and_arms_can_be_made_and_stepped(env_id: str, obs: dict[str, int], action: int, limit: int) -> None:
    env = plugin.make(GymnasiumOptions(id=env_id), 2)
    assert {key: spec.shape for key, spec in env.spec.obs.items()} == {key: (size,) for key, size in obs.items()}
    assert env.spec.action.size == action
    assert env.spec.max_episode_steps == limit
    env.spec.check_obs(env.reset([1, 2]), (2,))
    result = env.step(env.spec.action.to_env(np.zeros((2, action), np.float32)))
    env.spec.check_obs(result.obs, (2,))
    assert result.reward.dtype == np.float32
    assert result.valid.all()
    env.close()


def test_the_same_seeds_and_actions_give_the_same_rows_and_different_envs_differ() -> None:
    def rollout() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        env = plugin.make(GymnasiumOptions(id="HandReachDense-v3", max_episode_steps=5), 2)
        rng, rows = np.random.default_rng(0), [env.reset([11, 12])["desired_goal"]]
        for _ in range(12):
            result = env.step(rng.uniform(-1, 1, (2, 20)).astype(np.float32))
            rows += [result.obs["observation"][:, :15], result.obs["desired_goal"]]
        env.close()
        return np.stack(rows)

    first = rollout()
    np.testing.assert_array_equal(first, rollout())
    assert not np.array_equal(first[0, 0], first[0, 1])


def test_another_time_limit_is_obeyed() -> None:
    env = plugin.make(GymnasiumOptions(id="Reacher-v5", max_episode_steps=2), 1)
    assert env.spec.max_episode_steps == 2
    env.reset([1])
    action = np.zeros((1, 2), np.float32)
    assert [bool(env.step(action).truncated[0]) for _ in range(4)] == [False, True, False, True]
    env.close()


def test_an_unknown_id_is_answered_with_near_ones() -> None:
    with pytest.raises(UserError, match=r"'HandReachDense-v9'; did you mean HandReachDense-v3"):
        plugin.make(GymnasiumOptions(id="HandReachDense-v9"), 1)


def test_a_constructor_that_fails_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match="gymnasium cannot make Reacher-v5: TypeError"):
        plugin.make(GymnasiumOptions(id="Reacher-v5", kwargs={"no_such_thing": 1}), 1)


@pytest.mark.parametrize("env_id", ["some_module:Thing-v0", "a b", ""])
def test_an_id_never_names_code(env_id: str) -> None:
    with pytest.raises(ValidationError):
        GymnasiumOptions(id=env_id)


def test_a_hand_is_made_quietly_without_torch_or_opengl() -> None:
    program = (
        "import json, sys\n"
        "from clawq_hands.plugin import GymnasiumOptions, plugin\n"
        "plugin.make(GymnasiumOptions(id='HandReachDense-v3'), 1).close()\n"
        "print(json.dumps([name for name in ('torch', 'OpenGL') if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.stderr == ""
    assert json.loads(done.stdout) == []


def test_a_hand_can_be_drawn_headless_in_a_process_of_its_own() -> None:
    program = (
        "from clawq_hands.plugin import GymnasiumOptions, plugin\n"
        "from clawq.errors import UserError\n"
        "try:\n"
        "    env = plugin.make_rendered(GymnasiumOptions(id='HandReachDense-v3', width=160, height=128))\n"
        "    env.reset([1])\n"
        "    picture = env.frame()\n"
        "    print(picture.shape, picture.dtype, len(set(picture.reshape(-1, 3).sum(1).tolist())) > 20, flush=True)\n"
        "except UserError as error:\n"
        "    print('SKIP', error, flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    if done.stdout.startswith("SKIP no headless OpenGL"):
        pytest.skip(done.stdout)
    assert done.stdout.strip() == "(128, 160, 3) uint8 True"


def test_drawing_after_training_in_one_process_is_refused_with_the_reason() -> None:
    program = (
        "from clawq_hands.plugin import GymnasiumOptions, plugin\n"
        "plugin.make(GymnasiumOptions(id='Reacher-v5'), 1)\n"
        "plugin.make_rendered(GymnasiumOptions(id='Reacher-v5'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert "draw pictures in a process of their own" in done.stderr


def test_without_opengl_it_says_what_to_install() -> None:
    program = (
        "import ctypes.util\n"
        "ctypes.util.find_library = lambda name: None\n"
        "from clawq_hands.plugin import GymnasiumOptions, plugin\n"
        "plugin.make_rendered(GymnasiumOptions(id='Reacher-v5'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert "UserError: no headless OpenGL" in done.stderr
    assert "libosmesa6" in done.stderr
