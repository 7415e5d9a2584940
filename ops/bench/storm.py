"""Five minutes in which something is killed, frozen or added every two seconds; draws ops/bench/storm.png.

ops/storm [--minutes M] [--seed S] [--quick] [--commit]

A whole system (tests/support/chaos/system.py): two servers, a learner with an archive, three workers, a watchdog.
Every 2 s an actor, a worker or its Celery process is killed by SIGKILL or frozen by SIGSTOP for a second, or a worker
is added or told to leave; now and then the learner is killed (and resumed) or a server stalls (tests/support/storm.py).
Env steps/s are measured in a window before and one of the same length after, in which as many workers are at work; the
steps of the environment last as long as a simulator's, so that the machine is not what limits it. At the end the
ledgers of all readers must balance to the last fragment, and nothing may be left. Exit status 1 otherwise.
Logs and run folder are kept in runs/storm-<time>/.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from collections import Counter

from chaos.system import System
from storm import LOOKS, SETUP, Outcome, Storm, Weather

from ops.bench.common import ROOT, Bench

PICTURE = ROOT / "ops" / "bench" / "storm.png"
COLOURS = {"kill": "tab:red", "freeze": "tab:orange", "stall": "tab:purple", "add": "tab:green", "stop": "tab:blue"}


def draw(path: Path, outcome: Outcome, title: str) -> None:
    """Throughput over time; each blow is a line, the learner's deaths are thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, begin_s = outcome.rows, outcome.rows[0].at_s
    pairs = [(a, b) for a, b in zip(rows[:-LOOKS], rows[LOOKS:], strict=True) if b.at_s > a.at_s]
    figure, axis = pyplot.subplots(figsize=(13, 5), layout="constrained")
    told: set[str] = set()
    for at_s, what in outcome.blows:
        kind = what.split()[0]
        learner = what == "kill learner"
        axis.axvline(
            at_s - begin_s,
            color="black" if learner else COLOURS[kind],
            linewidth=1.8 if learner else 0.7,
            alpha=0.9 if learner else 0.6,
            label=None if kind in told else kind,
        )
        told.add(kind)
    # A resumed learner begins again at its checkpoint: what it then repeats is no throughput.
    rates = [max(0.0, b.env_steps - a.env_steps) / (b.at_s - a.at_s) for a, b in pairs]
    axis.plot([b.at_s - begin_s for _, b in pairs], rates, color="black", linewidth=1.5)
    for window in outcome.windows:
        axis.axvspan(window[0] - begin_s, window[1] - begin_s, color="grey", alpha=0.15)
    axis.set_ylabel(f"env steps/s inserted, over {LOOKS} s")
    axis.set_xlabel("seconds; grey: the windows that are compared; thick: the learner is killed")
    axis.set_ylim(bottom=0)
    axis.legend(loc="lower right", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=90)


def main() -> int:
    bench = Bench("storm", __doc__, {"minutes": "5", "seed": "1"})
    seconds, seed = 20.0 if bench.quick else 60.0 * float(bench.options.minutes), int(bench.options.seed)
    weather = Weather(seconds, window_s=float(bench.pick(60, 10)), learner_s=float(bench.pick(60, 15)))
    kept = ROOT / "runs" / time.strftime("storm-%Y%m%d-%H%M%S")
    with System(kept, SETUP) as system:
        outcome = Storm(system, weather, seed, bench.say).blow()
        problems = outcome.problems
        system.stop()
    (before, before_cpu), (after, after_cpu) = outcome.rates
    blows = Counter(
        " ".join(word for word in what.split() if not word.strip("w").isdigit()) for _, what in outcome.blows
    )
    learner = outcome.balances[0].sums
    bench.result(
        "recovered",
        after / before,
        "ratio",
        ">= 0.9, and no fragment that is not accounted for",
        by_cpu_time=after_cpu / before_cpu,
        env_steps_per_s=[before, after],
        env_steps_per_cpu_s=[before_cpu, after_cpu],
        recovery_s=outcome.recovery_s,
        minutes=seconds / 60,
        seed=seed,
        blows=dict(blows),
        fragments={one.reader: one.acknowledged for one in outcome.balances},
        uncounted={one.reader: sum(abs(row.difference) for row in one.rows) for one in outcome.balances},
        inserted=learner["committed"],
        duplicates=learner["duplicates"],
        rejected=learner["rejected"],
        gaps=learner["gaps"],
        lost_unacked_at_most=outcome.lost_unacked,
        problems=problems,
        left_behind=system.leftovers,
    )
    books = "; ".join(problems) or f"{outcome.balances[0].acknowledged} fragments, all accounted for"
    title = (
        f"{len(outcome.blows)} blows in {seconds:.0f} s: {before:.0f} env steps/s before, {after:.0f} after; {books}"
    )
    draw(PICTURE if bench.commit else kept / "storm.png", outcome, title)
    return 1 if problems or system.leftovers or after < 0.9 * before else 0


if __name__ == "__main__":
    sys.exit(main())
