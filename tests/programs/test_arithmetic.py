"""How torch computes: in processes of their own, since it holds for a whole process."""

import subprocess
import sys

#: One process for each number of threads; they share what takes longest, which is importing torch.
SMALL = """
import os, threading, torch
from clawq.programs.arithmetic import set_up_torch

def compute(threads):
    set_up_torch(threads)
    numbers = torch.full((1 << 20,), 2e-38)
    products = []
    thread = threading.Thread(target=lambda: products.append((numbers * 0.1).count_nonzero().item()))
    thread.start()
    thread.join()
    print(products[0], (numbers * 0.1).count_nonzero().item(), (numbers * 1.0).count_nonzero().item(), flush=True)

for threads in (1, 2):
    if not (child := os.fork()):
        compute(threads)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_numbers_next_to_nothing_are_zero_in_every_thread() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, check=True)
    # In another thread, here, and what is just large enough to be a normal number; with one thread and with two.
    assert done.stdout.splitlines() == [f"0 0 {1 << 20}"] * 2
