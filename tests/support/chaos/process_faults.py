"""Faults of our own processes: F1, F2, F10, F12, F13, F16, F17, F20, and a worker that is slow."""

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import psutil
from clocks import with_site
from garbage import GARBAGE
from processes import outliving

from chaos.interceptor import Interceptor, has
from chaos.redis_faults import pause, unharmed
from chaos.system import RUN, System
from clawq.control.queues import lease_queue
from clawq.transport.keys import CELERY_PREFIX

#: File in the system's folder, where its processes run.
_TRIGGER = "die-at-a-rename"


def actor_killed(system: System, dice: Random) -> None:
    """F1: at any moment, mostly in a step of the environment."""
    dice.choice(system.actors()).kill()


def actor_killed_at_send(way: str) -> Callable[[System, Random], str]:
    """F1: when it is about to send (`request`), or when it was acknowledged and has not heard of it (`response`)."""

    def inject(system: System, dice: Random) -> str:
        [actor] = system.actors("w0")
        wire = system.wires["w0"]
        assert isinstance(wire, Interceptor)
        sprung = wire.trap(has("XADD", ":s:"), way, actor.kill)
        assert sprung.wait(30.0), "nothing was sent"
        system.over()
        assert outliving([actor], 5.0) == []
        return "killed before the XADD arrived" if way == "request" else "killed after the XADD, before its answer"

    return inject


def learner_killed(system: System, dice: Random) -> None:
    """F2: in the midst of its updates."""
    pause(dice.uniform(0.0, 0.3))
    system.learner.process.kill()
    _resume(system)


def learner_killed_mid_publish(system: System, dice: Random) -> str:
    """F2: the weights are staged, and not yet the newest."""
    wire = system.wires["learner"]
    assert isinstance(wire, Interceptor)
    sprung = wire.trap(has("HSET", ":w:staging"), "response", system.learner.process.kill)
    assert sprung.wait(30.0), "nothing was published"
    head = system.client.hget(system.keys.control, "head")
    _resume(system)
    return f"staged above version {int(head or 0)}, which actors kept"


def rename_env(point: str) -> dict[str, str]:
    """For `Setup.learner_env`: the learner dies before or after the rename of a checkpoint, once it is told to."""
    return with_site(CLAWQ_CHAOS_RENAME=point, CLAWQ_CHAOS_TRIGGER=_TRIGGER)


def learner_killed_at_rename(system: System, dice: Random) -> str:
    """F2: in the midst of a checkpoint, as the setup says."""
    trigger = system.folder / _TRIGGER
    trigger.touch()
    system.until(lambda: system.learner.status is not None, "the learner to die at a rename")
    trigger.unlink()
    assert system.learner.status == -signal.SIGKILL, system.describe()
    left = [path.name for path in (system.run_folder / "checkpoints").glob("*.tmp*")]
    _resume(system)
    return f"unfinished files when it died: {len(left)}"


def _resume(system: System) -> None:
    system.over()
    assert system.learner.wait(10.0) == -signal.SIGKILL, system.describe()
    system.resume()


def garbage_in_the_queue(system: System, dice: Random) -> str:
    """F10: what is no command lies in the run's Celery queue."""
    queue = CELERY_PREFIX + lease_queue(RUN)
    with unharmed(system):
        for piece in GARBAGE:
            system.broker.ask("LPUSH", queue, piece)
        system.over()
        system.until(lambda: not set(system.broker.ask("LRANGE", queue, 0, -1)) & set(GARBAGE), "it to be read")
        system.await_recovery(system.mark())
    return f"{len(GARBAGE)} pieces"


def main_killed(system: System, dice: Random) -> None:
    """F17: the Celery worker is killed; its supervisor starts another one."""
    [main], actors = system.mains("w0"), system.actors("w0")
    main.kill()
    system.over()
    assert outliving(actors, 10.0) == [], "the actors of a killed worker live on"
    system.until(lambda: system.mains("w0"), "the next Celery worker")


def leases_lost(system: System, dice: Random) -> None:
    """F17: leases are taken off the queue by a worker that stands still, and go with it (the window of BRPOP)."""
    [main] = system.mains("w0")
    main.suspend()
    pause(3.0)
    main.kill()
    system.over()
    system.until(lambda: system.mains("w0"), "the next Celery worker")


def worker_frozen(system: System, dice: Random) -> str:
    """F12: a whole worker stands still for longer than its slots' claims last, then goes on."""
    tree = system.workers["w0"].tree()
    slots = {slot for slot in system.mark().streams if "-w0-" in slot}
    before = system.mark().streams
    _signal(tree, signal.SIGSTOP)
    pause(12.0)
    assert not [slot for slot in slots if system.client.exists(system.keys.claim(f"slot:{slot}"))], "claims have a TTL"
    _signal(tree, signal.SIGCONT)
    system.over()

    def fenced() -> bool:
        newest = system.mark().streams
        return all(newest[slot][0] > before[slot][0] for slot in slots if slot in newest)

    system.until(fenced, "its slots to begin new epochs")
    return "it went on under a new epoch"


def second_learner(system: System, dice: Random) -> str:
    """F13: a second learner is refused; when the first has stood still for too long it takes over."""
    first = system.learner
    config = str(system.run_folder / "config.yaml")
    refused = system.home.call("learner", "start", config, "--resume", str(system.run_folder))
    assert refused.status == 2, refused.output
    assert RUN in refused.output, refused.output
    assert "Traceback" not in refused.output, refused.output
    before = system.mark()
    first.process.send_signal(signal.SIGSTOP)
    system.over()
    # On this machine the run folder is the first one's as long as it lives, so: as on another one.
    system.run_folder = Path(shutil.copytree(system.run_folder, system.folder / "elsewhere" / RUN))
    system.resume()
    system.await_recovery(before)
    took_s = system.since_over_s
    first.process.send_signal(signal.SIGCONT)
    status = first.wait(30.0)
    assert status not in (0, -signal.SIGKILL), first.output
    assert "Traceback" not in first.output, first.output
    system.over()
    return (
        f"taken over after {took_s:.1f} s; the first ended with status {status}: {first.output.splitlines()[-1][:100]}"
    )


def orphans(system: System, dice: Random) -> str:
    """F16: environments with children, whose actors are killed; the children must not outlive them."""
    actors = system.actors()
    children = [child for actor in actors for child in actor.children(recursive=True)]
    assert len(children) >= 50, f"only {len(children)} children"
    for actor in actors:
        actor.kill()
    system.over()
    left = outliving(children, 15.0)
    assert not left, f"{len(left)} of {len(children)} children outlive their actors"
    return f"{len(children)} children were gone {system.since_over_s:.1f} s after their actors"


def watchdogs(system: System, dice: Random) -> str:
    """F20: the watchdog is killed; a second one is started beside it; it stands still and goes on."""
    with unharmed(system):
        [first] = system.until(lambda: system.records("watchdog"), "a watchdog")
        os.kill(first.pid, signal.SIGKILL)
        system.over()
        [second] = system.until(
            lambda: [one for one in system.records("watchdog") if one.pid != first.pid], "the next watchdog", 60.0
        )
        took_s = system.since_over_s
        beside = system.home.call("watchdog", "start")
        assert beside.status == 0, beside.output
        assert "has a watchdog already" in beside.output, beside.output
        os.kill(second.pid, signal.SIGSTOP)
        pause(8.0)
        os.kill(second.pid, signal.SIGCONT)
        system.over()
        system.await_recovery(system.mark())
    return f"the next watchdog was there after {took_s:.1f} s"


def slow_worker(system: System, dice: Random) -> str:
    """One worker's actor runs a tenth of the time; the others are not held up."""
    [actor], before = system.actors("w0"), system.mark()
    pauses = 12
    for _ in range(pauses):
        actor.suspend()
        pause(0.45)
        actor.resume()
        pause(0.05)
    now = system.mark()
    others = [slot for slot in before.streams if "-w0-" not in slot]
    sent = {slot: now.streams[slot][1] - before.streams[slot][1] for slot in before.streams if slot in now.streams}
    system.over()
    assert all(sent[slot] > 2 * pauses for slot in others), f"others were held up: {sent}"
    return f"fragments sent meanwhile: {sorted(sent.values())}"


def restarts(count: int) -> Callable[[System, Random], str]:
    """F18: a worker that is started and ended again and again, at any moment of its life, killed or told to end."""

    def inject(system: System, dice: Random) -> str:
        for _ in range(count):
            worker = system.workers["w0"]
            if dice.random() < 0.5:
                worker.stop(timeout_s=60.0)
            else:
                tree = worker.tree()
                worker.process.kill()
                worker.process.wait()
                assert outliving(tree, 10.0) == [], "a killed worker leaves processes"
            system.add_worker("w0")
            pause(dice.uniform(0.0, 4.0))
        system.over()
        return f"{count} lives"

    return inject


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
