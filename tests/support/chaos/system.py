"""A whole running system for faults: a broker and a data server, a learner and workers, all real processes.

    with System(folder, Setup(workers=2)) as system:
        before = system.mark()
        ...                                   # whatever is done to it
        took_s = system.await_recovery(before)
        system.check_ledger()                 # at any moment, also while it runs
        system.stop()                         # in order; the ledger against Redis' own count
    assert system.leftovers == []

Every party has a wire of its own to the data server if the setup asks for it: `system.wires["learner"]`, `["w0"]`.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from books import assert_ledger_balances
from clawq_process import ROOT, Clawq, Command
from leftovers import command_line, in_use, marked_processes, shared_memory

from chaos.ground import PLAIN, Ground, Setup
from clawq.errors import ClawqError
from clawq.programs.audit import audit
from clawq.programs.balance import Balance
from clawq.registry import Record, Registry, registry_folder
from clawq.transport.books import Books
from clawq.transport.client import connect, translated
from clawq.transport.control import Board, RunRegistry, delete_run
from clawq.transport.keys import CELERY_PREFIX, DEAD_COMMANDS_KEY, RunKeys
from clawq.transport.stream import last_generated, parse_registration

#: Name of the run.
RUN = "chaos"
#: Every process of a system inherits this, whatever becomes of its parents.
MARK = "CLAWQ_CHAOS"
#: Busy machines take longer.
PATIENCE = float(os.environ.get("CLAWQ_TEST_PATIENCE", "1"))
#: Fragments that must be committed anew for a system to have recovered.
ENOUGH = 5
#: As light as it gets, so that what is timed is the recovery, not the machine; fragments are short.
LIGHT = (
    *("environment.num_envs=2", "environment.options={step_s: 0.01}", "algorithm.options={hidden: [16, 16]}"),
    *("replay={capacity: 20000, batch_size: 32, gamma: 0.9}", "actors.fragment_s=0.05", "learner.device=cpu"),
    *("rate_limit={samples_per_insert: 4, min_size_to_sample: 200}", "learner.checkpoint_interval_s=1"),
    *("evaluation.interval_s=null", "record.animation=false", "metrics=[jsonl]", "budget={}"),
)
#: Celery's bookkeeping on the broker that runs out by itself.
_CELERY_KEEPS = ("_kombu.binding_deadlines", "unacked_mutex")
_LOOK_S, _ENDING_S = 0.05, 3.0


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a system was at a moment.

    Attributes:
        committed: fragments that the learner has inserted.
        updates: of the learner.
        streams: slot -> newest id in its stream.
    """

    committed: int
    updates: float
    streams: Mapping[str, tuple[int, int]]


class System:
    """Starts when it is made, and trains by then.

    Args:
        folder: for all files; short, since sockets may lie there.
        setup: see Setup.

    Attributes:
        ground: see Ground; its servers and wires are `broker`, `data` and `wires` here too.
        home: starts commands.
        run_folder: the newest learner's.
        learner: the process of the newest learner.
        workers: name -> process.
        recovery_s: from the end of the last fault until it trained again; None: it did not yet.
        leftovers: what was left, known after `stop`.
    """

    def __init__(self, folder: Path, setup: Setup = PLAIN) -> None:
        self.folder, self.setup = folder, setup
        self._mark, self._shared = uuid.uuid4().hex, set(shared_memory())
        self.leftovers: list[str] = []
        self.workers: dict[str, Command] = {}
        self._over_s: float | None = None
        self.recovery_s: float | None = None
        self.ground = Ground(folder, setup)
        self.broker, self.data, self.wires = self.ground.broker, self.ground.data, self.ground.wires
        #: For looking; `ask` of the server goes past it.
        self.client: Any = connect(self.data.url, timeout_s=2.0)
        env = {MARK: self._mark, "XDG_RUNTIME_DIR": str(self.ground.sockets), "CLAWQ_WATCHDOG": "01"[setup.watchdog]}
        # For the commands that people give: straight to the servers.
        self.home = Clawq(folder, CLAWQ_BROKER_URL=self.broker.url, CLAWQ_DATA_URL=self.data.url, **env, **setup.env)
        self.run_folder = self.home.runs / RUN
        try:
            for number in range(setup.workers):
                self.add_worker(f"w{number}")
            self.learner = self._start_learner("--run", RUN, **setup.learner_env)
            self.until(lambda: self.registry.get(RUN), "the run to be registered", 90.0)
            self.await_recovery(Mark(0, 0.0, {}), 90.0)
        except BaseException:
            self.__exit__()
            raise

    # --- its parts ---------------------------------------------------------------------------------------------------

    @property
    def registry(self) -> RunRegistry:
        """The runs on the broker."""
        return RunRegistry(connect(self.broker.url, timeout_s=2.0))

    @property
    def keys(self) -> RunKeys:
        """Of the run, once it is there."""
        found = getattr(self, "_keys", None) or RunKeys(self._tag())
        self._keys: RunKeys = found
        return found

    def add_worker(self, name: str, **env: str) -> Command:
        """Start a worker (again, if there was one of that name)."""
        words = ("worker", "start", "--slots", str(self.setup.slots), "--name", name)
        started = self.home.start(*words, prefix=self.ground.prefix_of(name), **(self.ground.env_of(name) | env))
        self.workers[name] = started
        return started

    def actors(self, name: str | None = None) -> list[psutil.Process]:
        """The actors of a worker, or of all."""
        chosen = self.workers.values() if name is None else [self.workers[name]]
        return [p for worker in chosen for p in worker.tree() if "clawq.programs.actor" in command_line(p)]

    def mains(self, name: str) -> list[psutil.Process]:
        """The Celery main process of a worker."""
        return [p for p in self.workers[name].tree() if "clawq.control.worker" in command_line(p)]

    def records(self, role: str) -> list[Record]:
        """Living processes of that role, as the watchdog knows them."""
        found = Registry(registry_folder(self.home.env)).records()
        return [record for record in found if record.role == role and record.identity.alive]

    def resume(self, *overrides: str, **env: str) -> Command:
        """A learner that goes on with the run; waits until the dead one's claim has run out."""
        self.until(lambda: not self.client.exists(self.keys.claim("learner")), "the learner's claim to run out", 30.0)
        self.learner = self._start_learner(*overrides, "--resume", str(self.run_folder), **env)
        return self.learner

    # --- what it does ------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """How far it is; raises what clawq raises while Redis is away."""
        published = Books(self.client, self.keys).read()
        updates = Board(self.client, self.keys).read().get("updates", 0.0)
        return Mark(int(published[1]["committed"]) if published else 0, float(updates), self._streams())

    def await_recovery(self, since: Mark, timeout_s: float = 60.0, senders: int | None = None) -> float:
        """Wait until it trains again: fragments from as many slots, committed, and updates; seconds that took.

        Args:
            since: a moment before the fault; what a learner repeats after it does not count.
            timeout_s: times CLAWQ_TEST_PATIENCE.
            senders: slots that must have sent since now; default: all of the setup.
        """
        wanted = self.setup.workers * self.setup.slots if senders is None else senders
        began_s, first = time.monotonic(), dict[str, tuple[int, int]]()
        sent: set[str] = set()

        def recovered() -> bool:
            now = self.mark()
            for slot, newest in now.streams.items():
                sent.update({slot} if newest > first.setdefault(slot, newest) else ())
            far = now.committed >= since.committed + ENOUGH and now.updates > since.updates
            return far and len(sent) >= wanted

        self.until(recovered, f"{wanted} slots to send and the learner to get beyond {since}", timeout_s)
        if self._over_s is not None and self.recovery_s is None:
            self.recovery_s = self.since_over_s
        return time.monotonic() - began_s

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> Any:
        """The first true value of `condition`; while it cannot be told, since a server is away, it is false."""
        deadline_s, trouble = time.monotonic() + timeout_s * PATIENCE, ""
        while True:
            try:
                if value := condition():
                    return value
                trouble = ""
            except ClawqError as error:
                trouble = f" ({error})"
            if time.monotonic() >= deadline_s:
                raise AssertionError(f"waited {timeout_s:.0f} s for {what}{trouble}\n{self.describe()}")
            time.sleep(_LOOK_S)

    def begin(self) -> None:
        """A fault begins."""
        self._over_s = self.recovery_s = None

    def over(self, first: bool = True) -> None:
        """The fault is over: from here on recovery is timed. With `first` false only if nobody has said so yet."""
        if first or self._over_s is None:
            self._over_s, self.recovery_s = time.monotonic(), None

    @property
    def since_over_s(self) -> float:
        """Seconds since the fault was over."""
        assert self._over_s is not None
        return time.monotonic() - self._over_s

    def balance(self) -> Balance:
        """The ledger as it is now, wherever the learner is."""
        found = audit(self.client, self.keys, self.run_folder)
        assert found is not None, "the run has no ledger"
        return found

    def check_ledger(self) -> Balance:
        """The ledger, which must add up to the last fragment."""
        found = self.balance()
        assert not found.problems(), f"{found.problems()}\n{self.describe()}"
        return found

    def describe(self) -> str:
        """The ends of all logs."""
        said = [f"--- {' '.join(map(str, one.process.args[3:]))}\n{one.output[-2500:]}" for one in self.home.started]  # type: ignore[index]
        return "\n".join([*said, self.home.logs(RUN)])

    # --- its end -----------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float = 40.0) -> None:
        """End learner and workers in order, check the ledger against Redis, and note what is left behind."""
        limit_s = timeout_s * PATIENCE
        if self.learner.status is None:
            assert self.home.call("learner", "stop", RUN).status == 0, self.describe()
            assert self.learner.wait(limit_s) == 0, self.describe()
        statuses = {name: worker.stop(timeout_s=limit_s) for name, worker in self.workers.items() if self._lives(name)}
        assert_ledger_balances(self.client, self.keys, self.run_folder)
        self.leftovers = [f"worker {name} ended with {status}" for name, (status, _, _) in statuses.items() if status]
        self.leftovers += [f"process {p.pid}: {command_line(p)}" for p in self._processes()]
        self.leftovers += self._keys_left()
        self.leftovers += [f"unfinished file {path.relative_to(self.folder)}" for path in self.folder.rglob("*.tmp*")]
        self.close()
        self.leftovers += [f"socket {name}" for name in self.ground.forget_sockets()]
        self.leftovers += [
            f"shared memory {name}" for name in shared_memory().keys() - self._shared if not in_use(name)
        ]

    def close(self) -> None:
        """End whatever still runs, at once. Idempotent."""
        for process in self._processes(0.0):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for command in self.home.started:
            command.process.wait()
        self.client.close()
        self.ground.close()

    def __enter__(self) -> "System":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.ground.forget_sockets()

    # --- details -----------------------------------------------------------------------------------------------------

    def _start_learner(self, *words: str, **env: str) -> Command:
        where = str(self.run_folder / "config.yaml") if "--resume" in words else str(ROOT / "configs" / "point.yaml")
        quick = () if "--resume" in words else (f"folder={self.home.runs}", *LIGHT, *self.setup.overrides)
        return self.home.start("learner", "start", where, *quick, *words, **(self.ground.env_of("learner") | env))

    def _tag(self) -> str:
        record = self.registry.get(RUN)
        assert record is not None, self.describe()
        return record.tag

    def _streams(self) -> dict[str, tuple[int, int]]:
        with translated(self.client):
            slots = self.client.hgetall(self.keys.slots)
        found = {}
        for name, text in slots.items():
            slot = name.decode()
            found[slot] = last_generated(self.client, self.keys.stream(slot)) or (parse_registration(text)[0], 0)
        return found

    def _lives(self, name: str) -> bool:
        return self.workers[name].status is None

    def _processes(self, ending_s: float = _ENDING_S) -> list[psutil.Process]:
        return marked_processes(MARK, self._mark, ending_s)

    def _keys_left(self) -> list[str]:
        """What would stay in Redis for ever: all but the run's own keys, which a resume needs."""
        delete_run(self.client, self.keys)
        left = [f"key {key.decode()}" for key in self.client.scan_iter() if self.client.pttl(key) == -1]
        broker: Any = connect(self.broker.url)
        kept = {DEAD_COMMANDS_KEY, *(CELERY_PREFIX + name for name in _CELERY_KEEPS)}
        names = {key.decode() for key in broker.scan_iter() if broker.pttl(key) == -1}
        broker.close()
        return left + [f"key on the broker: {name}" for name in sorted(names - kept)]
