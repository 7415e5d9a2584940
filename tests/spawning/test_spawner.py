"""What the spawner started: its logs stay bounded for as long as it lives, and it ends whole and alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from clawq.spawning.logfile import LogFile
from clawq.spawning.spawner import TAG_VARIABLE, Spawner

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


def test_ending_one_tree_touches_no_other_process(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import sys\nsys.stdin.read()\n")
    spawner, env = Spawner(), {"PYTHONPATH": str(tmp_path)}
    ended, other = (spawner.spawn("idle", LogFile(tmp_path / f"{n}.log"), env, pipes=True) for n in "ab")
    # Strangers: one without a tag, and one that carries the tag of another child
    stranger = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    tagged = {**os.environ, TAG_VARIABLE: other.tag}
    strangers = [subprocess.Popen(stranger, stdin=subprocess.PIPE, env=e) for e in (None, tagged)]
    try:
        ended.end_tree()
        assert ended.exited()
        assert not other.exited()
        assert [one.poll() for one in strangers] == [None, None]
        # And a tree ends whole, wherever its processes have gone
        other.end_tree()
        assert strangers[1].wait(5.0) == -signal.SIGKILL
        assert strangers[0].poll() is None
    finally:
        other.end_tree()
        for one in strangers:
            one.kill()
            one.communicate()
