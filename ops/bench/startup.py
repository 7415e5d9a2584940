"""From exec of `clawq up configs/hand_reach.yaml` to the first env step, and the wall time of `clawq --help`.

python ops/bench/startup.py [--quick] [--commit]

The first env step is dated by the first fragment: its header says when it was closed, it lasted at least
`actors.fragment_s`, so with T steps its first one ended at the latest `fragment_s * (T - 1) / T` before. The stages on
the way (servers announced, run registered, slot claimed, weights published) are seen by polling Redis every 50 ms.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clawq.state import ServerState
from clawq.transport.client import connect
from clawq.transport.codec import peek_meta
from clawq.transport.control import RunRecord, RunRegistry
from ops.bench.common import ROOT, Bench, clean_env, median, scratch, wait_for
from ops.bench.hands import HAND, hand_config

CLAWQ = str(Path(sys.executable).with_name("clawq"))
START_S = 120.0
END_S = 30.0


def first_step(folder: Path) -> dict[str, float]:
    """Start a run, and end it once it acts; seconds from exec to each stage."""
    env = clean_env(folder)
    log = (folder / "output.log").open("ab")
    started_s = time.time()
    process = subprocess.Popen(
        [CLAWQ, "up", str(HAND), f"folder={folder / 'runs'}"], env=env, stdout=log, stderr=log, cwd=ROOT
    )
    stages: dict[str, float] = {}

    def reached(stage: str, look: Callable[[], Any]) -> Any:
        found = wait_for(stage, look, START_S)
        stages[stage] = time.time() - started_s
        return found

    try:
        state: ServerState = reached("servers_s", lambda: ServerState.read(folder / "state"))
        registry = RunRegistry(connect(state.broker_url))
        record: RunRecord = reached("registered_s", lambda: next(iter(registry.list()), None))
        data: Any = connect(state.data_url)
        slot: bytes = reached("claimed_s", lambda: next(iter(data.hkeys(record.keys.slots)), None))
        reached("published_s", lambda: int(data.hget(record.keys.control, "head") or 0))
        stream = record.keys.stream(slot.decode())
        entries = reached("fragment_s", lambda: data.xrange(stream, count=1))
        meta = peek_meta(entries[0][1][b"f"])
    except BaseException:
        sys.stderr.write((folder / "output.log").read_text(errors="replace")[-3000:])
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
    least_s = hand_config().actors.fragment_s * (meta.steps - 1) / meta.steps
    stages["first_step_s"] = meta.created_ms / 1e3 - started_s - least_s
    return stages


def help_s() -> float:
    """Wall time of `clawq --help`."""
    started_s = time.perf_counter()
    subprocess.run([CLAWQ, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started_s


def main() -> None:
    bench = Bench("startup", __doc__)
    help_s()
    times = [help_s() for _ in range(bench.pick(15, 5))]
    bench.result("help", median(times), "s", "<= 0.3", samples=times)
    found = []
    for _ in range(bench.pick(7, 2)):
        with scratch() as folder:
            found.append(first_step(folder))
    stages = {stage: median([each[stage] for each in found]) for stage in found[0] if stage != "first_step_s"}
    times = [each["first_step_s"] for each in found]
    bench.result("first_step", median(times), "s", "<= 8", samples=times, **stages)


if __name__ == "__main__":
    main()
