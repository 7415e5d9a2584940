"""The memory forecast: what is counted, and what is said when it does not fit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawq.config import RunConfig
from clawq.errors import UserError
from clawq.programs import local
from clawq.programs.local import Household, LocalRun, run_local
from clawq.programs.memory import SHARE, Forecast, Machine, cgroup_free, forecast
from clawq.replay.rowsize import HOST_ROW_BYTES, forecast_bytes
from clawq.specs import ActionSpec, ArraySpec, EnvSpec

HAND = EnvSpec(
    "hands:HandReachDense-v3",
    {"observation": ArraySpec((63,)), "achieved_goal": ArraySpec((15,)), "desired_goal": ArraySpec((15,))},
    ActionSpec((-1.0,) * 20, (1.0,) * 20),
    ("observation", "desired_goal"),
    ("observation", "desired_goal"),
)
MACHINE = Machine(free_bytes=16_000_000_000)


def config_of(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "test", "environment": {"name": "point"}, **sections})


def fits(wanted: Forecast, machine: Machine) -> bool:
    try:
        wanted.check(machine)
    except UserError:
        return False
    return True


def test_C31_the_line_at_the_start_counts_everything_at_its_bound() -> None:
    wanted = forecast(config_of(replay={"capacity": 200_000}), HAND, weights=4_000_000)
    assert wanted.ring == 200_000 * forecast_bytes(HAND, 1)
    assert wanted.server == 1024 * 2**20
    assert wanted.text(MACHINE) == (
        "memory: ring 94.8 MB, streams up to 591 MB (data server 1.07 GB), weights 4 MB, buffers 30 MB; 16 GB are free"
    )
    elsewhere = replace(wanted, server=0)
    assert "(on another machine)" in elsewhere.text(MACHINE)


@pytest.mark.parametrize("gpu", [None, 2_000_000_000])
def test_C31_C37_what_does_not_fit_is_refused_with_the_largest_capacity_that_does(gpu: int | None) -> None:
    machine = Machine(4_000_000_000, gpu)

    def wanted(capacity: int) -> Forecast:
        config = config_of(replay={"capacity": capacity, "sampler": "prioritized"})
        return forecast(config, HAND, gpu=gpu is not None, weights=10_000_000)

    with pytest.raises(UserError, match=r"at most replay\.capacity=\d+$") as caught:
        wanted(20_000_000).check(machine)
    most = int(str(caught.value).split("replay.capacity=")[1].split()[0])
    assert fits(wanted(most), machine)
    assert not fits(wanted(most + 2), machine)
    if gpu is None:
        assert most == pytest.approx((SHARE * 4e9 - 1024 * 2**20) / forecast_bytes(HAND, 1), rel=0.05)
    else:
        assert most == pytest.approx(SHARE * gpu / (forecast_bytes(HAND, 1) - HOST_ROW_BYTES), rel=0.05)


def test_while_the_observations_are_not_known_the_error_says_that_less_fits() -> None:
    with pytest.raises(UserError, match=r"what fits is below replay\.capacity=\d+$"):
        forecast(config_of(replay={"capacity": 2_000_000_000}), None).check(MACHINE)


def test_where_even_the_data_server_does_not_fit_the_error_says_that_it_is_the_server() -> None:
    with pytest.raises(UserError, match=r"no ring fits; make redis\.data_memory_mb smaller"):
        forecast(config_of(redis={"data_memory_mb": 8000}), HAND).check(Machine(2_000_000_000))


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"a/memory.max": "max", "a/memory.current": "5", "a/memory.stat": ""}, []),
        ({"a/memory.max": "1000", "a/memory.current": "900", "a/memory.stat": "anon 500\ninactive_file 300\n"}, [400]),
        ({"a/memory.max": "1000", "a/memory.current": "2000", "a/memory.stat": ""}, [0]),
        (
            {
                "a/b/memory.max": "1000",
                "a/b/memory.current": "10",
                "a/b/memory.stat": "",
                "a/memory.max": "500",
                "a/memory.current": "100",
                "a/memory.stat": "",
            },
            [990, 400],
        ),
    ],
)
def test_the_control_group_and_those_above_it_are_asked(tmp_path: Path, files: dict[str, str], free: list[int]) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_free(tmp_path, "/a/b") == free


class Silent:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, snapshot: Any) -> None: ...
    def say(self, text: str) -> None:
        self.said.append(text)


def test_clawq_up_refuses_before_it_starts_or_makes_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*arguments: Sequence[Any], **more: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(local, "servers_for", nothing)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: Machine(500_000_000)))
    household = Household()
    order = LocalRun(config_of(folder=str(tmp_path / "runs")), ("point.yaml",))
    with pytest.raises(UserError, match="data server"):
        run_local(order, Silent(), None, household)  # type: ignore[arg-type]
    assert household.learner is None
    assert not (tmp_path / "runs").exists()
