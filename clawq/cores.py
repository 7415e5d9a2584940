"""Who gets how many cores on this machine.

The learner, the actors and Redis share the cores that this process may really use: the affinity mask and the cgroup
quota count, not what the machine has. `plan_cores` is pure: numbers in, numbers and one sentence out. What the user
set is kept as it is, even when it over-subscribes the machine; then the sentence says so.

Every thread pool (torch, OpenMP, BLAS) is told its size explicitly. Left alone each process would start one thread
per core, and N actors with N threads each on N cores run many times slower than one thread each.
"""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Most torch threads worth giving to a learner on the CPU: its networks are small, more threads only synchronise.
MAX_LEARNER_THREADS = 4

#: The environment variables that size the thread pools of numpy, scipy, MuJoCo and torch.
_POOLS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    # Read by clawq's own programs before they import torch.
    "CLAWQ_THREADS",
)


@dataclass(frozen=True, slots=True)
class CorePlan:
    """A division of the cores.

    Attributes:
        available: cores that this process may use.
        learner_threads: torch threads of the learner.
        slots: actors at a time.
        actor_threads: torch and BLAS threads of one actor.
    """

    available: int
    learner_threads: int
    slots: int
    actor_threads: int

    @property
    def used(self) -> int:
        """Threads that want to run at the same time."""
        return self.learner_threads + self.slots * self.actor_threads

    @property
    def text(self) -> str:
        """The plan as one line for people."""
        line = (
            f"{_count(self.available, 'core')}: learner {_count(self.learner_threads, 'thread')}, "
            f"{_count(self.slots, 'actor')} with {_count(self.actor_threads, 'thread')} each"
        )
        if self.used > self.available:
            line += f" (over-subscribed: {self.used} threads on {_count(self.available, 'core')})"
        return line


def plan_cores(
    available: int,
    learner_threads: int | None = None,
    slots: int | None = None,
    actor_threads: int | None = None,
    device: str = "cpu",
) -> CorePlan:
    """Divide `available` cores; numbers that are given are kept.

    Simulation is what usually limits a run, and it scales with actors of one thread. So the learner gets a quarter of
    the cores (1 to 4) on the CPU, two at most when it trains on a GPU, and actors get the rest, at least one.

    Args:
        available: cores to divide, ≥ 1 (see `available_cores`).
        learner_threads: fixed by the user, or None.
        slots: fixed by the user, or None.
        actor_threads: fixed by the user, or None.
        device: where the learner trains, `cpu` or `cuda:i`.
    """
    per_actor = actor_threads or 1
    if learner_threads is None:
        share = available // 4 if device == "cpu" else min(2, available // 4)
        # Cores that a fixed number of actors leaves idle are the learner's.
        spare = available - slots * per_actor if slots is not None and device == "cpu" else 0
        learner_threads = min(MAX_LEARNER_THREADS, max(1, share if slots is None else max(spare, 1)))
    if slots is None:
        slots = max(1, (available - learner_threads) // per_actor)
    return CorePlan(available, learner_threads, slots, per_actor)


def assumed_device(wanted: str, driver: bool, torch_version: str, visible: str | None) -> str:
    """What `learner.device` will be, as far as that can be told without torch, which takes seconds to import.

    Args:
        wanted: `auto`, `cpu` or `cuda:i`.
        driver: NVIDIA's driver is there.
        torch_version: of the installed torch; a build for CPUs says so.
        visible: CUDA_VISIBLE_DEVICES, if it is set; empty or -1 hides all.
    """
    if wanted != "auto":
        return wanted
    hidden = visible is not None and visible.strip() in ("", "-1")
    return "cuda:0" if driver and not hidden and not torch_version.endswith("+cpu") else "cpu"


def device_here(wanted: str) -> str:
    """`assumed_device` on this machine."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "+cpu"
    driver = Path("/dev/nvidiactl").exists()
    return assumed_device(wanted, driver, torch_version, os.environ.get("CUDA_VISIBLE_DEVICES"))


def available_cores() -> int:
    """Cores this process may use: the affinity mask, cut by the cgroup CPU quota (v2 or v1), at least 1."""
    try:
        mask = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        mask = os.cpu_count() or 1
    quota = cgroup_cores(Path("/sys/fs/cgroup"), own_cgroup())
    return max(1, mask if quota is None else min(mask, int(quota)))


def cgroup_cores(root: Path, own: str) -> float | None:
    """The tightest CPU quota from cgroup `own` up to the root, in cores; None if there is none.

    Args:
        root: where cgroup v2 (or the v1 controllers) is mounted.
        own: path of the process's cgroup below it, as in /proc/self/cgroup.
    """
    quotas: list[float] = []
    folder = root / own.strip("/")
    for level in (folder, *folder.parents):
        if level == root or root in level.parents:
            quotas += _quota_v2(level / "cpu.max")
    quotas += _quota_v1(root / "cpu")
    return min(quotas, default=None)


def thread_env(threads: int) -> dict[str, str]:
    """Environment variables that hold a process to that many threads in each of its pools. Set before it starts."""
    return dict.fromkeys(_POOLS, str(threads))


def own_cgroup() -> str:
    """Path of this process's cgroup (v2) below its mount point; empty if there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "")


def _quota_v2(file: Path) -> list[float]:
    # "max 100000" or "150000 100000": microseconds of CPU in each period.
    try:
        quota, period = file.read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError):
        return []


def _quota_v1(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


__all__ = [
    "MAX_LEARNER_THREADS",
    "CorePlan",
    "assumed_device",
    "available_cores",
    "cgroup_cores",
    "device_here",
    "own_cgroup",
    "plan_cores",
    "thread_env",
]
