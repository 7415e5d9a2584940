"""How torch computes: in processes of their own, since it holds for a whole process."""

import subprocess
import sys

import pytest

SMALL = """
import threading, torch
from clawq.programs.arithmetic import set_up_torch
set_up_torch(THREADS)
numbers = torch.full((1 << 20,), 2e-38)
products = []
thread = threading.Thread(target=lambda: products.append((numbers * 0.1).count_nonzero().item()))
thread.start()
thread.join()
print(products[0], (numbers * 0.1).count_nonzero().item(), (numbers * 1.0).count_nonzero().item())
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_next_to_nothing_are_zero_in_every_thread(threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL.replace("THREADS", str(threads))], capture_output=True, text=True, check=True
    )
    # In another thread, here, and what is just large enough to be a normal number.
    assert done.stdout.split() == ["0", "0", str(1 << 20)]
