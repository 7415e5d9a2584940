"""What unpinned threads cost: one TD3 update (256x256, batch 256) with one thread and with the default, on a busy box.

python ops/bench/cores.py [--quick] [--commit]

First line: one learner, and one spinning process for each core, as actors would be. Second line: as many updates at the
same time as there are cores, each in its own process, which is what N actors with N threads each do. The processes
switch between the two numbers of threads turn by turn, all together. The ratios are why `clawq.cores` sizes every
thread pool.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clawq.cores import available_cores, thread_env
from ops.bench.common import Bench, median

#: Updates of a turn before its clock runs.
WARM_UP = 10
SPIN = "import os\np = os.getppid()\nwhile os.getppid() == p:\n    sum(range(20000))\n"


def serve_turns() -> None:
    """In a child: for each line `<threads, 0 = torch's default> <seconds>` print ms for each update, and threads."""
    import numpy as np
    import torch

    from clawq.programs.parts import returns_of
    from clawq.replay.nstep import gather
    from clawq.replay.ring import ReplayRing
    from clawq.replay.samplers import UniformSampler
    from ops.bench.hands import hand_config, make_algorithm
    from ops.bench.replay import SPEC, make_fragment

    default, config = torch.get_num_threads(), hand_config()
    algorithm = make_algorithm(config, SPEC)
    ring = ReplayRing(SPEC, 10_000)
    ring.insert(make_fragment("a", np.random.default_rng(0)))
    sampler = UniformSampler(ring, torch.Generator().manual_seed(0))
    rows = torch.from_numpy(sampler.positions(config.replay.batch_size))
    batch = gather(ring, rows, returns_of(config.replay))
    for line in sys.stdin:
        threads, seconds = line.split()
        torch.set_num_threads(int(threads) or default)
        for _ in range(WARM_UP):
            algorithm.step(batch, 0.0)
        count, started_s = 0, time.perf_counter()
        while time.perf_counter() - started_s < float(seconds):
            algorithm.step(batch, 0.0)
            count += 1
        print(1e3 * (time.perf_counter() - started_s) / max(1, count), torch.get_num_threads(), flush=True)


class Updating:
    """Processes that make updates, all at the same time."""

    def __init__(self, copies: int) -> None:
        env = {name: value for name, value in os.environ.items() if name not in thread_env(1)}
        words = [sys.executable, __file__, "--turns"]
        self._children = [
            subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(copies)
        ]

    def turn(self, threads: int, seconds: float) -> tuple[float, int]:
        """Milliseconds for each update (mean over the processes), and the threads of each; 0 threads = default."""
        answers = []
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(f"{threads} {seconds}\n")
            child.stdin.flush()
        for child in self._children:
            assert child.stdout is not None
            answers.append(child.stdout.readline().split())
        return sum(float(answer[0]) for answer in answers) / len(answers), int(answers[0][1])

    def close(self) -> None:
        """End them."""
        for child in self._children:
            child.kill()
            child.wait()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many spinning processes."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    if sys.argv[1:] == ["--turns"]:
        serve_turns()
        return
    bench = Bench("cores", __doc__)
    cores, seconds = available_cores(), float(bench.pick(5, 1))
    for line, copies, spinning in (("one_update_busy_box", 1, cores), ("one_update_per_core", cores, 0)):
        pairs: list[tuple[float, float]] = []
        with ExitStack() as stack:
            updating = Updating(copies)
            stack.callback(updating.close)
            updating.turn(1, 0.5)
            stack.enter_context(busy(spinning))
            threads = 0
            for number in range(bench.pick(8, 3)):
                if number % 2:
                    (one, _), (default, threads) = updating.turn(1, seconds), updating.turn(0, seconds)
                else:
                    (default, threads), (one, _) = updating.turn(0, seconds), updating.turn(1, seconds)
                pairs.append((default, one))
        bench.ratio(
            line,
            pairs,
            "> 1: what pinning saves",
            default_ms=median([default for default, _ in pairs]),
            one_thread_ms=median([one for _, one in pairs]),
            default_threads=threads,
            copies=copies,
            spinning=spinning,
        )


if __name__ == "__main__":
    main()
