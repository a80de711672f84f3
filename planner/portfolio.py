"""What answers a failure: whole micro-batches at each stage, and layouts that cut some of these or move layers.

Layers in place: the problem as it is, in which live holders share micro-batches, and layouts that cut some of these
within a stage (`planner.layout.fixed`). With layers that may move, all candidates of `planner.layout` besides.
`planner.search.engine` finds the best of them.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from slipstream.planner.bound import Bound
from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import LayerCosts, exact, layer_costs
from slipstream.planner.layout.candidates import candidates
from slipstream.planner.model.bounds import exact_bound
from slipstream.planner.model.from_job import layered_problem, with_layout
from slipstream.planner.model.layout import Layout
from slipstream.planner.model.problem import Problem, Question
from slipstream.planner.model.ticks import tick_of
from slipstream.planner.model.work_bounds import period_bound
from slipstream.planner.options import PlanOptions
from slipstream.planner.search.incumbent import Incumbent, Proposals, divided
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
    given = layered_problem(job, failed, question, backward=options.backward or "split",
                            optimizer=options.optimizer or "staggered", holds=dict(options.holds))
    costs = layer_costs(job)
    tick = tick_of(job, costs)
    scale = tick_of(job) / tick  # ticks of a layout's problem in one of the problem as it is
    rounding = _rounding(job, costs, tick, scale)
    least = rounding.sure(period_bound(given))
    if problem is not None and options.layers == "fixed":
        ticks, counts = exact_bound(problem)
        least |= Bound(rounding.least(ticks * scale), problem.scope, counts)

    def layouts(budget: Budget, *, seconds: float, largest_fine: float) -> Iterator[Incumbent]:
        try:
            for layout in candidates(given, budget, seconds=seconds, largest_fine=largest_fine):
                yield divided(with_layout(given, layout), least, moved=_moved(given, layout))
        except LookupError as error:
            if options.from_checkpoint:
                raise
            raise LookupError(f"{error}; `slipstream plan --layers move --from-checkpoint` takes it from a checkpoint"
                              ) from None

    return Proposals(problem, bound=rounding.of_stages(least, scale), layouts=layouts,
                     units=given.grid.total_microbatches * given.grid.depth, moving=options.layers == "move")


def _can_gain(options: PlanOptions, problem: Problem | None) -> bool:
    """Whether layouts can be better than the problem as it is: with slices, or where that may have too little room."""
    return problem is not None and (
        problem.roomier or (options.slices and problem.sliced and problem.grid.chains == 1))


class _Rounding(NamedTuple):
    """What rounding to ticks may have taken or added, where times are finer than a tick."""

    share: Fraction
    """Of an op."""
    ticks: int
    """Of all that a bound counts beside the ops: at most once, each all-reduce, optimizer step and, there and back,
    transfer of a stage or of its layers."""

    def least(self, ticks: Fraction) -> int:
        """What of a bound holds for all candidates, however their times were rounded."""
        return max(0, math.ceil(ticks * (1 - self.share)) - self.ticks)

    def sure(self, bound: Bound) -> Bound:
        """The same of a value."""
        return msgspec.structs.replace(bound, ticks=self.least(Fraction(bound.ticks)))

    def of_stages(self, bound: Bound, scale: Fraction) -> Bound:
        """A bound in ticks of layers as one in ticks of whole stages, of which each is `scale` of those."""
        ticks = max(0, math.floor(bound.ticks / scale * (1 - self.share)) - self.ticks)
        return msgspec.structs.replace(bound, ticks=ticks)


def _rounding(job: Job, costs: LayerCosts, tick: Fraction, scale: Fraction) -> _Rounding:
    """`tick` is that of layers, in seconds; `scale`: how many of these are one of stages."""
    ops = [value / tick for value in (*costs.forward, *costs.backward_input, *costs.backward_weight) if value]
    others = [value / tick for value in (*costs.optimizer, *costs.all_reduce, exact(job.time.transfer))]
    if scale.denominator == 1 and all(value.denominator == 1 for value in (*ops, *others)):
        return _Rounding(Fraction(0), 0)
    stages = len(job.columns)
    return _Rounding(min(Fraction(1), 1 / min(ops)), 2 * (len(costs.forward) + math.ceil(scale) * stages)
                     + 2 * math.ceil(scale) * stages)


def _moved(given: Problem, layout: Layout) -> int:
    """Memory of the layers that workers hold in a layout and did not hold before; without weights, their number."""
    weights = given.costs.weights if any(given.costs.weights) else (1,) * given.grid.layer_count
    return sum(weights[layer] for worker, ranges in layout.holds.items() if ranges != given.workers[worker].holds
               for layer in layers_in(ranges).difference(given.layers_held(worker)))
