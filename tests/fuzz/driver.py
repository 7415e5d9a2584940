"""Drives atheris over the targets of tests/support/fuzzing; started by ops/fuzz.

Each target runs in a process of its own, with limits: an input may take 20 s, the process 600 MB, whatever it has seen
before. What reached new code is kept in runs/fuzz, where the next run goes on from it. Only --keep makes the corpus in
the repository anew, which the default tests replay: of the old one and of what was reached, the fewest bytes that reach
the same code, up to a limit.
"""

import argparse
import hashlib
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

from clawq import plugins

ROOT = Path(__file__).resolve().parents[2]
CORPUS, FOUND = ROOT / "tests/fuzz/corpus", ROOT / "runs/fuzz"
#: Longest input, bytes; the corpus that is kept has inputs of at most the second, and the third in all.
LONGEST, LONGEST_KEPT, MOST_KEPT_BYTES = 4096, 2048, 32_000
LIMITS = ("-timeout=20", "-rss_limit_mb=600", f"-max_len={LONGEST}", "-print_final_stats=1")


def main() -> int:
    """Fuzz the targets, one after another; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(fuzzing.NAMES))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each target (default 10^6)")
    parser.add_argument("--seconds", type=int, default=0, help="end a target after so long; 0 = never")
    parser.add_argument("--keep", action="store_true", help="make tests/fuzz/corpus of what reached new code")
    if sys.argv[1:2] == ["--inside"]:
        fuzz_inside(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    args = parser.parse_args()
    targets = args.targets or list(fuzzing.NAMES)
    if unknown := set(targets) - set(fuzzing.NAMES):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(fuzzing.NAMES)}")
    return max([fuzz(name, args.runs, args.seconds, args.keep) for name in targets])


def fuzz(name: str, runs: int, seconds: int, keep: bool) -> int:
    """Fuzz one target in a process of its own; its status."""
    grown, log = FOUND / name / "grown", FOUND / name / "log.txt"
    runs = int(runs * fuzzing.SHARES.get(name, 1))
    with tempfile.TemporaryDirectory(prefix="clawq-fuzz-") as folder:
        seeds, files = Path(folder, "seeds"), Path(folder, "files")
        for made in (grown, seeds, files, CORPUS / name):
            made.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(fuzzing.target(name, files).seeds()):
            (seeds / f"seed-{number}").write_bytes(seed)
        sources = [str(grown), str(CORPUS / name), str(seeds)]
        limits = [f"-runs={runs}", f"-max_total_time={seconds}", f"-artifact_prefix={FOUND / name}/", *LIMITS]
        started_s = time.monotonic()
        with log.open("wb") as out:
            status = _atheris(name, files, [*limits, *sources], out)
        took_s = time.monotonic() - started_s
        told = dict(line.split(":", 2)[1:] for line in _lines(log) if line.startswith("stat::") for line in [line[5:]])
        count, peak = told.get("number_of_executed_units", "?").strip(), told.get("peak_rss_mb", "?").strip()
        words = "nothing found" if status == 0 else f"FOUND SOMETHING: see {log} and the files beside it"
        print(f"{name}: {count} inputs in {took_s:.0f} s, at most {peak} MB: {words}", flush=True)
        if keep and status == 0:
            status = _keep(name, files, sources, Path(folder, "kept"))
    return 1 if status else 0


def _keep(name: str, files: Path, sources: list[str], kept: Path) -> int:
    """Make the corpus anew: of all inputs there are, few and small ones that reach the same code."""
    kept.mkdir()
    again = kept.with_name("again")
    # The merging starts itself again, by the first of its arguments.
    again.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --inside {name} "{files}" "$@"\n')
    again.chmod(0o700)
    log = FOUND / name / "keep.txt"
    with log.open("wb") as out:
        arguments = ["-set_cover_merge=1", "-use_counters=0", *LIMITS, f"-max_len={LONGEST_KEPT}", str(kept), *sources]
        if _atheris(name, files, arguments, out, again):
            print(f"{name}: the corpus could not be made smaller and stays as it was: see {log}", flush=True)
            return 1
    # What once did harm stays: that has a name of its own.
    for old in (CORPUS / name).iterdir():
        if len(old.name) == 40:
            old.unlink()
    left, count = MOST_KEPT_BYTES, 0
    for path in sorted(kept.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        left -= path.stat().st_size
        if left < 0:
            break
        digest = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
        shutil.copyfile(path, CORPUS / name / digest)
        count += 1
    print(f"{name}: {count} inputs kept, {MOST_KEPT_BYTES - max(left, 0)} bytes", flush=True)
    return 0


def _atheris(name: str, files: Path, arguments: list[str], out: Any, again: Path = Path(__file__)) -> int:
    command = [sys.executable, __file__, "--inside", name, str(files), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CLAWQ_FUZZ_AGAIN": str(again)}
    return subprocess.run(command, env=environment, stdout=out, stderr=out, check=False).returncode


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def fuzz_inside(name: str, files: Path, arguments: list[str]) -> None:
    """Fuzz in this process, which ends with it: what it needs of files is in a folder of the one that started it."""
    import atheris

    logging.disable()
    # What is counted as code: ours, the YAML reader, and the tests' own checks.
    with atheris.instrument_imports(include=["clawq", "ruamel", "fuzzing"], enable_loader_override=False):
        one_input = fuzzing.target(name, files).one_input
    plugins._points = fuzzing.points_read_once()  # type: ignore[assignment]
    atheris.Setup([os.environ["CLAWQ_FUZZ_AGAIN"], *arguments], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
