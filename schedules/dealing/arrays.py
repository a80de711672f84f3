"""Convert a schedule to the arrays that dealing replays."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.kernel import Arrays, Ints
from slipstream.schedules.graph import pipeline_groups
from slipstream.schedules.schedule import Op, OpKind, Schedule, Worker
from slipstream.schedules.timing import ReplayStep, replay_steps

COSTS = (OpKind.F, OpKind.I, OpKind.W)
"""Kinds of op by whose costs an op's ticks are scaled; a sample has a cost for each of them at each slice."""


def arrays_of(schedule: Schedule) -> Arrays:
    """Return the steps of an iteration (ops, and whole all-reduces) as arrays, in blocks to be replayed one after the
    other.

    The compute ops of pipelines that share micro-batches form one block. The last block, the tail, has the reductions
    and optimizer steps. If compute ops follow reductions, all steps are in one block. Raises ValueError if ops wait for
    each other in a circle.
    """
    steps, workers = replay_steps(schedule)
    first = list(accumulate(schedule.grid.microbatches, initial=0))
    group_of = {pipeline: number for number, group in enumerate(pipeline_groups(schedule)) for pipeline in group}
    number_of = {seat.worker: number for number, seat in enumerate(schedule.seats)}
    if _computes_after_reductions(steps, workers):
        group_of = dict.fromkeys(group_of, 0)
        blocks = [0] * len(steps)
    else:
        tail = len(set(group_of.values()))
        blocks = [group_of[step.op.pipeline] if step.is_compute and step.op.pipeline is not None else tail
                  for step in steps]
    order = sorted(range(len(steps)), key=lambda number: blocks[number])  # stable: each stays after what it waits for
    place = {number: index for index, number in enumerate(order)}
    ordered = [steps[number] for number in order]
    counts = np.bincount([blocks[number] for number in order], minlength=len(set(group_of.values())) + 1)
    works = np.array(list(_cost_columns(schedule, ordered)), np.int64)
    release = np.zeros(workers, np.int64)
    for seat in schedule.seats:  # also sets the link of the worker, if links are numbered
        release[number_of[seat.worker]::len(number_of)] = min(op.start_ticks for op in schedule.programs[seat.program])
    return Arrays(
        begin=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        worker=_int_array(step.workers[0] for step in ordered),
        name=_int_array(first[step.op.pipeline] + step.op.microbatch if step.is_compute else -1 for step in ordered),  # type: ignore[index, operator]
        column=works[:, :2].copy(),
        ticks=works[:, 2:].copy(),
        source_begin=_int_array(accumulate((len(step.sources) for step in ordered), initial=0)),
        source=_int_array(place[source] for step in ordered for source, _ in step.sources),
        hop=_int_array(hop for step in ordered for _, hop in step.sources),
        other_begin=_int_array(accumulate((len(step.workers) - 1 for step in ordered), initial=0)),
        other=_int_array(worker for step in ordered for worker in step.workers[1:]),
        block_of=_int_array(group_of[pipeline] for pipeline, count in enumerate(schedule.grid.microbatches)
                            for _ in range(count)),
        release=release)


def _computes_after_reductions(steps: Sequence[ReplayStep], workers: int) -> bool:
    """Return whether any worker runs a compute op after a reduction or optimizer step of the same iteration; `steps`
    are in order of the replay."""
    reduced = [False] * workers
    for step in steps:
        if step.is_compute and reduced[step.workers[0]]:
            return True
        for worker in step.workers:
            reduced[worker] |= not step.is_compute
    return False


def _cost_kinds(op: Op) -> tuple[OpKind, ...]:
    """Return the kinds of op (F, I, W) whose times in a sample, relative to the mean, scale this op: B has those of I
    and W, others their own."""
    return (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)


def _cost_columns(schedule: Schedule, steps: Iterable[ReplayStep]) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over the steps, each as (index of its cost, index of a second cost, ticks for the first, ticks for the
    second). A cost is a sample's factor on the ticks of one kind of op at a slice.

    A sample's costs are indexed by slice and kind, 3 x slice + kind. Only B has two; a missing index is -1.
    """
    known: dict[tuple[OpKind, int, Worker], tuple[int, int, int, int]] = {}
    for step in steps:
        op = step.op
        if not step.is_compute or op.slice is None:
            yield -1, -1, step.planned_ticks, 0
            continue
        key = op.kind, op.slice, op.worker
        if key not in known:
            columns = [len(COSTS) * op.slice + COSTS.index(kind) for kind in _cost_kinds(op)]
            ticks = [schedule.times.duration_ticks(kind, op.slice, op.worker) for kind in _cost_kinds(op)]
            known[key] = columns[0], [*columns, -1][1], ticks[0], [*ticks, 0][1]
        yield known[key]


def shares_of(schedule: Schedule) -> npt.NDArray[np.float64]:
    """Return, for each slice, the fraction of its layers that lies in each stage of a route, [slices, stages]. A slice
    that is a stage has a single 1."""
    grid = schedule.grid
    shares = np.zeros((len(schedule.layers_by_slice), grid.depth))
    for slice_, (first, end) in enumerate(schedule.layers_by_slice):
        for stage in range(grid.depth):
            own_first, own_end = grid.layers_by_stage[stage]
            shares[slice_, stage] = max(0, min(end, own_end) - max(first, own_first)) / (end - first)
    return shares


def _int_array(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)
