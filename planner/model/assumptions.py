"""Assumptions of the lemmas on bounds (docs/bounds.md), as predicates of problems.

A bound is used only where its predicates are true.
"""

from slipstream.planner.model.problem import Problem


def is_provable_by_search(problem: Problem) -> bool:
    """Return whether CP-SAT's model includes every schedule of a problem: layers in place, each held by one group.

    A group is the workers that hold the same layers; its windows end together.
    """
    return not problem.assigned and not problem.groups.has_shared_reductions


def pieces_are_independent(problem: Problem) -> bool:
    """Return whether any plan of the whole problem contains a plan of each subproblem.

    It does not if micro-batches of one may run on workers of another.
    """
    return not (problem.sharing or problem.failed)
