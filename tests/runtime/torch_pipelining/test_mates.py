"""Workers of two ranks.

One may notice a death while the other is in a collective inside the worker.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.runtime.replay.torch_groups import (
    Group,
    HashStore,
    PrefixStore,
    create_gloo_group,
    open_gloo_devices,
)
from slipstream.runtime.torch_pipelining import CommunicationError, Place, Routes
from slipstream.runtime.torch_pipelining.mates import Mates
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid
from tests.runtime.torch_pipelining.test_ends import die
from tests.runtime.torch_pipelining.threads import (
    build_stage,
    gradients_alone,
    make_schedule,
    run_step,
)

RANKS = 2
SECONDS = 120
MICROBATCHES = [2, 2]
"""Of each pipeline."""
DYING = Worker(0, 0)
AFTER = Worker(0, 1)
pytestmark = pytest.mark.usefixtures("one_process")


def plan(down):
    return planned(grid(2, 2, MICROBATCHES), down, optimizer="synchronous")


class InnerMean(torch.autograd.Function):
    """Mean over the ranks of a worker, which have the same value.

    They wait for each other in both directions.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return mean_of_ranks(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return mean_of_ranks(gradient, ctx.group), None


def mean_of_ranks(value: Tensor, group: Group) -> Tensor:
    total = value.detach().clone(memory_format=torch.contiguous_format)
    group.allreduce([total]).wait()
    return total / RANKS


class InnerStage(nn.Module):
    """A stage with a collective inside the worker, before which it sets an event."""

    def __init__(self, stage: int, group: Group) -> None:
        super().__init__()
        self.whole, self.group, self.entered = build_stage(stage), group, threading.Event()

    def forward(self, value: Tensor) -> Tensor:
        self.entered.set()
        return InnerMean.apply(self.whole(value), self.group)


class DeathError(Exception):
    pass


class Rank:
    """A rank of a worker, as a thread: its connections, and its stages."""

    def __init__(self, routes: Routes, store: HashStore, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number
        self.group = create_gloo_group(
            PrefixStore(f"inner {worker}", store),
            number,
            RANKS,
            timedelta(seconds=SECONDS),
            open_gloo_devices(),
        )
        self.place = Place(
            routes,
            worker,
            number,
            RANKS,
            store,
            "127.0.0.1",
            device=torch.device("cpu"),
            transport="gloo",
            patience=SECONDS,
        )
        self.stages = {stage: InnerStage(stage, self.group) for stage in routes.stages_of(worker)}

    def run_iteration(self) -> None:
        for module in self.stages.values():
            module.zero_grad()
            module.entered.clear()
        run_step(make_schedule(self.place, self.stages))
        self.place.commit()

    def die_in_first_send(self, entered: threading.Event) -> None:
        """Send from rank 1 alone, and die once the receiver has begun with it."""
        send = self.place.session.send

        def send_and_die(*tensor: Any) -> None:
            if self.number == 1:
                send(*tensor).wait()
            assert entered.wait(SECONDS)
            die(self.place)
            raise DeathError

        self.place.session.send = send_and_die

    def recover_and_run(self) -> None:
        while True:
            assert not self.place.recover()
            try:
                return self.run_iteration()
            # Threads of one process: their aborts break each other's connections.
            except CommunicationError:
                continue


def test_all_ranks_of_a_worker_recover_whichever_notices_a_death():
    # Rank 0 of worker 0.1 misses its input, while rank 1 is in a collective that rank 0 has not
    # joined.
    routes, store, entered = Routes.read(plan), HashStore(), []
    size = RANKS * len(routes.workers)
    connected, has_begun = threading.Barrier(size), threading.Barrier(size)

    def run(worker: Worker, number: int) -> Any:
        rank = Rank(routes, store, worker, number)
        connected.wait(SECONDS)  # an abort shuts all sockets of this process that are opened later
        rank.place._begin()
        rank.run_iteration()
        rank.stages[worker.column].entered.clear()
        if (worker, number) == (AFTER, 1):
            entered.append(rank.stages[1].entered)
        has_begun.wait(SECONDS)
        if worker == DYING:
            rank.die_in_first_send(entered[0])
            with pytest.raises(DeathError):
                rank.run_iteration()
            return None
        with pytest.raises(CommunicationError):
            rank.run_iteration()
        rank.recover_and_run()
        rank.place.close()
        gradients = []
        for stage, module in rank.stages.items():
            gradients.append((stage, [parameter.grad for parameter in module.parameters()]))
        return rank.place.routes.failed, rank.place.committed, gradients

    with ThreadPoolExecutor(size) as pool:
        results = [
            pool.submit(run, worker, number) for worker in routes.workers for number in range(RANKS)
        ]
        found = [result for future in results if (result := future.result(4 * SECONDS)) is not None]
    alone = gradients_alone(build_stage, 2, MICROBATCHES)
    assert len(found) == size - RANKS
    for failed, committed, gradients in found:
        assert (failed, committed) == ((DYING,), 2)
        for stage, gradient in gradients:
            torch.testing.assert_close(gradient, alone[stage], rtol=1e-12, atol=1e-12)


def with_two_mates(run) -> list[Any]:
    """Run a function on both ranks of a worker, in threads.

    It takes their number and the mates.
    """
    store = HashStore()

    def run_rank(number: int) -> Any:
        mates = Mates(number, RANKS, lambda: None)
        mates.connect(store, SECONDS)
        return run(number, mates)

    with ThreadPoolExecutor(RANKS) as pool:
        return [*pool.map(run_rank, range(RANKS), timeout=4 * SECONDS)]


def test_an_error_of_one_rank_is_raised_by_all_and_what_one_rank_knows_by_none():
    def run(number: int, mates: Mates) -> Any:
        with pytest.raises(CommunicationError) as raised, mates.failing_together():
            if number == 0:
                raise CommunicationError("lost")
        with mates.deferring_errors():
            if number == 1:
                raise CommunicationError("lost")
        settlement = mates.settle([3.0 - number, 5.0], needs_all=False)
        mates.settle()
        return str(raised.value), settlement

    assert with_two_mates(run) == [
        ("lost", [3.0, 5.0]),
        ("another rank of this worker has lost a connection", [3.0, 5.0]),
    ]


def test_a_rank_that_recovers_alone_is_heard_where_the_other_settles_next():
    def run(number: int, mates: Mates) -> None:
        if number == 1:
            with pytest.raises(
                CommunicationError, match=r"^another rank of this worker has lost a connection$"
            ):
                mates.settle()
        # Says nothing more where all know of a failure.
        mates.fail("an error that others were not asked about")
        mates.settle()

    with_two_mates(run)
