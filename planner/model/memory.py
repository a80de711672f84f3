"""Look up the memory that ops take in a problem, and that its workers have."""

from collections.abc import Sequence
from itertools import accumulate, chain

from slipstream.planner.model.problem import Problem
from slipstream.schedules.memory import memory_change, peak_memory, weights_of
from slipstream.schedules.schedule import Worker


def activation_memory(problem: Problem, slice_: int) -> int:
    """Return a micro-batch's memory units from F's start to I's or B's end.

    0 if memory is unlimited.
    """
    return problem.memory.activation[slice_] if problem.memory else 0


def stash_memory(problem: Problem, slice_: int) -> int:
    """Return a micro-batch's memory units from the end of I to the end of W.

    0 if fused or if memory is unlimited.
    """
    if problem.memory is None or problem.backward != "split":
        return 0
    return problem.memory.weight_stash[slice_]


def memory_changes(problem: Problem, slice_: int) -> tuple[int, ...]:
    """Return the memory units that each op of a unit takes; negative if freed."""
    return tuple(
        memory_change(kind, activation_memory(problem, slice_), stash_memory(problem, slice_))
        for kind in problem.op_kinds
    )


def peak_slice_memory(problem: Problem, slice_: int) -> int:
    """Return the most memory units that a micro-batch of a slice takes; 0 if unlimited."""
    return peak_memory(activation_memory(problem, slice_), stash_memory(problem, slice_))


def min_room(problem: Problem, stage: int) -> int:
    """Return the memory units that let a micro-batch finish once it has begun a stage.

    Later stages of the same direction on the worker count, too; their W can be done before the
    gradient is back at this stage. If every worker has this room for each of its stages, a plan
    exists: one micro-batch after the other, each W directly after its I.
    """
    return _peak_in_turn(
        [memory_changes(problem, later_stage) for later_stage in _later_stages(problem, stage)]
    )


def needed_room(problem: Problem, stage: int, *, alone: bool = False) -> int:
    """Return the memory units without which no plan exists: those of one micro-batch.

    Later stages of the same direction on the worker count, too, unless `alone`: other workers may
    then run the micro-batch there. What is held for no time takes none (`Problem.held_amounts`).
    """
    stages = [stage] if alone else _later_stages(problem, stage)
    changes = []
    for later_stage in stages:
        activation, stash = problem.held_amounts(later_stage)
        changes.append(tuple(memory_change(kind, activation, stash) for kind in problem.op_kinds))
    return _peak_in_turn(changes)


def _later_stages(problem: Problem, stage: int) -> list[int]:
    """Return this stage and the later ones of its column in the same direction."""
    # Stages of the other direction are numbered from `depth` on.
    depth = problem.grid.depth
    return [
        other
        for other in problem.grid.stages_of_column(problem.column_of[stage])
        if other >= stage and other // depth == stage // depth
    ]


def _peak_in_turn(changes: Sequence[tuple[int, ...]]) -> int:
    """Return the peak memory of a micro-batch, given what its ops change at each stage.

    `changes` has by stage the changes by F, I and W, or by F and B.
    """
    # F at all stages, then backward through them in reverse order.
    forwards = [change[0] for change in changes]
    backwards = chain.from_iterable(change[1:] for change in reversed(changes))
    return max(accumulate((*forwards, *backwards)))


def activation_capacity(problem: Problem, worker: Worker) -> int:
    """Return the memory units of a live worker that weights leave for activations."""
    properties = problem.workers[worker]
    return properties.memory - weights_of(problem.memory, properties.holds)
