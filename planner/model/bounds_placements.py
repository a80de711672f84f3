"""Bound the period wherever virtual stages are placed: lemma 12 of docs/bounds.md."""

import operator
from collections.abc import Sequence
from itertools import accumulate

from slipstream.planner.model.bounds_layouts import any_layers_bound, work_bound
from slipstream.planner.model.problem import Bound, Problem
from slipstream.schedules.schedule import Scope


def placement_bound(problem: Problem, *, input_free: bool) -> Bound:
    """Return a bound on the period for all placements of virtual stages.

    The bound is the larger of one by work and one by memory, for a problem without failures. With
    `input_free`, the first stage has no I, whichever layers it has; all of its backward is W.
    """
    from_work = Bound(
        max(work_bound(problem), any_layers_bound(problem)),
        Scope.PLACEMENT,
        "the work of all layers, shared by a pipeline's workers",
    )
    from_memory = Bound(
        memory_bound(problem, input_free=input_free),
        Scope.PLACEMENT,
        "how long the activations of all layers are held, in the memory of all workers",
    )
    return from_work | from_memory


def memory_bound(problem: Problem, *, input_free: bool) -> int:
    """Return the least period, in ticks, that memory allows for any placement.

    With `input_free`, which counts only for a split backward, the first stage has no I: the result
    is the least over all numbers of layers that it may have. 0 if memory is unlimited, or if
    weights fill it. Lemma 12 of docs/bounds.md.
    """
    costs, grid = problem.costs, problem.grid
    if problem.memory is None or not any(costs.activation):
        return 0
    # Each pipeline holds the weights of every layer at least once.
    room = sum(worker.memory for worker in problem.workers.values()) - grid.pipelines * sum(
        costs.weights
    )
    if room <= 0:
        return 0
    fused = problem.backward == "fused"
    back, stashed = costs.backward_input, 0
    if fused:
        back = tuple(map(operator.add, costs.backward_input, costs.backward_weight))
    else:
        stashed = sum(map(operator.mul, costs.weight_stash, costs.backward_weight))
    # An activation is held until F and I of all later layers have run.
    behind = _suffix_sums(costs.forward)
    total, slow = grid.total_microbatches, min(1000, problem.min_slowness)
    least = None
    work = list(accumulate(costs.work, initial=0))
    for first in range(1, grid.layer_count + 1) if input_free and not fused else (0,):
        # In each pipeline one worker runs the layers of the first stage, or two with two
        # directions.
        alone = work[first] * min(grid.microbatches) * slow // 2000
        after = _suffix_sums((*[0] * first, *back[first:]))
        lifetimes = map(operator.add, behind, after)
        held_ticks = sum(map(operator.mul, costs.activation, lifetimes))
        ticks = max(alone, -(-total * (held_ticks + stashed) * slow // (1000 * room)))
        least = ticks if least is None else min(least, ticks)
    return min(costs.closing) + (least or 0)


def _suffix_sums(values: Sequence[int]) -> list[int]:
    """Return, for each layer, the sum of its value and those of later layers."""
    return list(accumulate(reversed(values)))[::-1]
