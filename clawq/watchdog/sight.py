"""The watchdog's eyes: reads registry, /proc, NVML and Redis, and makes a `Snapshot` of it.

What needs several looks is remembered here: since when a condition holds, how memory grew, how often Redis answered in
a row. All of it may be lost: after a restart everything is judged a little later, nothing wrongly. USS is costly (the
kernel walks all pages), so it is taken now and then, and only of who shows progress; processes are searched for strays
(who carries the tag of somebody gone) only while there is somebody gone.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from clawq import progress
from clawq.errors import TransportError
from clawq.procfs import Identity, ancestors, boot_id, environ, own_pids, uss_mb
from clawq.registry import ENDED_IN_ORDER, TAG_VARIABLE, Record, Registry, carriers, environments
from clawq.transport.client import connect, translated
from clawq.transport.control import Heartbeats, RunRegistry
from clawq.transport.keys import CELERY_PREFIX, queue_name
from clawq.watchdog.access import own_url
from clawq.watchdog.audit import Audit
from clawq.watchdog.gpu import gpu_use
from clawq.watchdog.policy import Policy
from clawq.watchdog.snapshot import GpuUse, Seen, Snapshot

#: How often memory is measured, and GPUs are asked, seconds.
MEMORY_S, GPU_S = 30.0, 60.0
#: How long a round waits for what NVML says, seconds; a later answer is for the next one.
GPU_ANSWER_S = 0.5
#: How long Redis has for an answer, seconds.
ANSWER_S = 1.0
#: States of a run in which workers serve it.
_ACTIVE = ("starting", "running")


class Sight:
    """See the module's text.

    Args:
        registry: whose processes are looked at.
        policy: for windows and samples.
        memory_s: between two measurements of memory.
    """

    def __init__(self, registry: Registry, policy: Policy, memory_s: float = MEMORY_S) -> None:
        self._registry, self._policy, self._memory_s = registry, policy, memory_s
        self._audit = Audit(registry.folder)
        self._since: dict[tuple[str, str], float] = {}
        self._memory: dict[str, deque[tuple[float, float]]] = {}
        self._measured_s = self._gpu_s = float("-inf")
        self._gpu: tuple[GpuUse, ...] = ()
        self._asking: threading.Thread | None = None
        self._good: dict[str, int] = {}
        # Kept: each new one has a buffer of a megabyte, which only the garbage collector takes back.
        self._clients: dict[str, Any] = {}
        #: tag -> monotonic time of our SIGKILL.
        self.killed: dict[str, float] = {}

    def look(self, gap_s: float = 0.0) -> Snapshot:
        """Look once."""
        now_s = time.monotonic()
        me = Identity.of(os.getpid())
        assert me is not None, "/proc is not there"
        records = self._registry.records()
        served = self._ask_redis(records)
        self._ask_gpus(now_s)
        seen = self._with_strays([self._see(record, served.get(record.tag, Served())) for record in records])
        self._measure(seen, now_s)
        kept = self._remember(seen, now_s)
        return Snapshot(
            me=me,
            ancestors=ancestors(me.pid),
            seen=tuple(kept),
            redis=dict(self._good),
            gap_s=gap_s,
            kills=self._audit.kills(now_s - 60.0),
            gpu=self._gpu,
            deaths=self._deaths(now_s),
        )

    def forget_durations(self) -> None:
        """After a gap of our own nothing has lasted for any time that we know of."""
        self._since.clear()
        self._good = {url: 0 for url in self._good}

    def _see(self, record: Record, served: "Served") -> Seen:
        env = environ(record.pid) if record.identity.here else None
        return Seen(
            record=record,
            stat=record.identity.stat,
            reading=progress.read(self._registry.progress_file(record.tag)),
            parent_alive=record.parent is None or record.parent.alive,
            tagged=None if env is None else env.get(TAG_VARIABLE) == record.tag,
            killed_s=self.killed.get(record.tag),
            waiting=served.waiting,
            silent=served.silent,
        )

    def _deaths(self, now_s: float) -> dict[str, tuple[int, str]]:
        since_s, found = now_s - self._policy.flap_window_s, dict[str, tuple[int, str]]()
        for one in self._registry.deaths():
            if one.place and one.boot == boot_id() and one.at_s >= since_s and one.how != ENDED_IN_ORDER:
                found[one.place] = (found.get(one.place, (0, ""))[0] + 1, one.how)
        return found

    def _with_strays(self, found: list[Seen]) -> list[Seen]:
        if not any(seen.gone and seen.record.identity.here for seen in found):
            return found
        living = environments(own_pids())
        return [replace(seen, strays=tuple(carriers(living, seen.record.tag))) if seen.gone else seen for seen in found]

    def _remember(self, found: list[Seen], now_s: float) -> list[Seen]:
        kept = {}
        for seen in found:
            for condition in seen.conditions():
                key = (seen.record.tag, condition)
                kept[key] = self._since.get(key, now_s)
        self._since = kept
        tags = {seen.record.tag for seen in found}
        self._memory = {tag: samples for tag, samples in self._memory.items() if tag in tags}
        self.killed = {tag: at_s for tag, at_s in self.killed.items() if tag in tags}
        return [
            replace(
                seen,
                since={name: at_s for (tag, name), at_s in kept.items() if tag == seen.record.tag},
                memory=tuple(self._memory.get(seen.record.tag, ())),
            )
            for seen in found
        ]

    def _measure(self, found: list[Seen], now_s: float) -> None:
        if now_s - self._measured_s < self._memory_s:
            return
        self._measured_s = now_s
        # Twice the window: enough for a slope, and old growth is forgotten.
        room = max(self._policy.leak_samples, int(2 * self._policy.leak_window_s / max(self._memory_s, 0.01)))
        for seen in found:
            if seen.reading is not None and not seen.gone and (uss := uss_mb(seen.record.pid)) is not None:
                self._memory.setdefault(seen.record.tag, deque(maxlen=room)).append((now_s, uss))

    def _ask_gpus(self, now_s: float) -> None:
        # In a thread: a driver that hangs takes whoever asks it with it.
        if now_s - self._gpu_s >= GPU_S and (self._asking is None or not self._asking.is_alive()):
            self._gpu_s = now_s
            self._asking = threading.Thread(target=self._note_gpus, name="clawq-gpus", daemon=True)
            self._asking.start()
            self._asking.join(GPU_ANSWER_S)

    def _note_gpus(self) -> None:
        self._gpu = gpu_use()

    def _ask_redis(self, records: Iterable[Record]) -> dict[str, "Served"]:
        """See which servers answer; returns what they say of each worker (by tag)."""
        records = list(records)
        for url in self._clients.keys() - {url for record in records for url in record.urls}:
            self._clients.pop(url).close()
        self._good = {url: self._counted(url) for url in {record.urls[1] for record in records if record.urls[1]}}
        served = {}
        for record in records:
            if record.role == "worker" and self._good.get(record.urls[1]):
                with contextlib.suppress(TransportError):
                    served[record.tag] = _served(record, *map(self._client, record.urls))
        return served

    def _client(self, url: str) -> Any:
        if url not in self._clients:
            self._clients[url] = connect(own_url(url), timeout_s=ANSWER_S)
        return self._clients[url]

    def _counted(self, url: str) -> int:
        """Good looks in a row, this one included; 0 if the server does not answer now."""
        try:
            client = self._client(url)
            with translated(client):
                client.ping()
        except TransportError:
            return 0
        # A server that was never seen away needs no probation.
        return min(self._good[url] + 1, 1000) if url in self._good else self._policy.redis_rounds


@dataclass(frozen=True, slots=True)
class Served:
    """What Redis says of a worker: commands in its lease queues, and whether a run misses its heartbeats."""

    waiting: int = 0
    silent: bool = False


def _served(record: Record, broker: Any, data: Any) -> Served:
    only = set(record.facts.get("runs") or ())
    runs = [run for run in RunRegistry(broker).list() if run.state in _ACTIVE and (not only or run.run_id in only)]
    with translated(broker):
        waiting = sum(int(broker.llen(CELERY_PREFIX + queue_name(run.run_id))) for run in runs)
    name = record.facts.get("name")
    return Served(waiting, any(name not in Heartbeats(data, run.keys).read() for run in runs))


__all__ = ["ANSWER_S", "GPU_S", "MEMORY_S", "Sight"]
