"""A storm: every two seconds something is killed, frozen or added, now and then the learner too, or Redis stalls.

What happens, when and to whom is drawn by a seed (whom among those that are there). The throughput is measured in equal
windows before and after, with as many workers; the ledgers of all readers must balance to the last fragment, and
nothing may be left. `ops/storm` runs five minutes of it, tests/faults a short one.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

import psutil
from chaos.ground import Setup
from chaos.system import System

from clawq.errors import ClawqError
from clawq.programs.audit import others
from clawq.programs.balance import Balance
from clawq.transport.client import connect
from clawq.transport.control import Board

#: Between two looks at the throughput, seconds; a rate is taken over so many of them.
LOOK_S, LOOKS = 1.0, 5
#: How long what is frozen stays so, and a stalled server, seconds.
FROZEN_S, STALLED_S = (0.5, 1.5), (1.0, 2.5)
#: What happens, and how often in comparison.
BLOWS = {
    "kill actor": 3,
    "freeze actor": 2,
    "kill worker's main": 1,
    "freeze worker's main": 1,
    "kill worker": 2,
    "stop worker": 1,
    "add worker": 3,
}
#: A system for storms: steps take as long as a simulator's, so that the machine is not what limits it.
SETUP = Setup(workers=3, watchdog=True, overrides=("archive={enabled: true, segment_bytes: 1000000}",))


@dataclass(frozen=True, slots=True)
class Weather:
    """What a storm is like.

    Attributes:
        seconds: its length.
        window_s: each of the two windows in which the throughput is measured.
        every_s: between two blows.
        learner_s: between two kills of the learner, in the mean.
        stall_s: between two stalls of a server, in the mean.
        settle_s: from when everything works (again) to the window.
        most_workers: at a time; there is always one.
    """

    seconds: float = 300.0
    window_s: float = 60.0
    every_s: float = 2.0
    learner_s: float = 60.0
    stall_s: float = 25.0
    settle_s: float = 10.0
    most_workers: int = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One look.

    Attributes:
        at_s: monotonic.
        wall_s, env_steps: of the run, as the learner tells.
        cpu: process id -> CPU seconds, of those that work.
    """

    at_s: float
    wall_s: float
    env_steps: float
    cpu: Mapping[int, float]


@dataclass(slots=True)
class Outcome:
    """What a storm did.

    Attributes:
        rows: the throughput's, over all.
        blows: (monotonic seconds, what).
        windows: begin and end of the one before and the one after.
        recovery_s: from the end of the storm until as many workers as before send, and the learner trains.
        balances: of each reader.
        problems: what is wrong with any of them.
        lost_unacked: bound of the fragments that what was killed took with it unsent.
    """

    rows: list[Row] = field(default_factory=list)
    blows: list[tuple[float, str]] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)
    recovery_s: float = 0.0
    balances: list[Balance] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [f"{one.reader}: {problem}" for one in self.balances for problem in one.problems()]

    @property
    def lost_unacked(self) -> int:
        return int(self.balances[0].sums.get("lost_unacked", 0)) if self.balances else 0

    @property
    def rates(self) -> list[tuple[float, float]]:
        """(env steps/s, env steps per CPU second) before and after, medians over the windows."""
        return [rates_in(self.rows, *window) for window in self.windows]


def rates_in(rows: Sequence[Row], begin_s: float, end_s: float) -> tuple[float, float]:
    """Medians, over the stretches of that time, of env steps by the run's own seconds and by CPU seconds."""
    inside = [row for row in rows if begin_s <= row.at_s <= end_s]
    pairs = [(a, b) for a, b in zip(inside[:-LOOKS], inside[LOOKS:], strict=True) if b.wall_s > a.wall_s]
    assert pairs, f"nothing was seen of the {end_s - begin_s:.0f} s"
    by_wall = [(b.env_steps - a.env_steps) / (b.wall_s - a.wall_s) for a, b in pairs]
    by_cpu = [(b.env_steps - a.env_steps) / max(1e-3, cpu_between(a, b)) for a, b in pairs]
    return median(by_wall), median(by_cpu)


def cpu_between(first: Row, last: Row) -> float:
    """CPU seconds of those that were there at both looks."""
    return sum(used_s - first.cpu[pid] for pid, used_s in last.cpu.items() if pid in first.cpu)


class Watch(threading.Thread):
    """Looks at the throughput once a second, from a thread, whatever happens."""

    def __init__(self, system: System, rows: list[Row]) -> None:
        super().__init__(name="storm-watch", daemon=True)
        self._system, self._rows, self._over = system, rows, threading.Event()
        # Of its own, and impatient: a stalled server is a gap in the picture, not a pause of the watch.
        client = connect(system.data.url, timeout_s=0.5)
        self._client, self._board = client, Board(client, system.keys)

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                seen: Mapping[str, Any] = self._board.pick(("wall_s", "env_steps"))
                self._rows.append(Row(time.monotonic(), float(seen["wall_s"]), float(seen["env_steps"]), self._cpu()))
            except (ClawqError, KeyError):
                continue

    def _cpu(self) -> dict[int, float]:
        found = {}
        for command in (self._system.learner, *list(self._system.workers.values())):
            for process in command.tree() if command.status is None else ():
                try:
                    times = process.cpu_times()
                    found[process.pid] = times.user + times.system
                except psutil.Error:
                    continue
        return found

    def close(self) -> None:
        self._over.set()
        self.join()
        self._client.close()


class Storm:
    """One storm over a running system.

    Args:
        system: trains, with `system.setup.workers` workers.
        weather: see there.
        seed: of what happens.
        say: told of each blow.
    """

    def __init__(
        self, system: System, weather: Weather, seed: int, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._system, self._weather, self._say = system, weather, say
        self._random = Random(seed)
        self._born = system.setup.workers
        self._pending: list[threading.Thread] = []
        self._trouble: list[BaseException] = []
        self._resuming: threading.Thread | None = None
        self.outcome = Outcome()

    def blow(self) -> Outcome:
        """All of it; the system goes on afterwards, with as many workers as before."""
        system, weather, outcome = self._system, self._weather, self.outcome
        watch = Watch(system, outcome.rows)
        watch.start()
        try:
            self._window()
            began_s = time.monotonic()
            self._rage(began_s + weather.seconds)
            over_s = time.monotonic()
            self._gather()
            system.await_recovery(system.until(system.mark, "the learner's books"), 90.0)
            outcome.recovery_s = time.monotonic() - over_s
            self._window()
        finally:
            self._calm()
            watch.close()
        outcome.balances = [system.balance(), *others(system.client, system.keys, system.run_folder)]
        return outcome

    def _window(self) -> None:
        """Let everything settle, and let a window pass."""
        begin_s = time.monotonic() + self._weather.settle_s
        time.sleep(self._weather.settle_s + self._weather.window_s)  # what is measured is this time
        self.outcome.windows.append((begin_s, begin_s + self._weather.window_s))

    def _rage(self, until_s: float) -> None:
        """Blow after blow; the next one does not wait for what the last one did."""
        weather, pick = self._weather, self._random.random
        next_s = time.monotonic()
        while next_s < until_s:
            time.sleep(max(0.0, next_s - time.monotonic()))  # the storm's own rhythm
            next_s += weather.every_s
            if pick() < weather.every_s / weather.stall_s:
                self._stall()
            if pick() < weather.every_s / weather.learner_s and not self._learner_is_down():
                self._kill_learner()
            self._hit(self._random.choices(list(BLOWS), list(BLOWS.values()))[0])

    def _hit(self, what: str) -> None:
        system, living = self._system, self._living()
        if what in ("kill worker", "stop worker") and len(living) <= 1:
            what = "add worker"
        if what == "add worker" and len(living) >= self._weather.most_workers:
            what = "kill worker"
        if not living:
            what = "add worker"
        name = self._random.choice(living or [""])
        whom = self._random.random()
        if what == "add worker":
            self._add()
        elif what == "kill worker":
            self._note(f"{what} {name}")
            system.workers[name].process.kill()
        elif what == "stop worker":
            self._note(f"{what} {name}")
            system.workers[name].process.terminate()
        else:
            there = system.actors() if "actor" in what else system.mains(name)
            if not there:
                self._note(f"{what}: there is none")
                return
            victim = there[int(whom * len(there))]
            self._note(f"{what} {victim.pid}")
            self._strike(victim, frozen="freeze" in what)

    def _strike(self, victim: psutil.Process, frozen: bool) -> None:
        try:
            victim.suspend() if frozen else victim.kill()
        except psutil.NoSuchProcess:
            return
        if frozen:
            self._later(self._random.uniform(*FROZEN_S), lambda: _resume(victim))

    def _stall(self) -> None:
        server, name = self._random.choice([(self._system.data, "data"), (self._system.broker, "broker")])
        seconds = self._random.uniform(*STALLED_S)
        self._note(f"stall {name} server")
        server.stall()
        self._later(seconds, server.go_on)

    def _kill_learner(self) -> None:
        self._note("kill learner")
        self._system.learner.process.kill()
        self._system.learner.wait(10.0)

        def resume() -> None:
            system = self._system
            try:
                before = system.until(system.mark, "the learner's books")
                system.resume()
                system.await_recovery(before, 90.0, senders=0)
            except BaseException as error:
                self._trouble.append(error)

        self._resuming = threading.Thread(target=resume, name="storm-resume", daemon=True)
        self._resuming.start()

    def _learner_is_down(self) -> bool:
        """Whether it is being brought back. It is spared until it trains, so that each kill meets one that does."""
        return self._resuming is not None and self._resuming.is_alive()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.start()
        self._pending.append(timer)

    def _calm(self) -> None:
        """Nothing is frozen any more."""
        for timer in self._pending:
            timer.join()
        if self._resuming is not None:
            self._resuming.join()
        if self._trouble:
            raise self._trouble[0]

    def _gather(self) -> None:
        """As many workers as before the storm, and a learner."""
        self._calm()
        if self._system.learner.status is not None:
            self._system.resume()
        while len(living := self._living()) < self._system.setup.workers:
            self._add()
        for name in living[self._system.setup.workers :]:
            self._note(f"stop worker {name}")
            self._system.workers[name].stop()

    def _add(self) -> None:
        name, self._born = f"w{self._born}", self._born + 1
        self._note(f"add worker {name}")
        self._system.add_worker(name)

    def _living(self) -> list[str]:
        return [name for name, command in self._system.workers.items() if command.status is None]

    def _note(self, what: str) -> None:
        self.outcome.blows.append((time.monotonic(), what))
        self._say(what)


def _resume(victim: psutil.Process) -> None:
    try:
        victim.resume()
    except psutil.NoSuchProcess:
        return


__all__ = ["SETUP", "Outcome", "Row", "Storm", "Weather", "rates_in"]
