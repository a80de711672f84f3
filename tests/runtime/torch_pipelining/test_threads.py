"""Workers as threads of one process do not block each other."""

import subprocess
import sys

from tests import patience

PROGRAM = """
import gc, threading, torch
from tests.runtime.torch_pipelining.threads import take_turns

torch.get_rng_state, torch.set_rng_state = take_turns([torch.get_rng_state, torch.set_rng_state])
gc.set_threshold(1)


def run():
    for _ in range(1000):
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.circle = [parameter]
        parameter.grad = torch.zeros(1)
        del parameter
        with torch.random.fork_rng(devices=[]):
            pass


threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""Threads use torch's generator, while the collector runs as often as it can."""


def test_the_collector_may_run_while_workers_use_the_generator():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=patience.SECONDS)
