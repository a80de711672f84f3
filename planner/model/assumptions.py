"""Assumptions of the lemmas on bounds (docs/bounds.md), as predicates of problems.

A lemma is used only for problems of which all its predicates are true.
"""

from slipstream.planner.model.memory import activation_memory
from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import Worker


def is_single_stage(problem: Problem, stage: int) -> bool:
    """Return whether the holders of a stage hold nothing else.

    All their compute then precedes their A. If micro-batches may be cut, the layers of the stage
    must be equal, too.
    """
    return (
        problem.grid.chains == 1
        and len(problem.grid.stages_of_column(problem.column_of[stage])) == 1
        and problem.count_parts(stage) > 0
    )


def has_single_stages(problem: Problem) -> bool:
    """Return whether workers hold at most one stage each, with pipelines of one direction."""
    grid = problem.grid
    return grid.chains == 1 and all(
        len(grid.stages_of_column(column)) <= 1 for column in range(grid.columns)
    )


def has_whole_stages(problem: Problem) -> bool:
    """Return whether a micro-batch is never cut within a stage."""
    return not problem.can_cut_stages


def runs_whole_units(problem: Problem) -> bool:
    """Return whether each worker runs whole micro-batches at each stage, at the usual speed."""
    return has_whole_stages(problem) and not problem.has_slow_workers


def has_equal_holders(problem: Problem, stage: int) -> bool:
    """Return whether the live holders of a stage have equal speed and memory.

    False if it has none.
    """
    return len({problem.workers[worker] for worker in problem.holders_by_slice[stage]}) == 1


def is_synchronous(problem: Problem) -> bool:
    """Return whether every step waits for the job's last compute op.

    All busy windows then begin with the job's first op.
    """
    return problem.optimizer == "synchronous"


def runs_own_microbatches(problem: Problem) -> bool:
    """Return whether live workers run all micro-batches of their pipeline and direction."""
    return not (problem.sharing or problem.shedding)


def keeps_microbatches_together(problem: Problem, stage: int) -> bool:
    """Return whether a stage's holder runs a micro-batch at all its stages or none.

    In one direction, true if the stage has a single live holder, or if all its holders are alive
    and run the micro-batches of their own pipeline; false in two.
    """
    holders = len(problem.holders_by_slice[stage])
    return problem.grid.chains == 1 and (
        holders == 1 or (holders == problem.grid.pipelines and runs_own_microbatches(problem))
    )


def has_equal_pipelines(problem: Problem) -> bool:
    """Return whether all workers are alive and alike, and run their own micro-batches.

    Alike are workers of the same speed and of the same memory in a column.
    """
    return runs_own_microbatches(problem) and not (
        problem.failed or problem.has_slow_workers or problem.has_unequal_memory
    )


def fills_memory_with_forwards(problem: Problem, worker: Worker) -> bool:
    """Return whether each layer that a worker holds takes memory from F to I."""
    return bool(problem.costs.activation) and all(
        problem.costs.activation[layer] for layer in problem.list_held_layers(worker)
    )


def is_memory_limited(problem: Problem, stage: int) -> bool:
    """Return whether a micro-batch takes memory from F to I at this stage."""
    return activation_memory(problem, stage) > 0


def is_provable_by_search(problem: Problem) -> bool:
    """Return whether CP-SAT's model includes every schedule of a problem.

    Layers are then in place, each held by one group.
    """
    return not problem.assigned and not problem.groups.has_shared_reductions


def pieces_are_independent(problem: Problem) -> bool:
    """Return whether every plan of the whole problem contains a plan of each subproblem.

    False if micro-batches of one subproblem may run on workers of another.
    """
    return not (problem.sharing or problem.failed)
