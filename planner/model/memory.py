"""Look up what ops hold in a problem, and its workers' room (`schedules.memory`)."""

from collections.abc import Sequence
from itertools import accumulate, chain

from slipstream.planner.model.problem import Problem
from slipstream.schedules.memory import memory_change, peak_memory, weights_of
from slipstream.schedules.schedule import Worker


def activation_memory(problem: Problem, slice_: int) -> int:
    """Return a micro-batch's memory units from F's start to I's or B's end; 0: unlimited."""
    return problem.memory.activation[slice_] if problem.memory else 0


def stash_memory(problem: Problem, slice_: int) -> int:
    """Return a micro-batch's memory units from I's end to W's; 0 if fused or unlimited."""
    return problem.memory.weight_stash[slice_] if problem.memory and problem.backward == "split" else 0


def memory_changes(problem: Problem, slice_: int) -> tuple[int, ...]:
    """Return by how many memory units each op of a unit, in order, changes memory."""
    return tuple(memory_change(kind, activation_memory(problem, slice_), stash_memory(problem, slice_))
                 for kind in problem.op_kinds)


def peak_slice_memory(problem: Problem, slice_: int) -> int:
    """Return the most memory units that a micro-batch of a slice takes; 0 if unlimited."""
    return peak_memory(activation_memory(problem, slice_), stash_memory(problem, slice_))


def min_room(problem: Problem, stage: int) -> int:
    """Return the memory with which a micro-batch of a stage can always go on.

    It lasts from the start of F to the end of W. The worker may hold later stages of the same
    direction; their W can be done before the gradient is back at this stage. If every worker has
    this room for each of its stages, a plan exists: one micro-batch after the other, each W
    directly after its I.
    """
    return _peak_in_turn([memory_changes(problem, other) for other in _later_stages(problem, stage)])


def needed_room(problem: Problem, stage: int, *, alone: bool = False) -> int:
    """Return the memory without which no plan exists: of one micro-batch, as in `min_room`.

    What is held for no time takes none (`Problem.held_amounts`). With `alone`, other workers may
    run the micro-batch at the later stages that this one's worker holds.
    """
    stages = [stage] if alone else _later_stages(problem, stage)
    return _peak_in_turn([tuple(memory_change(kind, *problem.held_amounts(other)) for kind in problem.op_kinds)
                          for other in stages])


def _later_stages(problem: Problem, stage: int) -> list[int]:
    """Return this stage and the later ones of its column in the same direction."""
    return [other for other in problem.grid.stages_of_column(problem.column_of[stage])
            if other >= stage and other // problem.grid.depth == stage // problem.grid.depth]


def _peak_in_turn(changes: Sequence[tuple[int, ...]]) -> int:
    """Return the peak memory of a micro-batch whose ops make these changes at each stage."""
    backwards = chain.from_iterable(change[1:] for change in reversed(changes))
    return max(accumulate((*(change[0] for change in changes), *backwards)))


def activation_room(problem: Problem, worker: Worker) -> int:
    """Return the memory of a live worker that its weights leave for activations."""
    properties = problem.workers[worker]
    return properties.room - weights_of(problem.memory, properties.holds)
