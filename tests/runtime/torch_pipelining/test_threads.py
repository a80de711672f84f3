"""Workers as threads of one process do not block each other."""

import subprocess
import sys

from tests import patience

PROGRAM = """
import gc, threading, time, torch
from tests.runtime.torch_pipelining.threads import take_turns

torch.get_rng_state, torch.set_rng_state = take_turns([torch.get_rng_state, torch.set_rng_state])
gc.set_threshold(1)


class Circle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.001)


def run():
    for _ in range(400):
        Circle()
        torch.get_rng_state()


threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""The collector runs while torch makes the tensor of a state, and lets another thread run."""


def test_the_collector_may_run_while_workers_use_the_generator():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=patience.SECONDS)
