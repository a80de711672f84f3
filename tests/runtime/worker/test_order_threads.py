"""What a worker of several processes does with its group between orders."""

import queue
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import distributed

from slipstream.runtime.model.layers.worker_group import Connection, WorkerGroup
from slipstream.runtime.protocol.to_worker import Train
from slipstream.runtime.worker import order_threads
from slipstream.runtime.worker.order_threads import OrderThreads

ORDER = Train(order=2, first_iteration=0, schedule=b"{}")
CPU = torch.device("cpu")


class Gone:
    """The carrier of a generation that is over: its other ends are closed."""

    def allreduce(self, tensors, options):
        raise RuntimeError("Connection closed by peer")


def context_with(group):
    return SimpleNamespace(group=group, device=CPU, layer_store=SimpleNamespace(clear=lambda: None),
                           links=SimpleNamespace(close=lambda: None))


def test_a_rank_that_takes_no_part_waits_for_no_other_whatever_became_of_its_last_order():
    group, failed = WorkerGroup(0, 2), []
    group.connect(Connection(Gone(), lambda what: nullcontext(), CPU, staged=False))
    threads = OrderThreads(failed.append)
    before = set(threading.enumerate())
    threads.stand_aside(context_with(group), ORDER, None)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    tensor = torch.ones(3)
    group.allreduce(tensor, distributed.AllreduceOptions())
    assert tensor.tolist() == [1.0, 1.0, 1.0] and not failed


def test_a_test_of_speed_is_over_before_the_ranks_meet_for_an_order(monkeypatch):
    """Its collectives would else be taken for those of the order."""
    going, done, ran = threading.Event(), [], threading.Event()
    monkeypatch.setattr(order_threads, "_measure_speed", lambda *_: (going.wait(20), done.append("measured")))
    threads = OrderThreads(done.append)
    generation = SimpleNamespace(run=lambda: (done.append("trains"), ran.set()))
    for _ in range(2):
        threads.measure_speed(context_with(WorkerGroup(0, 2)), None)
    threads.train(context_with(WorkerGroup(0, 2)), ORDER, generation, None)
    assert not ran.wait(0.1)
    going.set()
    assert ran.wait(20) and done == ["measured", "measured", "trains"]


def test_an_order_does_not_wait_for_ever_for_a_test_of_speed(monkeypatch):
    over, told = threading.Event(), queue.Queue()
    monkeypatch.setattr(order_threads, "SPEED_TEST_SECONDS", 0.1)
    monkeypatch.setattr(order_threads, "_measure_speed", lambda *_: over.wait(60))
    threads = OrderThreads(told.put)
    threads.measure_speed(context_with(WorkerGroup(0, 2)), None)
    threads.train(context_with(WorkerGroup(0, 2)), ORDER, SimpleNamespace(run=lambda: told.put("trains")), None)
    said = told.get(timeout=30)
    over.set()
    assert isinstance(said, TimeoutError) and str(said) == "a speed test has not ended within 0.1 s"
