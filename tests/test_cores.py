"""Division of the cores: the pure plan, and the cgroup files it starts from."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawq.cores import CorePlan, assumed_device, available_cores, cgroup_cores, device_here, plan_cores, thread_env


@pytest.mark.parametrize(
    ("available", "device", "learner_threads", "slots"),
    [
        (1, "cpu", 1, 1),
        (2, "cpu", 1, 1),
        (4, "cpu", 1, 3),
        (8, "cpu", 2, 6),
        (16, "cpu", 4, 12),
        (64, "cpu", 4, 60),
        (2, "cuda:0", 1, 1),
        (4, "cuda:0", 1, 3),
        (16, "cuda:0", 2, 14),
    ],
)
def test_actors_get_most_cores_and_the_learner_a_few(
    available: int, device: str, learner_threads: int, slots: int
) -> None:
    assert plan_cores(available, device=device) == CorePlan(available, learner_threads, slots, 1)


def test_cores_that_few_actors_leave_idle_are_the_learners() -> None:
    assert plan_cores(8, slots=5) == CorePlan(8, 3, 5, 1)
    assert plan_cores(8, slots=1).learner_threads == 4
    assert plan_cores(8, slots=3, actor_threads=2).learner_threads == 2


@pytest.mark.parametrize(
    ("wanted", "driver", "torch_version", "visible", "device"),
    [
        ("auto", True, "2.9.1+cu128", None, "cuda:0"),
        ("auto", True, "2.9.1", "3", "cuda:0"),
        ("auto", True, "2.9.1", "", "cpu"),
        ("auto", True, "2.9.1", "-1", "cpu"),
        ("auto", True, "2.9.1+cpu", None, "cpu"),
        ("auto", False, "2.9.1", None, "cpu"),
        ("cpu", True, "2.9.1", None, "cpu"),
        ("cuda:1", False, "2.9.1+cpu", "", "cuda:1"),
    ],
)
def test_the_device_of_auto_is_told_without_torch(
    wanted: str, driver: bool, torch_version: str, visible: str | None, device: str
) -> None:
    assert assumed_device(wanted, driver, torch_version, visible) == device


def test_a_gpu_box_with_device_auto_is_planned_as_one() -> None:
    assert plan_cores(16, device=assumed_device("auto", True, "2.9.1", None)).slots == 14
    assert plan_cores(16, device=assumed_device("auto", False, "2.9.1", None)).slots == 12
    assert device_here("cuda:1") == "cuda:1"


sizes = st.none() | st.integers(1, 64)


@given(
    available=st.integers(1, 256),
    learner_threads=sizes,
    slots=sizes,
    actor_threads=sizes,
    device=st.sampled_from(["cpu", "cuda:0"]),
)
def test_what_the_user_set_is_kept_and_the_rest_is_at_least_one(
    available: int, learner_threads: int | None, slots: int | None, actor_threads: int | None, device: str
) -> None:
    plan = plan_cores(available, learner_threads, slots, actor_threads, device)
    assert plan.learner_threads == (learner_threads or plan.learner_threads) >= 1
    assert plan.slots == (slots or plan.slots) >= 1
    assert plan.actor_threads == (actor_threads or 1)
    assert ("over-subscribed" in plan.text) == (plan.used > available)


def test_nothing_is_over_subscribed_unless_the_user_says_so() -> None:
    assert [cores for cores in range(2, 129) if plan_cores(cores).used > cores] == []


def test_the_plan_is_told_in_one_line() -> None:
    assert plan_cores(2).text == "2 cores: learner 1 thread, 1 actor with 1 thread each"
    assert plan_cores(2, slots=4).text.endswith("(over-subscribed: 5 threads on 2 cores)")


def test_the_tightest_quota_of_the_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("800000 100000\n")
    assert cgroup_cores(tmp_path, "/pod/container") == 1.5
    assert cgroup_cores(tmp_path, "/") == 8.0


def test_a_cgroup_v1_quota_counts_and_garbage_does_not(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    assert cgroup_cores(tmp_path, "") is None
    (tmp_path / "cpu.max").write_text("what\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cores(tmp_path, "") is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    assert cgroup_cores(tmp_path, "") == 2.5


def test_this_process_may_use_at_least_one_core_and_no_more_than_there_are() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_all_thread_pools_are_told_their_size() -> None:
    sizes = thread_env(3)
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CLAWQ_THREADS"} <= set(sizes)
    assert set(sizes.values()) == {"3"}
