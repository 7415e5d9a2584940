"""Who uses GPU memory, by NVML, NVIDIA's own library; nothing where it is not installed.

NVML's pids are those of the host, or, in some containers, of nobody that can be seen: they are for reports only.
"""

import ctypes
from collections.abc import Iterable
from functools import cache

from clawq.watchdog.snapshot import GpuUse

#: More processes on one GPU than this are not told.
_MOST = 256
_UNKNOWN = 2**64 - 1


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of the _v3 calls."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def gpu_use() -> tuple[GpuUse, ...]:
    """The compute processes of all GPUs; empty if there is no NVML, or it does not answer."""
    nvml = _library()
    if nvml is None:
        return ()
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    return tuple(use for index in range(count.value) for use in _on(nvml, index))


def _on(nvml: ctypes.CDLL, index: int) -> list[GpuUse]:
    device, count = ctypes.c_void_p(), ctypes.c_uint(_MOST)
    found = (_Process * _MOST)()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return []
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found) != 0:
        return []
    return told([(int(one.pid), int(one.used)) for one in found[: count.value]], index)


def told(entries: Iterable[tuple[int, int]], gpu: int) -> list[GpuUse]:
    """What NVML says of one GPU, as (pid, bytes); all ones mean that it does not know how much."""
    return [GpuUse(pid, gpu, used / 1e6) for pid, used in entries if used != _UNKNOWN]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


__all__ = ["gpu_use", "told"]
