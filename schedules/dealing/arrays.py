"""Convert a schedule to the arrays that dealing replays."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.kernel import Arrays, Ints
from slipstream.schedules.graph import pipeline_groups
from slipstream.schedules.schedule import Op, OpKind, Schedule, Worker
from slipstream.schedules.timing import ReplayStep, replay_steps

COSTS = (OpKind.F, OpKind.I, OpKind.W)
"""Kinds of op for which a sample has a cost at every slice."""


def arrays_of(schedule: Schedule) -> Arrays:
    """Return the steps of an iteration as arrays, divided into blocks.

    Steps are ops and whole all-reduces. Blocks are replayed one after the other. The compute ops of
    pipelines that share micro-batches form one block. The last block, the tail, has the reductions
    and optimizer steps. If compute ops follow reductions, all steps are in one block, and the tail
    is empty. Raises ValueError if ops wait for each other in a circle.
    """
    steps, workers = replay_steps(schedule)
    first = list(accumulate(schedule.grid.microbatches, initial=0))
    group_of = {
        pipeline: number
        for number, group in enumerate(pipeline_groups(schedule))
        for pipeline in group
    }
    number_of = {seat.worker: number for number, seat in enumerate(schedule.seats)}
    # A tail is replayed after all compute ops, so there is none if some of them follow reductions.
    if _computes_after_reductions(steps, workers):
        group_of = dict.fromkeys(group_of, 0)
        blocks = [0] * len(steps)
    else:
        tail = len(set(group_of.values()))
        blocks = [_block_of(step, group_of, tail) for step in steps]
    # The sort is stable: each step stays after what it waits for.
    order = sorted(range(len(steps)), key=lambda number: blocks[number])
    place = {number: index for index, number in enumerate(order)}
    ordered = [steps[number] for number in order]
    counts = np.bincount(
        [blocks[number] for number in order], minlength=len(set(group_of.values())) + 1
    )
    works = np.array(list(_cost_columns(schedule, ordered)), np.int64)
    release = np.zeros(workers, np.int64)
    for seat in schedule.seats:  # also sets the link of the worker, if links are numbered
        release[number_of[seat.worker] :: len(number_of)] = min(
            op.start_ticks for op in schedule.programs[seat.program]
        )
    # Entries of variable number, such as awaited steps, lie one after the other in an array; a
    # second array says where those of each step begin.
    return Arrays(
        begin=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        worker=_int_array(step.workers[0] for step in ordered),
        name=_int_array(_name_number(step, first) for step in ordered),
        column=works[:, :2].copy(),
        ticks=works[:, 2:].copy(),
        source_begin=_int_array(accumulate((len(step.sources) for step in ordered), initial=0)),
        source=_int_array(place[source] for step in ordered for source, _ in step.sources),
        hop=_int_array(hop for step in ordered for _, hop in step.sources),
        other_begin=_int_array(accumulate((len(step.workers) - 1 for step in ordered), initial=0)),
        other=_int_array(worker for step in ordered for worker in step.workers[1:]),
        block_of=_int_array(
            group_of[pipeline]
            for pipeline, count in enumerate(schedule.grid.microbatches)
            for _ in range(count)
        ),
        release=release,
    )


def _block_of(step: ReplayStep, group_of: Mapping[int, int], tail: int) -> int:
    """Return the block of a step: its pipeline's group for a compute op, else `tail`."""
    if step.is_compute and step.op.pipeline is not None:
        return group_of[step.op.pipeline]
    return tail


def _name_number(step: ReplayStep, first: Sequence[int]) -> int:
    """Return the number of a step's micro-batch over all pipelines; -1 if it has none."""
    pipeline, microbatch = step.op.pipeline, step.op.microbatch
    if not step.is_compute or pipeline is None or microbatch is None:
        return -1
    return first[pipeline] + microbatch


def _computes_after_reductions(steps: Sequence[ReplayStep], workers: int) -> bool:
    """Return whether any worker runs a compute op after a reduction or optimizer step."""
    reduced = [False] * workers
    for step in steps:
        if step.is_compute and reduced[step.workers[0]]:
            return True
        for worker in step.workers:
            reduced[worker] |= not step.is_compute
    return False


def _cost_kinds(op: Op) -> tuple[OpKind, ...]:
    """Return the kinds of op whose costs scale the duration of this op."""
    # B runs I and W.
    return (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)


def _cost_columns(
    schedule: Schedule, steps: Iterable[ReplayStep]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each step its rows of `Arrays.column` and `Arrays.ticks`, joined."""
    # A sample's costs are a row with index 3 x slice + kind (`COSTS`). Only B has two of them; -1
    # stands for a cost that is missing.
    scaling: dict[tuple[OpKind, int, Worker], tuple[int, int, int, int]] = {}
    for step in steps:
        op = step.op
        if not step.is_compute or op.slice is None:
            yield -1, -1, step.planned_ticks, 0
            continue
        key = op.kind, op.slice, op.worker
        if key not in scaling:
            columns = [len(COSTS) * op.slice + COSTS.index(kind) for kind in _cost_kinds(op)]
            ticks = [
                schedule.times.duration_ticks(kind, op.slice, op.worker) for kind in _cost_kinds(op)
            ]
            scaling[key] = columns[0], [*columns, -1][1], ticks[0], [*ticks, 0][1]
        yield scaling[key]


def shares_of(schedule: Schedule) -> npt.NDArray[np.float64]:
    """Return which share of each slice's layers lies in each stage, [slices, stages]."""
    grid = schedule.grid
    shares = np.zeros((len(schedule.layers_by_slice), grid.depth))
    for slice_, (first, end) in enumerate(schedule.layers_by_slice):
        for stage in range(grid.depth):
            own_first, own_end = grid.layers_by_stage[stage]
            shares[slice_, stage] = max(0, min(end, own_end) - max(first, own_first)) / (
                end - first
            )
    return shares


def _int_array(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)
