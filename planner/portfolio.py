"""What answers a failure: whole micro-batches at each stage, and layouts that cut some of these or move layers.

Layers in place: the problem as it is, in which live holders share micro-batches, and layouts that cut some of these
within a stage (`planner.layout.fixed`). With layers that may move, all candidates of `planner.layout` besides.
`planner.search.engine` finds the best of them.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from slipstream.planner.bound import Bound
from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.layout.candidates import candidates
from slipstream.planner.model.bounds import exact_bound
from slipstream.planner.model.from_job import equal_parts, layered_problem, with_layout
from slipstream.planner.model.layout import Layout
from slipstream.planner.model.problem import Problem, Question
from slipstream.planner.model.ticks import tick_of, unit_of
from slipstream.planner.model.work_bounds import period_bound
from slipstream.planner.options import PlanOptions
from slipstream.planner.search.incumbent import Incumbent, Proposals, divided
from slipstream.schedules.costs import LayerCosts
from slipstream.schedules.layers import layers_in
from slipstream.schedules.schedule import Worker


def proposed(options: PlanOptions, job: Job, failed: Sequence[Worker], problem: Problem | None) -> Proposals:
    """All that these options allow. `problem`: that of the options, None where it has no plan; it is the only candidate
    where nothing else can be better.
    """
    alone = options.method not in ("cp-sat", "greedy") or not (options.layers == "move" or _can_gain(options, problem))
    if problem is not None and alone:
        return Proposals(problem)
    sliced = options.slices if problem is None or options.layers == "move" else problem.sliced
    question = Question(layers=options.layers, sliced=sliced, from_checkpoint=options.from_checkpoint)
    given, below = (
        layered_problem(job, failed, question, backward=options.backward or "split",
                        optimizer=options.optimizer or "staggered", holds=dict(options.holds), down=down)
        for down in (False, True))
    costs = layer_costs(job)
    scale, units = tick_of(job) / tick_of(job, costs), unit_of(job) / unit_of(job, costs)
    if problem is not None and options.layers == "fixed":
        below = msgspec.structs.replace(below, sharing=problem.sharing, parts=equal_parts(below.grid, below.costs))
    least, given = least_of(below), _telling(given, below)

    def layouts(budget: Budget, *, seconds: float, largest_fine: float) -> Iterator[Incumbent]:
        try:
            for layout in candidates(given, budget, seconds=seconds, largest_fine=largest_fine):
                yield divided(with_layout(given, layout), least, moved=_moved(given, layout))
        except LookupError as error:
            if options.from_checkpoint:
                raise
            raise LookupError(f"{error}; `slipstream plan --layers move --from-checkpoint` takes it from a checkpoint"
                              ) from None

    return Proposals(problem and _telling(problem, below, scale, units), layouts=layouts,
                     bound=msgspec.structs.replace(least, ticks=math.floor(least.ticks / scale)),
                     units=given.grid.total_microbatches * given.grid.depth, moving=options.layers == "move")


def _can_gain(options: PlanOptions, problem: Problem | None) -> bool:
    """Whether layouts can be better than the problem as it is: with slices, or where that may have too little room."""
    return problem is not None and (
        problem.roomier or (options.slices and problem.sliced and problem.grid.chains == 1))


def least_of(below: Problem) -> Bound:
    """A bound for all layouts that the question of a problem of layers allows, where these cost no more than there.

    Any schedule stays one where ops take less time, each ending when it did and beginning later: what waits for its end
    waits no longer, no two ops of a worker overlap, an activation is held from a later F on, and no worker's window is
    longer. So it does where transfers take less, and where less memory is needed or more is there. Hence a bound for
    costs that were rounded down holds for the costs themselves, and for what they were rounded up to: the slices of
    layouts, which take the sums of their layers, and whole stages, of which each takes at least that sum.

    Where the problem shares its micro-batches, layers are in place, and bounds of whole stages, cut into equal `parts`
    at most, count, too.
    """
    found = period_bound(below)
    if below.sharing:
        ticks, counts = exact_bound(below)
        found |= Bound(math.ceil(ticks), found.scope, counts)
    return found


def _telling(problem: Problem, below: Problem, per_tick: Fraction = Fraction(1),
             per_unit: Fraction = Fraction(1)) -> Problem:
    """With the costs of layers that bounds count, so that its schedules' files tell them."""
    told = LayerCosts(per_tick=per_tick.as_integer_ratio(), per_unit=per_unit.as_integer_ratio(),
                      **msgspec.structs.asdict(below.costs))
    return msgspec.structs.replace(problem, times=msgspec.structs.replace(problem.times, of_layers=told))


def _moved(given: Problem, layout: Layout) -> int:
    """Memory of the layers that workers hold in a layout and did not hold before; without weights, their number."""
    weights = given.costs.weights if any(given.costs.weights) else (1,) * given.grid.layer_count
    return sum(weights[layer] for worker, ranges in layout.holds.items() if ranges != given.workers[worker].holds
               for layer in layers_in(ranges).difference(given.layers_held(worker)))
