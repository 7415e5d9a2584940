"""Does faults to a real system and prints what became of it; started by ops/chaos.

Each fault gets a system of its own. One JSON line for each, and a table at the end; 1 if any failed.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos.catalog import FAULTS
from chaos.fault import Fault, Verdict, run_fault

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Do the faults, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "faults", nargs="*", metavar="FAULT", help="F3, or F5-30; F5 means all of that kind; default: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and choices")
    parser.add_argument("--repeat", type=int, default=1, help="how often, each time with the next seed")
    parser.add_argument("--list", action="store_true", help="say which there are, and end")
    args = parser.parse_args()
    if args.list:
        for fault in FAULTS.values():
            print(f"{fault.name:18} {fault.what}: {fault.expected}")
        return 0
    # Told to end, it ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Nothing stands in the state of whoever runs it.
    os.environ["CLAWQ_STATE_DIR"] = state = tempfile.mkdtemp(prefix="clawq-chaos-state-", dir="/tmp")
    verdicts = []
    for seed in range(args.seed, args.seed + args.repeat):
        for fault in chosen(args.faults, parser):
            verdicts.append(one(fault, seed))
            print(verdicts[-1].line(), flush=True)
    shutil.rmtree(state, ignore_errors=True)
    print(table(verdicts))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def chosen(names: list[str], parser: argparse.ArgumentParser) -> list[Fault]:
    """Those that were named, in that order, or all."""
    meant = {name: [key for key in FAULTS if key == name or key.startswith(f"{name}-")] for name in names}
    if unknown := [name for name, keys in meant.items() if not keys]:
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return [FAULTS[key] for keys in (meant.values() if names else [FAULTS]) for key in keys]


def one(fault: Fault, seed: int) -> Verdict:
    """One fault; what a failed one leaves is kept below runs/chaos."""
    folder = Path(tempfile.mkdtemp(prefix="clawq-chaos-run-", dir="/tmp"))
    verdict = run_fault(fault, folder / "s", seed)
    if not verdict.ok:
        kept = ROOT / "runs" / "chaos" / f"{fault.name}-{seed}-{int(time.time())}"
        shutil.copytree(folder, kept, ignore_dangling_symlinks=True)
        print(f"{fault.name}: its files are in {kept.relative_to(ROOT)}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    return verdict


def table(verdicts: list[Verdict]) -> str:
    """For people, and for ops/decisions/chaos.md."""
    lines = [
        "",
        "| fault | outcome | recovery, s | lost unacked | gaps | duplicates | rejected | seen |",
        "|" + "---|" * 8,
    ]
    for one in verdicts:
        recovery = "-" if one.recovery_s is None else f"{one.recovery_s:.1f}"
        rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(one.rejected.items()))
        words = one.seen if one.ok else "; ".join(one.problems).splitlines()[0][:200]
        lines.append(
            f"| {one.fault} | {one.outcome} | {recovery} | {one.lost_unacked} | {one.gaps} | {one.duplicates} | "
            f"{rejected} | {words} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
