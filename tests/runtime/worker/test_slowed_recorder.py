"""A worker of several processes that is slow on purpose.

What one waits for another is no work that takes longer.
"""

import threading
import time

import torch

from slipstream.runtime.protocol.failure_injection import Slowdown
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.worker.injected_faults import create_recorder
from slipstream.schedules.schedule import Op, OpKind, Worker

CPU = torch.device("cpu")
SLOW = Worker(0, 0)
FACTOR = 40.0
OPS = 4
BEHIND = 0.005
"""Seconds by which a rank begins later than the other.

Were they multiplied, the delay would be minutes.
"""
OP = 0.001
"""Seconds for which an op computes."""


def test_a_delay_of_one_rank_does_not_grow_from_op_to_op():
    meet, took = threading.Barrier(2, timeout=20), dict[int, float]()

    def rank(index):
        recorder = create_recorder([Slowdown(SLOW, 0, FACTOR)], CPU, WorkerGroup(index, 2))
        recorder.start_iteration(0, traced=False)
        meet.wait()
        began = time.perf_counter()
        time.sleep(BEHIND * index)
        for number in range(OPS):
            with recorder.record_op(Op(OpKind.F, 0, 0, number, SLOW, 0, 1)):
                computing = time.thread_time()
                while time.thread_time() < computing + OP:
                    pass
                meet.wait()  # as a collective of a layer
        took[index] = time.perf_counter() - began

    ranks = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(20)
    assert took.keys() == {0, 1}, "one still waits for what it takes for work of its own"
    assert OPS * FACTOR * OP < took[0] < BEHIND * FACTOR ** (OPS - 1) / 20
