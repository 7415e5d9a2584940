"""How much memory a run will take on the learner's machine, before it takes it.

    memory: ring 97 MB, streams up to 591 MB (data server 1.07 GB), weights 4 MB, buffers 28 MB; 21.3 GB are free

What has a bound is counted at its bound: the ring when it is full, the embedded data server (or one on this machine) at
its maxmemory, staged fragments, copies of a checkpoint and of a snapshot while they are written. A run that would not
fit is refused at its start, with the largest ring that fits, instead of being killed hours later. Free is what the
machine, and the control group that we run in, would still give. Not counted: what actors take, for which the share that
is left must do. Pure, but for `Machine.here`; no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from clawq.amounts import bytes_text
from clawq.config import RunConfig
from clawq.config_rules import STREAM_SHARE
from clawq.cores import own_cgroup
from clawq.errors import UserError
from clawq.replay.rowsize import HOST_ROW_BYTES, forecast_bytes
from clawq.specs import ArraySpec, EnvSpec

#: Share of the free memory that a run may plan with.
SHARE = 0.9
#: A priority of a row and its share of the sums (sum_tree.py).
PRIORITY_BYTES = 5
#: Copies of a state while a checkpoint is written: tensors, pickled, on the way to the file.
STATE_COPIES = 3
#: A chunk of a snapshot, copied and padded.
SNAPSHOT_BYTES = 2 * 8_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be had.

    Attributes:
        free_bytes: of memory, by machine and control group.
        gpu_bytes: free on the learner's GPU; None = there is none, or it was not looked at.
    """

    free_bytes: int
    gpu_bytes: int | None = None

    @classmethod
    def here(cls, gpu_bytes: int | None = None) -> "Machine":
        """This machine, now."""
        return cls(
            min(psutil.virtual_memory().available, *cgroup_free(Path("/sys/fs/cgroup"), own_cgroup())), gpu_bytes
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes by what takes them.

    Attributes:
        capacity: rows of the ring.
        row_bytes: of each row, where the learner computes.
        row_host_bytes: of each row, on the host beside a GPU; 0 without one.
        streams: most bytes of the run's streams.
        server: what the data server may still take on this machine; 0 if it is elsewhere.
        weights: networks, targets and optimisers.
        buffers: staged fragments, copies of the state and of chunks that are being written.
        gpu: whether the learner computes on one.
        known: whether rows were counted with their observations.
    """

    capacity: int
    row_bytes: int
    row_host_bytes: int
    streams: int
    server: int
    weights: int
    buffers: int
    gpu: bool
    known: bool

    @property
    def ring(self) -> int:
        """The whole ring."""
        return self.capacity * (self.row_bytes + self.row_host_bytes)

    def text(self, machine: Machine) -> str:
        """One line for people."""
        server = f" (data server {bytes_text(self.server)})" if self.server else " (on another machine)"
        gpu = f", on the GPU {bytes_text(machine.gpu_bytes)}" if machine.gpu_bytes is not None else ""
        return (
            f"memory: ring {bytes_text(self.ring)}, streams up to {bytes_text(self.streams)}{server}, "
            f"weights {bytes_text(self.weights)}, buffers {bytes_text(self.buffers)}; "
            f"{bytes_text(machine.free_bytes)} are free{gpu}"
        )

    def check(self, machine: Machine) -> None:
        """UserError if it does not fit, with the largest capacity that does."""
        limits = list(self._limits(machine))
        for where, free, beside, each in limits:
            if beside + each * self.capacity > SHARE * free:
                fits = min(max(0, int((SHARE * free - beside) / each)) for _, free, beside, each in limits)
                # While the observations are not known, the rows are larger than what was counted.
                most = "at most" if self.known else "what fits is below"
                advice = (
                    f"{most} replay.capacity={fits}"
                    if fits > 1
                    else "no ring fits; make redis.data_memory_mb smaller, or use a data server on another machine"
                )
                raise UserError(
                    f"replay.capacity: a ring of {self.capacity} rows takes {bytes_text(each * self.capacity)} "
                    f"{where}, and {bytes_text(beside)} are needed beside it (data server {bytes_text(self.server)}, "
                    f"weights {bytes_text(self.weights)}, buffers {bytes_text(self.buffers)}); {bytes_text(free)} are "
                    f"free, of which clawq plans with {SHARE:.0%}; {advice}"
                )

    def _limits(self, machine: Machine) -> Iterator[tuple[str, int, int, int]]:
        """(place in words, bytes free there, bytes beside the ring, bytes of each row there)."""
        if not self.gpu:
            yield "of memory", machine.free_bytes, self.server + self.weights + self.buffers, self.row_bytes
            return
        yield "of memory beside a GPU", machine.free_bytes, self.server + self.buffers, self.row_host_bytes
        if machine.gpu_bytes is not None:
            yield "on the GPU", machine.gpu_bytes, self.weights, self.row_bytes


def forecast(
    config: RunConfig,
    spec: EnvSpec | None,
    *,
    gpu: bool = False,
    server: int | None = None,
    streams: int | None = None,
    weights: int = 0,
    extras: Mapping[str, ArraySpec] | None = None,
) -> Forecast:
    """What a run will take.

    Args:
        config: of the run.
        spec: None while it is not known yet: then rows without observations are counted.
        gpu: does the learner compute on one?
        server: what the data server may still take on this machine; None = an embedded one that has not started.
        streams: the stream budget; None = what it will be.
        weights: bytes of the algorithm's state.
        extras: what is kept of the policy beside each action; name -> spec.
    """
    replay, redis = config.replay, config.redis
    if server is None:
        server = redis.data_memory_mb * 2**20
    if streams is None:
        streams = redis.stream_bytes or int(server * STREAM_SHARE)
    row = HOST_ROW_BYTES if spec is None else forecast_bytes(spec, 1, extras)
    host = HOST_ROW_BYTES if gpu else 0
    extra = PRIORITY_BYTES if replay.sampler == "prioritized" else 0
    buffers = 2 * redis.window_bytes + STATE_COPIES * weights
    if config.learner.snapshot != "never":
        buffers += SNAPSHOT_BYTES
    return Forecast(
        capacity=replay.capacity,
        row_bytes=row - host + (0 if gpu else extra),
        row_host_bytes=host + (extra if gpu else 0),
        streams=streams,
        server=server,
        weights=weights,
        buffers=buffers,
        gpu=gpu,
        known=spec is not None,
    )


def cgroup_free(root: Path, own: str) -> list[int]:
    """Bytes that cgroup `own` and each group above it may still take; nothing where there is no limit.

    Args:
        root: where cgroup v2 (or the v1 controllers) is mounted.
        own: path of the process's cgroup below it, as in /proc/self/cgroup.
    """
    folder = root / own.strip("/")
    levels = [level for level in (folder, *folder.parents) if level == root or root in level.parents]
    found = [_free(level / "memory.max", level / "memory.current", level / "memory.stat") for level in levels]
    v1 = root / "memory"
    found.append(_free(v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", v1 / "memory.stat"))
    return [free for free in found if free is not None]


def _free(limit: Path, usage: Path, stat: Path) -> int | None:
    try:
        most, used = int(limit.read_text()), int(usage.read_text())
        pages = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return None  # "max", or no such controller
    # Pages of files that nobody has used lately are given back when memory is wanted.
    return max(0, most - used + int(pages.get("inactive_file", 0)))


__all__ = ["SHARE", "Forecast", "Machine", "cgroup_free", "forecast"]
