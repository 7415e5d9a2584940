import numpy as np
import torch

from clawq.algorithms.columns import Columns
from clawq.algorithms.td3 import Td3Options, plugin
from clawq.specs import ActionSpec, ArraySpec, EnvSpec


def make_columns(policy: tuple[str, ...], critic: tuple[str, ...]) -> Columns:
    obs = {"a": ArraySpec((2,)), "b": ArraySpec((1, 3)), "c": ArraySpec((2,), "uint8"), "d": ArraySpec((1,))}
    return Columns(EnvSpec("test", obs, ActionSpec((-1.0,), (1.0,)), policy, critic))


OBS = {
    "a": torch.tensor([[0.0, 1.0]]),
    "b": torch.tensor([[[2.0, 3.0, 4.0]]]),
    "c": torch.tensor([[5, 6]], dtype=torch.uint8),
    "d": torch.tensor([[7.0]]),
}


def critic_view(columns: Columns) -> list[float]:
    out = torch.full((1, columns.critic_size + 1), -1.0)
    columns.write_critic(columns.rows(OBS), out)
    assert out[0, -1] == -1.0
    return [float(v) for v in out[0, :-1]]


def test_the_policy_sees_a_prefix_in_its_own_order() -> None:
    columns = make_columns(("d", "a"), ("a", "b"))
    assert columns.rows(OBS)[0, : columns.policy_size].tolist() == [7.0, 0.0, 1.0]


def test_the_critic_sees_its_keys_in_its_own_order() -> None:
    assert critic_view(make_columns(("d", "a"), ("a", "b", "d"))) == [0, 1, 2, 3, 4, 7]
    assert critic_view(make_columns(("a", "b"), ("a", "b"))) == [0, 1, 2, 3, 4]
    assert critic_view(make_columns(("b",), ("c", "a"))) == [5, 6, 0, 1]


def test_each_key_is_held_once_and_integers_become_floats() -> None:
    columns = make_columns(("a", "c"), ("c", "a", "d"))
    assert columns.keys == ("a", "c", "d")
    out = torch.empty(1, columns.size)
    assert columns.rows(OBS, out).data_ptr() == out.data_ptr()
    assert out.tolist() == columns.rows(OBS).tolist() == [[0, 1, 5, 6, 7]]


def test_many_rows_keep_their_order() -> None:
    columns = make_columns(("a", "b"), ("a", "b"))
    a = torch.from_numpy(np.arange(8, dtype=np.float32).reshape(4, 2))
    rows = columns.rows({"a": a, "b": torch.zeros(4, 1, 3)})
    assert torch.equal(rows[:, :2], a)


def test_steps_are_seen_as_they_are_and_in_a_goal_environment_with_the_achieved_goal_too() -> None:
    plain = make_columns(("a", "d"), ("a",))
    assert plain.views(OBS).tolist() == [[[0, 1, 7]]]
    obs = {"state": ArraySpec((1,)), "achieved": ArraySpec((2,)), "desired": ArraySpec((2,))}
    keys = ("state", "desired")
    goals = Columns(EnvSpec("test", obs, ActionSpec((-1.0,), (1.0,)), keys, keys, goal_keys=("achieved", "desired")))
    step = {
        name: torch.tensor([row]) for name, row in (("state", [1.0]), ("achieved", [2.0, 3.0]), ("desired", [4.0, 5.0]))
    }
    assert goals.views(step).tolist() == [[[1, 4, 5], [1, 2, 3]]]


def test_where_all_desired_goals_are_alike_hindsights_goals_do_not_stand_out() -> None:
    """As in FetchPush: goals lie on a table, and a block that is pushed is off its height by next to nothing."""
    obs = {"state": ArraySpec((1,)), "achieved": ArraySpec((1,)), "desired": ArraySpec((1,))}
    keys = ("state", "desired")
    spec = EnvSpec("test", obs, ActionSpec((-1.0,), (1.0,)), keys, keys, goal_keys=("achieved", "desired"))
    algorithm = plugin.make_algorithm(spec, Td3Options(hidden=(4,)), "cpu", 0)
    height = torch.full((1000, 1), 0.4249)
    pushed = height - 2e-4
    pushed[:50] -= 0.1  # some fell off
    algorithm.observe({"state": height, "achieved": pushed, "desired": height}, torch.ones(1000, dtype=torch.bool))
    assert algorithm.normaliser is not None
    real, hindsight = torch.tensor([[0.0, 0.4249]]), torch.tensor([[0.0, 0.4247]])
    apart = algorithm.normaliser.normalize(real, real) - algorithm.normaliser.normalize(hindsight, hindsight)
    assert apart[0, 1].abs() < 0.05
