"""What a worker of several processes does with its group between orders."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import distributed

from slipstream.runtime.protocol.to_worker import Train
from slipstream.runtime.ranks.worker_group import GroupConnection, WorkerGroup
from slipstream.runtime.worker.order_threads import OrderThreads

ORDER = Train(order=2, first_iteration=0, schedule=b"{}")
CPU = torch.device("cpu")


class Gone:
    """The carrier of a generation that is over: its other ends are closed."""

    def allreduce(self, tensors, options):
        raise RuntimeError("Connection closed by peer")


def context_with(group):
    return SimpleNamespace(
        group=group,
        device=CPU,
        layer_store=SimpleNamespace(drop_all=lambda: None),
        links=SimpleNamespace(close_idle=lambda: None),
        checkpointer=SimpleNamespace(begin_order=lambda *_: None),
    )


def test_a_rank_that_takes_no_part_waits_for_no_other_whatever_became_of_its_last_order():
    group, failed = WorkerGroup(0, 2), []
    group.connect(GroupConnection(Gone(), lambda what: nullcontext(), CPU, staged=False))
    threads = OrderThreads(failed.append)
    before = set(threading.enumerate())
    threads.sit_out(context_with(group), ORDER, None)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    tensor = torch.ones(3)
    group.allreduce(tensor, distributed.AllreduceOptions())
    assert tensor.tolist() == [1.0, 1.0, 1.0] and not failed
