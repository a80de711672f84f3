"""The orders of others are those that are published.

They are compared with torch's, and with published bubbles and memory.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from slipstream.planner.published.orders import (
    OrderedOp,
    StageCosts,
    dual_pipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
    zero_bubble_v,
)

GRIDS = [(2, 4), (4, 8), (4, 12), (8, 16), (8, 24)]


def uniform(orders, workers, *, chains=1):
    """A job with F = I = W = 1 for a whole worker.

    What a micro-batch holds until W is 1, too.
    """
    stages = len({op.stage for ops in orders for op in ops})
    ticks = [chains * workers / stages] * stages
    return simulate(
        orders,
        StageCosts(
            forward=ticks,
            backward_input=ticks,
            backward_weight=ticks,
            activation=ticks,
            weight_stash=ticks,
            depth=stages // chains,
        ),
    )


@pytest.mark.parametrize(("workers", "microbatches"), GRIDS)
def test_ends_and_memory_are_those_of_the_papers(workers, microbatches):
    """Each order has the papers' end of an iteration and highest memory.

    Memory is in micro-batches.
    """
    work, others = 3 * microbatches, workers - 1
    for orders, end, memory in (
        (one_f_one_b(workers, microbatches), work + 3 * others, workers),
        (interleaved_1f1b(workers, microbatches, 2), work + 3 * others / 2, workers + others / 2),
        (interleaved_1f1b(workers, microbatches, 3), work + 3 * others / 3, workers + others / 3),
        (zero_bubble_h1(workers, microbatches), work + others, workers),
        (zero_bubble_v(workers, microbatches), work + others / 2, workers),
    ):
        found = uniform(orders, workers)
        assert (
            found is not None
            and found.end == pytest.approx(end)
            and max(found.peaks) == pytest.approx(memory)
        )
    both = uniform(dual_pipe(workers, microbatches), workers, chains=2)
    assert (
        both is not None and both.end <= work + workers / 2 - 1 and max(both.peaks) == workers + 1
    )


@pytest.mark.parametrize(("workers", "microbatches"), GRIDS)
def test_every_op_is_there_once(workers, microbatches):
    for orders, depth in (
        (one_f_one_b(workers, microbatches), workers),
        (interleaved_1f1b(workers, microbatches, 3), 3 * workers),
        (zero_bubble_h1(workers, microbatches), workers),
        (zero_bubble_v(workers, microbatches), 2 * workers),
        (dual_pipe(workers, microbatches), workers),
    ):
        parts = Counter()
        for ops in orders:
            for op in ops:
                kinds = "IW" if op.kind == "B" else op.kind
                parts.update(op._replace(kind=kind) for kind in kinds)
        assert len(parts) == 3 * depth * microbatches and set(parts.values()) == {1}


@pytest.mark.parametrize(("workers", "microbatches"), GRIDS)
def test_zb_v_and_interleaved_1f1b_are_torchs(workers, microbatches):
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}

    def ops(schedule, **how):
        namespace = SimpleNamespace(pp_group_size=workers, _n_microbatches=microbatches, **how)
        orders = []
        for rank in range(workers):
            actions = schedule._calculate_single_rank_operations(namespace, rank)
            orders.append(
                [
                    OrderedOp(
                        kinds[action.computation_type.name],
                        action.stage_index,
                        action.microbatch_index,
                    )
                    for action in actions
                    if action
                ]
            )
        return orders

    assert ops(torchs.ScheduleZBVZeroBubble, num_stages=2 * workers) == zero_bubble_v(
        workers, microbatches
    )
    assert ops(
        torchs.ScheduleInterleaved1F1B,
        n_local_stages=2,
        number_of_rounds=microbatches // workers,
        microbatches_per_round=workers,
    ) == interleaved_1f1b(workers, microbatches, 2)


def test_orders_that_wait_for_each_other_are_none():
    ones = [1.0, 1.0]
    costs = StageCosts(
        forward=ones,
        backward_input=ones,
        backward_weight=ones,
        activation=ones,
        weight_stash=ones,
        depth=2,
    )
    assert (
        simulate(
            [
                [OrderedOp("B", 0, 0), OrderedOp("F", 0, 0)],
                [OrderedOp("F", 1, 0), OrderedOp("B", 1, 0)],
            ],
            costs,
        )
        is None
    )
