"""From a problem and a plan to the arrays of the annealing kernel. The kernel's own module says what they mean."""

from typing import Any

import numpy as np

from slipstream.planner.kernel import (
    BETTER,
    BUCKETS,
    LONGEST_JUMP,
    SHIFT,
    Arcs,
    Chain,
    Instance,
    Log,
    Path,
    Queue,
    Sorting,
    State,
    Timing,
    TransferArcs,
)
from slipstream.planner.model.arrays import Ints, ProblemArrays, ints, padded
from slipstream.planner.model.problem import Problem

SPARE_UNITS = 8
"""Units that a worker may run beyond those of the busiest one at the start."""


def make_chain(arrays: ProblemArrays, order: Ints, seed: int) -> Chain:
    """A chain whose state is a plan: its assignment, and an order of all ops."""
    ops, pipelines = len(arrays.ops.duration), arrays.problem.grid.pipelines
    state = _state(arrays, order)
    return Chain(
        instance=_instance(arrays), state=state, best=State(*(array.copy() for array in state)), record=_zeros(2),
        timing=Timing(_zeros(ops), _zeros(pipelines), _zeros(pipelines)),
        trial=Timing(_zeros(ops), _zeros(pipelines), _zeros(pipelines)),
        sorting=Sorting(*(_zeros(size) for size in (ops, ops, ops, ops, len(arrays.workers)))), heads=_zeros(ops),
        queue=Queue(bucket=np.full(BUCKETS, -1, dtype=np.int64), next=_zeros(ops), queued=_zeros(ops),
                    counters=_zeros(4)),
        log=Log(op=_zeros(4 * ops), late=_zeros(4 * ops), pipeline=_zeros(pipelines), longest=_zeros(pipelines),
                excess=_zeros(pipelines), marked=_zeros(pipelines), counters=_zeros(2)),
        path=Path(_zeros(ops), ints([-1])), run=_zeros(LONGEST_JUMP), places=_zeros(arrays.ops.kinds),
        statistics=np.zeros((SHIFT + 1, BETTER + 1), dtype=np.int64), random=_random(seed))


def twin(chain: Chain, seed: int) -> Chain:
    """Another chain of the same instance that begins as a chain is now."""
    own = {field: _copied(value) for field, value in zip(Chain._fields[1:], chain[1:], strict=True)}
    own["statistics"][:] = 0
    return chain._replace(**own)._replace(random=_random(seed))


def _copied(value: Any) -> Any:
    """An array, or a tuple of arrays."""
    return value.copy() if isinstance(value, np.ndarray) else type(value)(*map(_copied, value))


def _instance(arrays: ProblemArrays) -> Instance:
    problem, workers = arrays.problem, arrays.workers
    movable = [number for number, unit in enumerate(arrays.units) if len(problem.hosts(unit.slice, unit.pipeline)) > 1]
    return Instance(
        kinds=arrays.ops.kinds, unit=arrays.ops.unit, slice=arrays.ops.slice,
        predecessors=_arcs(arrays.ops.predecessors, arrays.ops.transfer),
        successors=_arcs(arrays.ops.successors, arrays.ops.transfer),
        group=arrays.group, linked=padded(problem.linked), interleaved=int(problem.interleaved),
        sharers=arrays.reductions.sharers, ticks=arrays.reductions.ticks, awaiting=arrays.reductions.awaiting,
        between=arrays.reductions.between,
        tail=_tails(arrays),
        pipeline=ints([worker.pipeline for worker in workers]), members=_members(arrays),
        capacity=ints([problem.room(worker) if problem.memory else -1 for worker in workers]),
        holds=ints([_holds(problem, number) for number in range(len(problem.layers_of))])[arrays.ops.slice].ravel(),
        movable=ints(movable),
        hosts=_hosts(arrays), cost=_costs(arrays))


def _arcs(arcs: Arcs, transfer: int) -> TransferArcs:
    """Without the hops of the first assignment, since annealing changes it."""
    return TransferArcs(start=arcs.start, op=arcs.op, transfer=arcs.tensor * transfer)


def _state(arrays: ProblemArrays, order: Ints) -> State:
    ops = arrays.ops
    rows: list[list[int]] = [[] for _ in arrays.workers]
    place = _zeros(len(ops.duration))
    for op in order.tolist():
        row = rows[ops.worker[ops.unit[op]]]
        place[op] = len(row)
        row.append(op)
    sequence = np.zeros((len(rows), max(map(len, rows)) + SPARE_UNITS * ops.kinds), dtype=np.int64)
    for worker, row in enumerate(rows):
        sequence[worker, :len(row)] = row
    return State(worker=ops.worker.copy(), duration=ops.duration.copy(), sequence=sequence,
                 size=ints([len(row) for row in rows]), place=place,
                 end=_zeros(len(arrays.problem.linked)), deadline=_zeros(len(arrays.problem.linked)),
                 begin=_zeros(len(arrays.reductions.sharers)), turn=_zeros(len(arrays.reductions.sharers)))


def _tails(arrays: ProblemArrays) -> Ints:
    """For each worker, ticks from the end of its group to that of its window.

    Synchronous: of the job, which is the end of all windows. No step starts before the last compute op.
    """
    problem = arrays.problem
    if problem.optimizer == "staggered" or problem.linking:
        return arrays.tail
    tails = np.full(len(problem.linked), problem.longest_step)
    np.maximum.at(tails, arrays.group, arrays.tail)
    return tails[arrays.group]


def _members(arrays: ProblemArrays) -> Ints:
    """[pipeline, number] its workers."""
    members: list[list[int]] = [[] for _ in range(arrays.problem.grid.pipelines)]
    for row, worker in enumerate(arrays.workers):
        members[worker.pipeline].append(row)
    return padded(members)


def _hosts(arrays: ProblemArrays) -> Ints:
    """[slice, number] the workers that may run it."""
    row_of = {worker: row for row, worker in enumerate(arrays.workers)}
    return padded([[row_of[worker] for worker in holders] for holders in arrays.problem.holders])


def _costs(arrays: ProblemArrays) -> Ints:
    """[kind, slice, worker] ticks of an op; 0 where it cannot run."""
    problem = arrays.problem
    cost = np.zeros((len(problem.kinds), len(problem.layers_of), len(arrays.workers)), dtype=np.int64)
    row_of = {worker: row for row, worker in enumerate(arrays.workers)}
    for number, holders in enumerate(problem.holders):
        for worker in holders:
            cost[:, number, row_of[worker]] = [problem.cost(kind, number, worker) for kind in problem.kinds]
    return cost


def _holds(problem: Problem, number: int) -> tuple[int, ...]:
    """What F, I and W of a slice add to the memory that their worker holds."""
    activation, stash = problem.activation(number), problem.stash(number)
    return (activation, stash - activation, -stash)[:len(problem.kinds)]


def _zeros(size: int) -> Ints:
    return np.zeros(size, dtype=np.int64)


def _random(seed: int) -> Any:
    """The state of the random numbers: never 0, far apart for neighbouring seeds."""
    return np.array([(seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64 or 1], dtype=np.uint64)
