"""Drives atheris over the targets of tests/support/fuzzing; started by ops/fuzz.

Each target runs in a process of its own, with limits: an input may take 20 s, the process 2 GB. Inputs that reached new
code are added to the target's corpus in the repository only with --keep, minimised then: few and small ones that reach
all that was reached, which the default tests replay.
"""

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fuzzing

ROOT = Path(__file__).resolve().parents[2]
CORPUS, FOUND = ROOT / "tests/fuzz/corpus", ROOT / "runs/fuzz"
#: Longest input, bytes; the corpus that is kept has inputs of at most the second, and so many.
LONGEST, LONGEST_KEPT, MOST_KEPT = 4096, 2048, 150


def main() -> int:
    """Fuzz the targets, one after another; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(fuzzing.NAMES))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each target (default 10^6)")
    parser.add_argument("--seconds", type=int, default=0, help="end a target after so long; 0 = never")
    parser.add_argument("--keep", action="store_true", help="make tests/fuzz/corpus of what reached new code")
    if sys.argv[1:2] == ["--inside"]:
        fuzz_inside(sys.argv[2], sys.argv[3:])
    args = parser.parse_args()
    targets = args.targets or list(fuzzing.NAMES)
    if unknown := set(targets) - set(fuzzing.NAMES):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(fuzzing.NAMES)}")
    return max([fuzz(name, args.runs, args.seconds, args.keep) for name in targets])


def fuzz(name: str, runs: int, seconds: int, keep: bool) -> int:
    """Fuzz one target in a process of its own; its status."""
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="clawq-fuzz-") as folder:
        grown, seeds = Path(folder, "grown"), Path(folder, "seeds")
        for made in (grown, seeds, CORPUS / name):
            made.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(fuzzing.target(name).seeds()):
            (seeds / f"seed-{number}").write_bytes(seed)
        log = FOUND / name / "log.txt"
        limits = [f"-runs={runs}", f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=2048"]
        limits += [f"-max_len={LONGEST}", f"-artifact_prefix={FOUND / name}/", "-print_final_stats=1"]
        started_s = time.monotonic()
        with log.open("wb") as out:
            status = _atheris(name, [*limits, str(grown), str(CORPUS / name), str(seeds)], out)
        took_s = time.monotonic() - started_s
        told = dict(line.split(":", 2)[1:] for line in _lines(log) if line.startswith("stat::") for line in [line[5:]])
        count, peak = told.get("number_of_executed_units", "?").strip(), told.get("peak_rss_mb", "?").strip()
        words = "nothing found" if status == 0 else f"FOUND SOMETHING: see {log} and the files beside it"
        print(f"{name}: {count} inputs in {took_s:.0f} s, at most {peak} MB: {words}", flush=True)
        if keep:
            _keep(name, grown)
        return 1 if status else 0


def _keep(name: str, grown: Path) -> None:
    """Make the corpus anew: the smallest of the inputs that reached new code, or the same code with fewer bytes."""
    small = [path for path in grown.iterdir() if path.stat().st_size <= LONGEST_KEPT]
    kept = sorted(small, key=lambda path: (path.stat().st_size, path.name))[:MOST_KEPT]
    # What once did harm stays: that has a name of its own.
    for old in (CORPUS / name).iterdir():
        if len(old.name) == 40:
            old.unlink()
    for path in kept:
        shutil.copy(path, CORPUS / name / path.name)
    print(f"{name}: {len(kept)} inputs kept", flush=True)


def _atheris(name: str, arguments: list[str], out: Any) -> int:
    command = [sys.executable, __file__, "--inside", name, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, env=environment, stdout=out, stderr=out, check=False).returncode


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def fuzz_inside(name: str, arguments: list[str]) -> None:
    """Fuzz in this process, which ends with it."""
    import atheris

    logging.disable()
    # What is counted as code: ours, the YAML reader, and the tests' own checks.
    with atheris.instrument_imports(include=["clawq", "ruamel", "fuzzing"], enable_loader_override=False):
        one_input = fuzzing.target(name).one_input
    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
