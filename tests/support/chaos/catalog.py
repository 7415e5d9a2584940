"""All faults by their names; F1–F20 are those of the fault list, see ops/decisions/chaos.md."""

from wire import Wire

from chaos import data_faults as data
from chaos import network_faults as network
from chaos import process_faults as process
from chaos import redis_faults as server
from chaos.fault import Fault
from chaos.ground import Setup
from chaos.interceptor import Interceptor

READ = Setup(wire=Interceptor)
CUT = Setup(wire=Wire)
ONE = Setup(workers=1)


def _checkpoint(point: str) -> Setup:
    return Setup(workers=1, learner_env=process.rename_env(point))


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "F1",
            "an actor is killed in a step",
            "its slot sends again under a new epoch within 25 s",
            process.actor_killed,
            recovery_s=25.0,
            kills=1,
        ),
        Fault(
            "F1-request",
            "an actor is killed about to send",
            "as F1",
            process.actor_killed_at_send("request"),
            READ,
            recovery_s=25.0,
            kills=1,
        ),
        Fault(
            "F1-response",
            "an actor is killed between XADD and its answer",
            "as F1; what was sent is learned once",
            process.actor_killed_at_send("response"),
            READ,
            recovery_s=25.0,
            kills=1,
        ),
        Fault(
            "F2",
            "the learner is killed in the midst of updates",
            "resumed, it goes on from its checkpoint",
            process.learner_killed,
            ONE,
            recovery_s=40.0,
        ),
        Fault(
            "F2-publish",
            "the learner is killed in the midst of publishing",
            "as F2; actors keep complete weights",
            process.learner_killed_mid_publish,
            Setup(workers=1, wire=Interceptor),
            recovery_s=40.0,
        ),
        Fault(
            "F2-before-rename",
            "the learner is killed before a checkpoint is renamed",
            "as F2; nothing unfinished stays",
            process.learner_killed_at_rename,
            _checkpoint("before"),
            recovery_s=40.0,
        ),
        Fault(
            "F2-after-rename",
            "the learner is killed after a checkpoint was renamed",
            "as F2",
            process.learner_killed_at_rename,
            _checkpoint("after"),
            recovery_s=40.0,
        ),
        Fault(
            "F3",
            "both servers (AOF) are killed five times",
            "nothing acknowledged is lost, nobody is ended",
            server.killed_with_aof,
            Setup(aof=True, watchdog=True),
        ),
        Fault(
            "F4",
            "the data server comes back empty",
            "the run goes on; what was lost is a gap",
            server.killed_without_aof,
            gaps=True,
        ),
        Fault("F5-2.6", "both servers stand still for 2.6 s", "all goes on, nobody is ended", server.stalled(2.6)),
        Fault(
            "F5-30",
            "both servers stand still for 30 s",
            "as F5-2.6",
            server.stalled(30.0),
            Setup(watchdog=True),
            recovery_s=60.0,
        ),
        Fault(
            "F5-90",
            "both servers stand still for 90 s",
            "as F5-2.6",
            server.stalled(90.0),
            Setup(watchdog=True),
            recovery_s=60.0,
        ),
        Fault("F6", "all connections are cut, five times", "all goes on, nobody is ended", server.kicked),
        Fault("F7", "the data server is full for 10 s", "actors wait; all goes on", server.full(10.0)),
        Fault(
            "F8",
            "a quarter of all calls to the data server fails for 10 s",
            "all goes on; each fragment counts once",
            network.calls_fail(10.0),
            READ,
            recovery_s=60.0,
        ),
        Fault(
            "F8-again",
            "fragments are delivered out of order and again",
            "each counts once",
            data.entries_again,
            ONE,
        ),
        Fault(
            "F9",
            "entries that are no fragments of this run",
            "each refused with its reason",
            data.garbage_in_the_streams,
            ONE,
        ),
        Fault("F10", "garbage in the Celery queue", "set aside; nobody is ended", process.garbage_in_the_queue, ONE),
        Fault(
            "F11",
            "the newest weights are damaged",
            "actors keep what they have, and follow the next",
            data.weights_damaged,
            ONE,
        ),
        Fault(
            "F12",
            "a worker stands still for longer than its claims last",
            "its slots go on under new epochs",
            process.worker_frozen,
        ),
        Fault(
            "F13",
            "two learners of one run",
            "the second is refused; a frozen first is replaced and ends",
            process.second_learner,
            ONE,
            recovery_s=40.0,
        ),
        Fault(
            "F14",
            "the learner's disk is full",
            "told; training goes on, the next checkpoint is written",
            data.disk_full_of_checkpoints,
            Setup(workers=1, disks={"runs": "8m"}),
        ),
        Fault(
            "F14-data",
            "the data server's disk is full (AOF)",
            "actors wait; all goes on",
            data.disk_full_of_redis("data", 5.0),
            Setup(workers=1, aof=True, disks={"data": "48m"}),
        ),
        Fault(
            "F14-broker",
            "the broker's disk is full (AOF)",
            "workers and coordinator wait; all goes on",
            data.disk_full_of_redis("broker", 5.0),
            Setup(workers=1, disks={"broker": "16m"}),
            recovery_s=60.0,
        ),
        Fault(
            "F15",
            "one worker's clock is 15 minutes ahead, one's behind",
            "no claim is lost, no slot doubled",
            data.wrong_clocks,
            Setup(clocks={"w0": 900, "w1": -900}),
        ),
        Fault(
            "F15-back",
            "the data server's clock is set back by 15 minutes",
            "all goes on",
            data.clock_set(-900),
            Setup(settable_clock=True),
        ),
        Fault(
            "F15-ahead",
            "the data server's clock is set 15 minutes ahead",
            "claims run out and are taken anew; all goes on",
            data.clock_set(900),
            Setup(settable_clock=True),
        ),
        Fault(
            "F16",
            "actors with 50 child processes are killed",
            "all children go with them",
            process.orphans,
            Setup(overrides=("environment.options={step_s: 0.01, fault: {child_processes: 25}}",)),
            kills=2,
        ),
        Fault("F17", "a Celery worker is killed", "started again; its slot sends again", process.main_killed, kills=1),
        Fault("F17-lost", "leases are taken and go with their worker", "others are sent", process.leases_lost, kills=1),
        Fault("F18", "a worker is started and ended ten times", "nothing is left", process.restarts(10), kills=10),
        Fault(
            "F19",
            "the two newest checkpoints are damaged",
            "told; resumed from the third",
            data.checkpoint_damaged,
            ONE,
            recovery_s=40.0,
        ),
        Fault(
            "F20",
            "the watchdog is killed, doubled, frozen",
            "replaced; nobody is ended wrongly",
            process.watchdogs,
            Setup(watchdog=True),
        ),
        Fault(
            "partition-worker",
            "a worker's line is dead for 15 s",
            "others go on; it catches up",
            network.partition(15.0, "w0"),
            CUT,
            recovery_s=60.0,
        ),
        Fault(
            "partition-learner",
            "the learner's line is dead for 15 s",
            "actors wait; all goes on",
            network.partition(15.0, "learner"),
            CUT,
            recovery_s=60.0,
        ),
        Fault(
            "partition-all",
            "the data server's line is dead for 30 s",
            "all goes on",
            network.partition(30.0),
            CUT,
            recovery_s=60.0,
        ),
        Fault(
            "partition-namespace",
            "a worker in a namespace of its own loses the network for 20 s",
            "others go on; it catches up",
            network.namespace_cut(20.0),
            Setup(apart=("w0",)),
            recovery_s=90.0,
        ),
        Fault("slow-worker", "one actor runs a tenth of the time", "others are not held up", process.slow_worker),
        Fault(
            "slow-link",
            "a worker's line takes 0.2 s longer",
            "others are not held up",
            network.slow_link(0.2, 8.0),
            CUT,
        ),
    )
}
