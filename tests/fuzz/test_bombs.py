import subprocess
import sys
from pathlib import Path

BOMBS = Path(__file__).parents[1] / "support" / "bombs.py"


def test_every_bomb_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    # A process of its own, for the limit; one for all, because importing takes longer than they do.
    command = [sys.executable, str(BOMBS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
