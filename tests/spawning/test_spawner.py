"""The spawner keeps the logs of whatever it started under their bounds, for as long as that lives."""

from collections.abc import Callable
from pathlib import Path

from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import Spawner

Eventually = Callable[..., None]
LIMIT = 100_000


def test_the_log_of_a_child_that_nobody_looks_after_stays_bounded(tmp_path: Path, eventually: Eventually) -> None:
    (tmp_path / "chatter.py").write_text(
        "import sys\nfor line in sys.stdin:\n    print('x' * 999, file=sys.stderr, flush=True)\n"
    )
    log = LogFile(tmp_path / "child.log", LIMIT)
    child = Spawner(trim_s=0.02).spawn("chatter", log, {"PYTHONPATH": str(tmp_path)}, pipes=True)
    assert child.stdin is not None
    try:
        for _ in range(3):
            child.stdin.write(b"\n" * (LIMIT // 1000 + 1))
            eventually(lambda: log.path.exists() and log.path.with_name("child.log.1").exists(), "the tail to be kept")
            eventually(lambda: log.path.stat().st_size < LIMIT, "the log to be trimmed")
            log.path.with_name("child.log.1").unlink()
    finally:
        child.end_tree(1.0)
